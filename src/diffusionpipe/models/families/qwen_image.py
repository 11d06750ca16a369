"""Qwen-Image (Qwen team, 2025, https://arxiv.org/abs/2508.02324)."""

from typing import Any

from torch import Tensor

from diffusionpipe.models.base.family import Prompt
from diffusionpipe.models.base.pipeline_call import packed, packed_call, unpacked
from diffusionpipe.models.families.described import Described, Text, exactly, family, masked, patches, text_width

_PATCH = 2
PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
"""The text after a caption in the encoder's template; `PREFIX` is the text before it."""
_PROMPT = Prompt(length=512 + 34, template=PREFIX + "{}" + SUFFIX, dropped=34)
"""The prompt with which the model was trained: diffusers' `prompt_template_encode` and `max_sequence_length`."""


def _states(encoder: Any, ids: Tensor, mask: Tensor) -> Tensor:
    # The mask is causal and padding comes last, so no token of the caption sees it.
    states: Tensor = encoder.model.language_model(input_ids=ids, use_cache=False).last_hidden_state
    return masked(states, mask)[:, _PROMPT.dropped :]  # (B, T, D)


def _predict(transformer: Any, *, noisy: Tensor, timesteps: Tensor, text_states: Tensor, input_mask: Tensor) -> Tensor:
    tokens = transformer(
        hidden_states=packed(noisy, _PATCH),
        timestep=timesteps / 1000,
        encoder_hidden_states=text_states,
        encoder_hidden_states_mask=input_mask[:, _PROMPT.dropped :].bool(),
        img_shapes=[[(1, noisy.shape[-2] // _PATCH, noisy.shape[-1] // _PATCH)]],
        return_dict=False,
    )[0]
    return unpacked(tokens, noisy.shape[1:], _PATCH)


FAMILY = family(
    Described(
        vae="AutoencoderKLQwenImage",
        transformer="QwenImageTransformer2DModel",
        texts=(Text(kind="Qwen2_5_VLForConditionalGeneration", prompt=_PROMPT, states=_states),),
        predict=_predict,
        reads=("text_states", "input_mask"),
        patch=_PATCH,
        guidance=4.0,
        needs={
            "in_channels": patches(_PATCH),
            "joint_attention_dim": text_width,
            "zero_cond_t": exactly(False, "for there are no pictures to edit"),
            "use_additional_t_cond": exactly(False, "for there are no layers of pictures"),
        },
        call=packed_call(_PATCH, scale="true_cfg_scale"),
        sample_size=128,
    )
)
