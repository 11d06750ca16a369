"""Wan 2.1 (Wan team, 2025, https://arxiv.org/abs/2503.20314), from text and from known frames.

A transformer of image to video without CLIP states has 36 input channels in place of 16, and fills holes of clips.
"""

from typing import Any

import torch
from torch import Tensor

from diffusionpipe.models.base.family import Prompt
from diffusionpipe.models.base.pipeline_call import PipelineCall
from diffusionpipe.models.families.described import (
    Components,
    Described,
    Text,
    exactly,
    family,
    last_states,
    latents,
    text_width,
)
from diffusionpipe.models.parts.hole_channels import wan_fills_holes
from diffusionpipe.models.parts.masks import CHANNELS, clip_masks

_PATCH = 2


def _cleaned(caption: str) -> str:
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean  # entities of HTML, and spaces

    cleaned: str = prompt_clean(caption)
    return cleaned


def _predict(transformer: Any, *, noisy: Tensor, timesteps: Tensor, text_states: Tensor, **given: Tensor) -> Tensor:
    hidden = torch.cat([noisy, given[CHANNELS]], dim=1) if CHANNELS in given else noisy  # (B, 16 or 36, F, H, W)
    prediction: Tensor = transformer(
        hidden_states=hidden, timestep=timesteps, encoder_hidden_states=text_states, return_dict=False
    )[0]
    return prediction


def _in_channels(components: Components, channels: int) -> tuple[object, str]:
    config = components["transformer"].config
    if wan_fills_holes(config, components["vae"].config):
        return config.in_channels, "the channels of latents, of a mask and of a clip"
    return channels, "the channels of the VAE's latents, nor these with the channels of a mask and a clip"


FAMILY = family(
    Described(
        vae="AutoencoderKLWan",
        transformer="WanTransformer3DModel",
        texts=(Text(kind="UMT5EncoderModel", prompt=Prompt(length=512, clean=_cleaned), states=last_states),),
        predict=_predict,
        reads=("text_states",),
        patch=_PATCH,
        guidance=5.0,
        needs={
            "in_channels": _in_channels,
            "out_channels": latents(),
            "text_dim": text_width,
            "patch_size": exactly((1, _PATCH, _PATCH)),
            "image_dim": exactly(None, "for there is no encoder of pictures"),
        },
        call=PipelineCall(options={"num_frames": 1}, pipeline="WanPipeline"),
        masks=lambda vae, transformer: clip_masks if wan_fills_holes(transformer.config, vae.config) else None,
        absent=("transformer_2", "image_encoder"),
        settings={"expand_timesteps": False, "boundary_ratio": None},  # of Wan 2.2
    )
)
