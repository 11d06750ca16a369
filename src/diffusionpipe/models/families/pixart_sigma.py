"""PixArt-Sigma (Chen et al., 2024, https://arxiv.org/abs/2403.04692).

A model that also predicts variances is trained on the first half alone, as with DiT.
"""

from typing import Any

import torch
from torch import Tensor

from diffusionpipe.models.base.family import Prompt, lowered
from diffusionpipe.models.base.pipeline_call import PipelineCall
from diffusionpipe.models.families.described import Components, Described, Text, exactly, family, latents, text_width

_PATCH = 2


def _predict(transformer: Any, *, noisy: Tensor, timesteps: Tensor, text_states: Tensor, input_mask: Tensor) -> Tensor:
    sizes = {"resolution": None, "aspect_ratio": None}
    output: Tensor = transformer(
        noisy, text_states, timesteps, sizes, encoder_attention_mask=input_mask, return_dict=False
    )[0]
    return output[:, : noisy.shape[1]]


def _with_variances(prediction: Tensor, config: Any) -> Tensor:
    return torch.cat([prediction] * (config.out_channels // config.in_channels), 1)  # the pipeline drops the second


def _outputs(components: Components, channels: int) -> tuple[object, str]:
    is_wide = components["transformer"].config.out_channels == 2 * channels
    return channels * (1 + is_wide), "the channels of the VAE's latents, or twice as many with variances"


def _plain(components: Components, channels: int) -> tuple[object, str]:
    config = components["transformer"].config
    # diffusers takes None for yes where sample_size is 128.
    is_default = config.use_additional_conditions is None and config.sample_size != 128
    return None if is_default else False, "for the others are of PixArt-Alpha"


FAMILY = family(
    Described(
        vae="AutoencoderKL",
        transformer="PixArtTransformer2DModel",
        texts=(Text(kind="T5EncoderModel", prompt=Prompt(length=300, clean=lowered)),),
        predict=_predict,
        reads=("text_states", "input_mask"),
        patch=_PATCH,
        guidance=4.5,
        needs={
            "in_channels": latents(),
            "out_channels": _outputs,
            "caption_channels": text_width,
            "patch_size": exactly(_PATCH),
            "use_additional_conditions": _plain,
        },
        call=PipelineCall(returns=_with_variances, options={"use_resolution_binning": False}),
        has_adapters=False,
    )
)
