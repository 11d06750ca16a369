"""FLUX.1 (Black Forest Labs, 2024, https://github.com/black-forest-labs/flux)."""

from typing import Any

import torch
from torch import Tensor

from diffusionpipe.models.base.pipeline_call import packed, unpacked
from diffusionpipe.models.cut.streams import Streams
from diffusionpipe.models.families import described
from diffusionpipe.models.families.described import Components, Described, Shape, exactly, family, patches

_PATCH = 2


def _predict(transformer: Any, *, noisy: Tensor, timesteps: Tensor, **given: Tensor) -> Tensor:
    sizes = (1, noisy.shape[-2] // _PATCH, noisy.shape[-1] // _PATCH)
    tokens = transformer(
        hidden_states=packed(noisy, _PATCH),
        encoder_hidden_states=given["text_states"],
        pooled_projections=given["pooled_text"],
        timestep=timesteps / 1000,
        txt_ids=torch.zeros(given["text_states"].shape[1], 3, device=noisy.device),
        img_ids=torch.cartesian_prod(*(torch.arange(size, device=noisy.device) for size in sizes)),
        guidance=given.get("guidance"),
        return_dict=False,
    )[0]
    return unpacked(tokens, noisy.shape[1:], _PATCH)


def _problems(components: Components, _: Shape) -> list[str]:
    found, wanted = components["transformer"].out_channels, components["transformer"].config.in_channels
    return [] if found == wanted else [f"transformer: out_channels {found} is not in_channels {wanted}"]


FAMILY = family(
    Described(
        vae="AutoencoderKL",
        transformer="FluxTransformer2DModel",
        texts=(described.pooled_clip("text_encoder", None), described.t5("text_encoder_2", 512)),
        predict=_predict,
        reads=("text_states", "pooled_text"),
        patch=_PATCH,
        guidance=1.0,
        embedded_guidance=3.5,
        needs={
            "patch_size": exactly(1, "for the latents are cut before it"),
            "in_channels": patches(_PATCH),
            "joint_attention_dim": described.t5_width("text_encoder_2"),
            "pooled_projection_dim": described.pooled_width("text_encoder"),
        },
        problems=_problems,
        streams=Streams(first=("time_text_embed", "context_embedder", "x_embedder"), joined=("norm_out",)),
        sample_size=128,
        has_even_sigmas=True,
    )
)
