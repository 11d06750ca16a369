"""Wan 2.1 (Wan team, 2025, https://arxiv.org/abs/2503.20314), from text, on clips of one frame."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from diffusionpipe.models.described import Described, Text, family
from diffusionpipe.models.family import Prompt

_PATCH = 2


def _states(encoder: Any, ids: Tensor, mask: Tensor) -> Tensor:
    states: Tensor = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    return states * mask.unsqueeze(-1).to(states.dtype)  # (B, T, D)


def _predict(transformer: Any, *, noisy: Tensor, timesteps: Tensor, text_states: Tensor) -> Tensor:
    prediction: Tensor = transformer(
        hidden_states=noisy, timestep=timesteps, encoder_hidden_states=text_states, return_dict=False
    )[0]
    return prediction


def _problems(components: Mapping[str, Any], latents: tuple[int, ...]) -> list[str]:
    config = components["transformer"].config
    expected = {
        "in_channels": (latents[0], "the channels of the VAE's latents: pictures cannot be given to start from"),
        "out_channels": (latents[0], "the channels of the VAE's latents"),
        "text_dim": (components["text_encoder"].config.d_model, "the width of the text encoder"),
        "patch_size": ((1, _PATCH, _PATCH), "the patches of the published models"),
        "image_dim": (None, "for there is no encoder of pictures"),
    }
    return [
        f"transformer: {field} {config[field]} is not {value}, {what}"
        for field, (value, what) in expected.items()
        if config[field] != value and tuple(config[field] or ()) != value
    ]


FAMILY = family(
    Described(
        vae="AutoencoderKLWan",
        transformer="WanTransformer3DModel",
        texts=(
            Text(component="text_encoder", kind="UMT5EncoderModel", prompt=Prompt(length=512), states=_states),
        ),
        predict=_predict,
        reads=("text_states",),
        patch=_PATCH,
        guidance=5.0,
        problems=_problems,
        absent=("transformer_2",),
    )
)
