"""Wan 2.1 (Wan team, 2025, https://arxiv.org/abs/2503.20314), from text."""

from typing import Any

from torch import Tensor

from diffusionpipe.models.base.family import Prompt
from diffusionpipe.models.base.pipeline_call import PipelineCall
from diffusionpipe.models.families.described import Described, Text, exactly, family, last_states, latents, text_width

_PATCH = 2


def _cleaned(caption: str) -> str:
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean  # entities of HTML, and spaces

    cleaned: str = prompt_clean(caption)
    return cleaned


def _predict(transformer: Any, *, noisy: Tensor, timesteps: Tensor, text_states: Tensor) -> Tensor:
    prediction: Tensor = transformer(
        hidden_states=noisy, timestep=timesteps, encoder_hidden_states=text_states, return_dict=False
    )[0]
    return prediction


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
            "in_channels": latents(why="the channels of the VAE's latents: pictures cannot be given to start from"),
            "out_channels": latents(),
            "text_dim": text_width,
            "patch_size": exactly((1, _PATCH, _PATCH)),
            "image_dim": exactly(None, "for there is no encoder of pictures"),
        },
        call=PipelineCall(options={"num_frames": 1}),
        absent=("transformer_2",),
        settings={"expand_timesteps": False, "boundary_ratio": None},  # of Wan 2.2
    )
)
