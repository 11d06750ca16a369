"""AuraFlow (fal, 2024, https://huggingface.co/fal/AuraFlow-v0.3)."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from diffusionpipe.models.described import Described, Text, expected, family, last_states
from diffusionpipe.models.family import Prompt
from diffusionpipe.models.pipeline_call import PipelineCall

_PATCH = 2


def _predict(transformer: Any, *, noisy: Tensor, timesteps: Tensor, text_states: Tensor) -> Tensor:
    prediction: Tensor = transformer(
        hidden_states=noisy, timestep=timesteps / 1000, encoder_hidden_states=text_states, return_dict=False
    )[0]
    return prediction


def _problems(components: Mapping[str, Any], latents: tuple[int, ...]) -> list[str]:
    values: dict[str, tuple[object, str]] = {
        "in_channels": (latents[0], "the channels of the VAE's latents"),
        "out_channels": (latents[0], "the channels of the VAE's latents"),
        "joint_attention_dim": (components["text_encoder"].config.d_model, "the width of the text encoder"),
        "patch_size": (_PATCH, "the patches of the published models"),
    }
    return expected("transformer", components["transformer"].config, values)


FAMILY = family(
    Described(
        vae="AutoencoderKL",
        transformer="AuraFlowTransformer2DModel",
        texts=(Text(component="text_encoder", kind="UMT5EncoderModel", prompt=Prompt(length=256), states=last_states),),
        predict=_predict,
        reads=("text_states",),
        patch=_PATCH,
        guidance=3.5,
        problems=_problems,
        call=PipelineCall(),
    )
)
