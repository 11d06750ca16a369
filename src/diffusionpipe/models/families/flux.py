"""FLUX.1 (Black Forest Labs, 2024, https://github.com/black-forest-labs/flux)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.models.base.pipeline_call import packed, unpacked
from diffusionpipe.models.cut.streams import BlockStreams
from diffusionpipe.models.families import described
from diffusionpipe.models.families.described import Components, Described, Shape, exactly, family, patches
from diffusionpipe.models.parts.hole_channels import FLUX_PATCH, flux_fills_holes
from diffusionpipe.models.parts.masks import CHANNELS, fill_masks


def _predict(transformer: Any, *, noisy: Tensor, timesteps: Tensor, **given: Tensor) -> Tensor:
    sizes = (1, noisy.shape[-2] // FLUX_PATCH, noisy.shape[-1] // FLUX_PATCH)
    hidden = packed(noisy, FLUX_PATCH)  # (B, T, 64)
    if CHANNELS in given:
        hidden = torch.cat([hidden, packed(given[CHANNELS], FLUX_PATCH)], dim=2)  # (B, T, 384)
    # Times count to 1000 here and to 1 there; tokens of the text have no place.
    tokens = transformer(
        hidden_states=hidden,
        encoder_hidden_states=given["text_states"],
        pooled_projections=given["pooled_text"],
        timestep=timesteps / 1000,
        txt_ids=torch.zeros(given["text_states"].shape[1], 3, device=noisy.device),
        img_ids=torch.cartesian_prod(*(torch.arange(size, device=noisy.device) for size in sizes)),
        guidance=given.get("guidance"),
        return_dict=False,
    )[0]
    return unpacked(tokens, noisy.shape[1:], FLUX_PATCH)


def _problems(components: Components, latents: Shape) -> list[str]:
    vae, transformer = components["vae"], components["transformer"]
    found, wanted, what = transformer.out_channels, transformer.config.in_channels, "in_channels"
    if flux_fills_holes(transformer.config, vae.config):
        wanted, what = latents[0] * FLUX_PATCH**2, "a patch of latents,"
    return [] if found == wanted else [f"transformer: out_channels {found} is not {what} {wanted}"]


def _in_channels(components: Components, channels: int) -> tuple[object, str]:
    config = components["transformer"].config
    if flux_fills_holes(config, components["vae"].config):
        return config.in_channels, "a patch of latents, of a picture and of a mask"
    return patches(FLUX_PATCH)(components, channels)


_DESCRIBED = Described(
    vae="AutoencoderKL",
    transformer="FluxTransformer2DModel",
    texts=(described.pooled_clip("text_encoder", None), described.t5("text_encoder_2", 512)),
    predict=_predict,
    reads=("text_states", "pooled_text"),
    patch=FLUX_PATCH,
    guidance=1.0,
    embedded_guidance=3.5,
    needs={
        "patch_size": exactly(1, "for the latents are cut before it"),
        "in_channels": _in_channels,
        "joint_attention_dim": described.t5_width("text_encoder_2"),
        "pooled_projection_dim": described.pooled_width("text_encoder"),
    },
    problems=_problems,
    streams=BlockStreams(first=("time_text_embed", "context_embedder", "x_embedder"), joined=("norm_out",)),
    sample_size=128,
    masks=lambda vae, transformer: fill_masks if flux_fills_holes(transformer.config, vae.config) else None,
    has_even_sigmas=True,
)
FAMILY = family(_DESCRIBED)
FILL = family(replace(_DESCRIBED, embedded_guidance=30.0))
"""The family of FLUX.1 Fill, which differs from FLUX.1 in the guidance with which diffusers' pipeline draws."""
