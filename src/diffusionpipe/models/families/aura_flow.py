"""AuraFlow (fal, 2024, https://huggingface.co/fal/AuraFlow-v0.3)."""

from typing import Any

from torch import Tensor

from diffusionpipe.models.base.family import Prompt
from diffusionpipe.models.base.pipeline_call import PipelineCall
from diffusionpipe.models.families.described import Described, Text, exactly, family, last_states, latents, text_width

_PATCH = 2


def _predict(transformer: Any, *, noisy: Tensor, timesteps: Tensor, text_states: Tensor) -> Tensor:
    prediction: Tensor = transformer(
        hidden_states=noisy, timestep=timesteps / 1000, encoder_hidden_states=text_states, return_dict=False
    )[0]
    return prediction


FAMILY = family(
    Described(
        vae="AutoencoderKL",
        transformer="AuraFlowTransformer2DModel",
        texts=(Text(kind="UMT5EncoderModel", prompt=Prompt(length=256), states=last_states),),
        predict=_predict,
        reads=("text_states",),
        patch=_PATCH,
        guidance=3.5,
        needs={
            "in_channels": latents(),
            "out_channels": latents(),
            "joint_attention_dim": text_width,
            "patch_size": exactly(_PATCH),
        },
        call=PipelineCall(),
    )
)
