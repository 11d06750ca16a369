"""Krea 2 (Krea, 2026), as diffusers' Krea2Pipeline runs it."""

from typing import Any

import torch
from torch import Tensor

from diffusionpipe.models.base.family import Prompt
from diffusionpipe.models.base.pipeline_call import packed, packed_call, unpacked
from diffusionpipe.models.families.described import Described, Text, exactly, family, patches, text_width
from diffusionpipe.models.families.qwen_image import PREFIX, SUFFIX

_LAYERS = (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)
"""The indices in the encoder's `hidden_states` of the states that the transformer reads."""
_PROMPT = Prompt(length=512 + 34, template=PREFIX + "{}", suffix=SUFFIX, dropped=34)
"""The prompt that diffusers' pipeline encodes around a caption, with its `max_sequence_length` of 512."""


def _states(encoder: Any, ids: Tensor, mask: Tensor) -> Tensor:
    positions = (mask.cumsum(1) - 1).clamp(min=0).expand(3, -1, -1)  # padding, before the suffix, takes no position
    states = encoder.language_model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, output_hidden_states=True
    ).hidden_states
    return torch.cat([states[layer] for layer in _LAYERS], dim=-1)[:, _PROMPT.dropped :]  # (B, T, 12D)


def _predict(transformer: Any, *, noisy: Tensor, timesteps: Tensor, text_states: Tensor, input_mask: Tensor) -> Tensor:
    rows, columns = noisy.shape[-2] // 2, noisy.shape[-1] // 2
    places = [torch.arange(size, device=noisy.device) for size in (1, rows, columns)]
    words = torch.zeros(text_states.shape[1], 3, device=noisy.device)
    tokens = transformer(
        hidden_states=packed(noisy, 2),
        encoder_hidden_states=text_states.unflatten(-1, (len(_LAYERS), -1)),
        timestep=timesteps / 1000,
        position_ids=torch.cat([words, torch.cartesian_prod(*places)]),
        encoder_attention_mask=input_mask[:, _PROMPT.dropped :].bool(),
        return_dict=False,
    )[0]
    return unpacked(tokens, noisy.shape[1:], 2)


FAMILY = family(
    Described(
        vae="AutoencoderKLQwenImage",
        transformer="Krea2Transformer2DModel",
        texts=(Text(kind="Qwen3VLModel", prompt=_PROMPT, states=_states, stacked=len(_LAYERS)),),
        predict=_predict,
        reads=("text_states", "input_mask"),
        patch=2,
        guidance=4.5,
        needs={"in_channels": patches(2), "text_hidden_dim": text_width}
        | {"num_text_layers": exactly(len(_LAYERS), "the layers of the text encoder that are read")},
        call=packed_call(2, rows=lambda rows: rows[..., None], unguided=0.0),
        settings={"text_encoder_select_layers": list(_LAYERS), "patch_size": 2},
        sample_size=128,
    )
)
