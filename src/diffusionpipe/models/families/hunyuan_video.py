"""HunyuanVideo (Kong et al., 2024, https://arxiv.org/abs/2412.03603), from text."""

from typing import Any

from torch import Tensor

from diffusionpipe.models.base.family import Prompt
from diffusionpipe.models.base.pipeline_call import PipelineCall
from diffusionpipe.models.families import described
from diffusionpipe.models.families.described import Described, Text, exactly, family, latents

_TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: 1. The main "
    "content and theme of the video.2. The color, shape, size, texture, quantity, text, and spatial relationships of "
    "the objects.3. Actions, events, behaviors temporal relationships, physical movement changes of the objects.4. "
    "background environment, light, style and atmosphere.5. camera angles, movements, and transitions used in the "
    "video:<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
)
_PROMPT = Prompt(length=256 + 95, template=_TEMPLATE, dropped=95)  # diffusers' `DEFAULT_PROMPT_TEMPLATE`


def _states(encoder: Any, ids: Tensor, mask: Tensor) -> Tensor:
    # The mask is causal and padding comes last, so no token of the caption sees it.
    # The last layer but two, as diffusers' `num_hidden_layers_to_skip` of 2 says.
    states: Tensor = encoder(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[-3]
    return described.masked(states, mask)[:, _PROMPT.dropped :]  # (B, T, D)


def _predict(transformer: Any, *, noisy: Tensor, timesteps: Tensor, **given: Tensor) -> Tensor:
    prediction: Tensor = transformer(
        *(noisy, timesteps, given["text_states"]),
        encoder_attention_mask=given["input_mask"][:, _PROMPT.dropped :],
        pooled_projections=given["pooled_text"],
        # diffusers' pipeline multiplies the guidance by 1000 too.
        guidance=given["guidance"] * 1000 if "guidance" in given else None,
        return_dict=False,
    )[0]
    return prediction


FAMILY = family(
    Described(
        vae="AutoencoderKLHunyuanVideo",
        transformer="HunyuanVideoTransformer3DModel",
        texts=(Text(kind="LlamaModel", prompt=_PROMPT, states=_states), described.pooled_clip("text_encoder_2")),
        predict=_predict,
        reads=("text_states", "input_mask", "pooled_text"),
        patch=2,
        guidance=1.0,
        embedded_guidance=6.0,
        needs={
            "in_channels": latents(),
            "out_channels": latents(),
            "text_embed_dim": described.text_width,
            "pooled_projection_dim": described.pooled_width("text_encoder_2"),
            "patch_size": exactly(2),
            "patch_size_t": exactly(1),
            "image_condition_type": exactly(None, "for there are no pictures to start from"),
        },
        call=PipelineCall(scale="true_cfg_scale", options={"num_frames": 1}),
    )
)
