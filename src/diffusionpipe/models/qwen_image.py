"""Qwen-Image (Qwen team, 2025, https://arxiv.org/abs/2508.02324)."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from diffusionpipe.models.described import Described, Text, family
from diffusionpipe.models.family import Prompt

_PATCH = 2
_PROMPT = Prompt(
    length=512 + 34,
    template=(
        "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
        "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    dropped=34,
)
"""What the model was trained with: diffusers' `prompt_template_encode` and `max_sequence_length`."""


def _states(encoder: Any, ids: Tensor, mask: Tensor) -> Tensor:
    # The mask is causal and padding comes last, so no token of the caption sees it.
    states: Tensor = encoder.model.language_model(input_ids=ids, use_cache=False).last_hidden_state
    states = states * mask.unsqueeze(-1).to(states.dtype)
    return states[:, _PROMPT.dropped :]  # (B, T, D)


def _predict(transformer: Any, *, noisy: Tensor, timesteps: Tensor, text_states: Tensor, input_mask: Tensor) -> Tensor:
    B, C, _, H, W = noisy.shape
    tokens = noisy.view(B, C, H // _PATCH, _PATCH, W // _PATCH, _PATCH).permute(0, 2, 4, 1, 3, 5)
    tokens = transformer(
        hidden_states=tokens.reshape(B, H // _PATCH * (W // _PATCH), C * _PATCH**2),
        timestep=timesteps / 1000,
        encoder_hidden_states=text_states,
        encoder_hidden_states_mask=input_mask[:, _PROMPT.dropped :].bool(),
        img_shapes=[[(1, H // _PATCH, W // _PATCH)]],
        return_dict=False,
    )[0]
    tokens = tokens.view(B, H // _PATCH, W // _PATCH, C, _PATCH, _PATCH).permute(0, 3, 1, 4, 2, 5)
    return tokens.reshape(B, C, 1, H, W)


def _problems(components: Mapping[str, Any], latents: tuple[int, ...]) -> list[str]:
    config, width = components["transformer"].config, components["text_encoder"].config.get_text_config().hidden_size
    expected = {
        "in_channels": (latents[0] * _PATCH**2, "a patch of the VAE's latents"),
        "joint_attention_dim": (width, "the width of the text encoder"),
        "zero_cond_t": (False, "for there are no pictures to edit"),
        "use_additional_t_cond": (False, "for there are no layers of pictures"),
    }
    return [
        f"transformer: {field} {config[field]} is not {value}, {what}"
        for field, (value, what) in expected.items()
        if config[field] != value
    ]


FAMILY = family(
    Described(
        vae="AutoencoderKLQwenImage",
        transformer="QwenImageTransformer2DModel",
        texts=(
            Text(
                component="text_encoder",
                kind="Qwen2_5_VLForConditionalGeneration",
                prompt=_PROMPT,
                states=_states,
            ),
        ),
        predict=_predict,
        reads=("text_states", "input_mask"),
        patch=_PATCH,
        guidance=4.0,
        problems=_problems,
    )
)
