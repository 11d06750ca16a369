"""LTX-Video (HaCohen et al., 2025, https://arxiv.org/abs/2501.00103), from text."""

from typing import Any

from torch import Tensor

from diffusionpipe.models.base.family import Prompt
from diffusionpipe.models.base.pipeline_call import packed, packed_call, unpacked
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

_PATCH = 1
_FRAMES, _SHRINK = 8, 32
"""The number of frames of a token, and its side in pixels; positions are measured in seconds and pixels."""


def _predict(transformer: Any, *, noisy: Tensor, timesteps: Tensor, frame_rate: Tensor, **texts: Tensor) -> Tensor:
    seconds = (_FRAMES / frame_rate).view(-1, 1, 1, 1, 1)  # of a token, for each sample
    tokens = transformer(
        packed(noisy, _PATCH),
        *(texts["text_states"], timesteps, texts["input_mask"]),
        num_frames=noisy.shape[2],
        height=noisy.shape[-2],
        width=noisy.shape[-1],
        rope_interpolation_scale=(seconds, _SHRINK, _SHRINK),
        return_dict=False,
    )[0]
    return unpacked(tokens, noisy.shape[1:], _PATCH)


def _problems(components: Components, _: Shape) -> list[str]:
    vae, found = components["vae"], []
    sizes = {"frames": (vae.temporal_compression_ratio, _FRAMES), "pictures": (vae.spatial_compression_ratio, _SHRINK)}
    found += [f"vae: it shrinks {what} {it} times, not {ours}" for what, (it, ours) in sizes.items() if it != ours]
    if any(vae.config.decoder_inject_noise):
        found.append("vae: decoder_inject_noise is set; a decoder that adds noise of its own is not supported")
    return found


FAMILY = family(
    Described(
        vae="AutoencoderKLLTXVideo",
        transformer="LTXVideoTransformer3DModel",
        texts=(Text(kind="T5EncoderModel", prompt=Prompt(length=128), sees_padding=True),),
        predict=_predict,
        reads=("text_states", "input_mask"),
        patch=_PATCH,
        guidance=3.0,
        frame_rate=25.0,
        needs={
            "in_channels": latents(),
            "out_channels": latents(),
            "caption_channels": text_width,
            "patch_size": exactly(_PATCH),
            "patch_size_t": exactly(_PATCH),
        },
        problems=_problems,
        call=packed_call(_PATCH, options={"num_frames": 1}),
    )
)
