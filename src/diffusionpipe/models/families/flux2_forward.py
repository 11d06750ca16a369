"""The common part of FLUX.2 [dev] and [klein]: states of three layers of a language model, and tokens of 1 x 1."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.models.base.family import Prompt
from diffusionpipe.models.base.pipeline_call import PipelineCall, packed, unpacked
from diffusionpipe.models.families.described import Components, Described, Text, exactly, latents


def _states(read: tuple[int, ...], encoder: Any, ids: Tensor, mask: Tensor) -> Tensor:
    model = encoder.model
    model = getattr(model, "language_model", model)
    states = model(input_ids=ids, attention_mask=mask, use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[layer] for layer in read], dim=-1)  # (B, T, 3D), also of padding, which is read too


def _predict(transformer: Any, *, noisy: Tensor, timesteps: Tensor, text_states: Tensor, **told: Tensor) -> Tensor:
    H, W = noisy.shape[-2:]
    # Four axes: time, row, column, and the number of a word.
    places = [torch.arange(size, device=noisy.device) for size in (1, H, W, 1)]
    words = [torch.arange(size, device=noisy.device) for size in (1, 1, 1, text_states.shape[1])]
    prediction = transformer(
        hidden_states=packed(noisy, 1),
        encoder_hidden_states=text_states,
        timestep=timesteps / 1000,
        img_ids=torch.cartesian_prod(*places),
        txt_ids=torch.cartesian_prod(*words),
        guidance=told.get("guidance"),
        return_dict=False,
    )[0]
    return unpacked(prediction, noisy.shape[1:], 1)


def _tokens(prediction: Tensor, config: Any) -> Tensor:
    return packed(prediction, 1)


def _text_width(components: Components, channels: int) -> tuple[object, str]:
    width = components["text_encoder"].config.get_text_config().hidden_size
    return 3 * width, "the width of the text encoder, three times"


def flux2(*, kind: str, prompt: Prompt, layers: tuple[int, int, int], **more: Any) -> Described:
    """The description of one of FLUX.2's families.

    Args:
        kind: class of the text encoder.
        prompt: the texts that it reads.
        layers: the numbers of its layers after which states are read, diffusers' `text_encoder_out_layers`.
        more: other fields of `Described`: guidance, and the guidance of distilled models.
    """
    return Described(
        vae="AutoencoderKLFlux2",
        transformer="Flux2Transformer2DModel",
        texts=(Text(kind=kind, prompt=prompt, states=partial(_states, layers), stacked=len(layers)),),
        predict=_predict,
        reads=("text_states",),
        patch=1,
        needs={
            "in_channels": latents(),
            "joint_attention_dim": _text_width,
            "patch_size": exactly(1, "for the latents are cut before it"),
            "guidance_embeds": exactly("embedded_guidance" in more, "as published"),
        },
        call=PipelineCall(
            reads=partial(unpacked, patch=1),
            returns=_tokens,
            scale=None if "embedded_guidance" in more else "guidance_scale",
        ),
        sample_size=128,
        **more,
    )
