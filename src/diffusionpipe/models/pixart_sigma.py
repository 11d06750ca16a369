"""PixArt-Sigma (Chen et al., 2024, https://arxiv.org/abs/2403.04692).

A model that also predicts variances is trained on the first half alone, as with DiT.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.models.described import Described, Text, expected, family
from diffusionpipe.models.family import Prompt
from diffusionpipe.models.pipeline_call import PipelineCall

_PATCH = 2


def _lowered(caption: str) -> str:
    return caption.lower().strip()


def _predict(transformer: Any, *, noisy: Tensor, timesteps: Tensor, text_states: Tensor, input_mask: Tensor) -> Tensor:
    output: Tensor = transformer(
        noisy,
        timestep=timesteps,
        encoder_hidden_states=text_states,
        encoder_attention_mask=input_mask,
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        return_dict=False,
    )[0]
    return output[:, : noisy.shape[1]]


def _with_variances(prediction: Tensor, config: Any) -> Tensor:
    return torch.cat([prediction] * (config.out_channels // config.in_channels), 1)  # the pipeline drops the second


def _problems(components: Mapping[str, Any], latents: tuple[int, ...]) -> list[str]:
    config = components["transformer"].config
    values: dict[str, tuple[object, str]] = {
        "in_channels": (latents[0], "the channels of the VAE's latents"),
        "caption_channels": (components["text_encoder"].config.d_model, "the width of T5"),
        "patch_size": (_PATCH, "the patches of the published models"),
    }
    problems = expected("transformer", config, values)
    if config.use_additional_conditions or (config.use_additional_conditions is None and config.sample_size == 128):
        problems.append("transformer: use_additional_conditions must be false: it is for PixArt-Alpha")
    if config.out_channels not in (latents[0], 2 * latents[0]):
        problems.append(
            f"transformer: out_channels {config.out_channels} must be {latents[0]}, or {2 * latents[0]} with variances"
        )
    return problems


FAMILY = replace(
    family(
        Described(
            vae="AutoencoderKL",
            transformer="PixArtTransformer2DModel",
            texts=(Text(component="text_encoder", kind="T5EncoderModel", prompt=Prompt(length=300, clean=_lowered)),),
            predict=_predict,
            reads=("text_states", "input_mask"),
            patch=_PATCH,
            guidance=4.5,
            problems=_problems,
            call=PipelineCall(returns=_with_variances, options={"use_resolution_binning": False}),
        )
    ),
    has_adapters=False,
)
