"""Sana (Xie et al., 2024, https://arxiv.org/abs/2410.10629)."""

from typing import Any

import torch
from torch import Tensor

from diffusionpipe.models.base.family import Prompt, lowered
from diffusionpipe.models.base.pipeline_call import PipelineCall
from diffusionpipe.models.families.described import (
    Components,
    Described,
    Shape,
    Text,
    exactly,
    family,
    latents,
    text_width,
)
from diffusionpipe.models.families.sana_instruction import INSTRUCTION

_PROMPT = Prompt(length=640, dropped=340, instruction=INSTRUCTION, clean=lowered)
"""The prompt for any instruction of up to 342 tokens; diffusers' `max_sequence_length` is 300."""


def _kept(tokens: Tensor) -> Tensor:
    return torch.cat([tokens[:, :1], tokens[:, _PROMPT.dropped + 1 :]], 1)  # (B, T, ...)


def _states(encoder: Any, ids: Tensor, mask: Tensor) -> Tensor:
    # Positions count tokens alone, so the gap before the last tokens changes nothing.
    # Each token reads itself and the tokens before it, without the gap.
    dtype, length = encoder.embed_tokens.weight.dtype, ids.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril() & mask.bool()[:, None, None]
    bias = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)  # (B, 1, T, T)
    # The window of sliding attention holds all tokens (`_problems`), so both kinds have one mask.
    masks = {"full_attention": bias, "sliding_attention": bias}
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return _kept(encoder(ids, attention_mask=masks, position_ids=positions, use_cache=False).last_hidden_state)


def _predict(transformer: Any, *, noisy: Tensor, timesteps: Tensor, text_states: Tensor, input_mask: Tensor) -> Tensor:
    times, mask = timesteps * transformer.config.timestep_scale, _kept(input_mask)
    prediction: Tensor = transformer(noisy, text_states, times, encoder_attention_mask=mask, return_dict=False)[0]
    return prediction


def _problems(components: Components, _: Shape) -> list[str]:
    window = components["text_encoder"].config.sliding_window
    return [] if window >= _PROMPT.length else [f"text_encoder: sliding_window {window} is below {_PROMPT.length}"]


FAMILY = family(
    Described(
        vae="AutoencoderDC",
        transformer="SanaTransformer2DModel",
        texts=(Text(kind="Gemma2Model", prompt=_PROMPT, states=_states),),
        predict=_predict,
        reads=("text_states", "input_mask"),
        patch=1,
        guidance=4.5,
        needs={"in_channels": latents(), "out_channels": latents(), "caption_channels": text_width}
        | {"patch_size": exactly(1), "guidance_embeds": exactly(False, "for those are of Sana-Sprint")},
        problems=_problems,
        call=PipelineCall(options={"use_resolution_binning": False}),
    )
)
