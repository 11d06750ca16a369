"""Chroma (lodestones, 2025, https://huggingface.co/lodestones/Chroma1-HD), which came from FLUX.1."""

from typing import Any

import torch
from torch import Tensor

from diffusionpipe.models.base.family import Prompt
from diffusionpipe.models.base.pipeline_call import packed, packed_call, unpacked
from diffusionpipe.models.families.described import Described, Text, family, patches, text_width

_PATCH = 2


def _predict(transformer: Any, *, noisy: Tensor, timesteps: Tensor, text_states: Tensor, input_mask: Tensor) -> Tensor:
    H, W, T = noisy.shape[-2] // _PATCH, noisy.shape[-1] // _PATCH, text_states.shape[1]
    axes = [torch.arange(size, device=noisy.device) for size in (1, H, W)]
    places = torch.arange(T, device=noisy.device)
    is_read = places <= input_mask.sum(1, keepdim=True)  # the caption and the first token of padding
    tokens = transformer(
        hidden_states=packed(noisy, _PATCH),
        timestep=timesteps / 1000,
        encoder_hidden_states=text_states,
        txt_ids=torch.zeros(T, 3, device=noisy.device, dtype=noisy.dtype),
        img_ids=torch.stack(torch.meshgrid(axes, indexing="ij"), -1).flatten(0, 2).to(noisy.dtype),
        # All tokens of the picture are read.
        attention_mask=torch.nn.functional.pad(is_read.to(noisy.dtype), (0, H * W), value=1.0),
        return_dict=False,
    )[0]
    return unpacked(tokens, noisy.shape[1:], _PATCH)


FAMILY = family(
    Described(
        vae="AutoencoderKL",
        transformer="ChromaTransformer2DModel",
        texts=(Text(kind="T5EncoderModel", prompt=Prompt(length=512)),),
        predict=_predict,
        reads=("text_states", "input_mask"),
        patch=_PATCH,
        guidance=5.0,
        needs={"in_channels": patches(_PATCH), "joint_attention_dim": text_width},
        call=packed_call(_PATCH),
        sample_size=128,
    )
)
