"""Z-Image (Tongyi-MAI, 2025, https://arxiv.org/abs/2511.22699)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.models.base.family import Prompt, question
from diffusionpipe.models.base.pipeline_call import PipelineCall
from diffusionpipe.models.families.described import (
    Components,
    Described,
    Text,
    exactly,
    family,
    latents,
    masked,
    text_width,
)
from diffusionpipe.models.families.z_image_forward import PATCH, SIZE, predict

_PROMPT = Prompt(length=512, chat=partial(question, is_thinking=True))


def _states(encoder: Any, ids: Tensor, mask: Tensor) -> Tensor:
    states: Tensor = encoder(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[-2]
    return masked(states, mask)  # (B, T, D)


def _stacked(pictures: list[Tensor], shape: Sequence[int]) -> Tensor:
    return torch.stack(pictures).view(-1, *shape)


def _negated(velocity: Tensor, config: Any) -> list[Tensor]:
    # diffusers' pipeline negates what the transformer returns; ours returns the velocity itself.
    return list(-velocity.unsqueeze(2))


def _problems(components: Components, _: Sequence[int]) -> list[str]:
    transformer = components["transformer"]
    if SIZE in transformer.all_x_embedder:
        return []
    return [f"transformer: all_patch_size {transformer.config.all_patch_size} has no {PATCH}"]


FAMILY = family(
    Described(
        vae="AutoencoderKL",
        transformer="ZImageTransformer2DModel",
        texts=(Text(kind="Qwen3Model", prompt=_PROMPT, states=_states),),
        predict=predict,
        reads=("text_states", "input_mask"),
        patch=PATCH,
        guidance=5.0,
        needs={
            "in_channels": latents(),
            "cap_feat_dim": text_width,
            "siglip_feat_dim": exactly(None, "for there is no encoder of pictures"),
        },
        problems=_problems,
        call=PipelineCall(reads=_stacked, returns=_negated, text="cap_feats", rows=list, unguided=0.0),
        sample_size=128,
    )
)
