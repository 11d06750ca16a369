"""Stable Diffusion XL (Podell et al., 2023, https://arxiv.org/abs/2307.01952) as layers.

Two frozen CLIP text encoders give the penultimate states, side by side, and the second its pooled embedding; that and
the picture's sizes ("time_ids") are embedded with the time.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import ModelError
from diffusionpipe.ir.size import Clip
from diffusionpipe.models.base.family import WHOLE, CaptionReading, Family, dtype_of, set_trainable
from diffusionpipe.models.families.unet import UNet, unet_layers, unet_problems
from diffusionpipe.models.graphs.graph import Layer, LayerGraph
from diffusionpipe.models.objectives.objective import Objective, loss_layer, noise_layer, objective_inputs
from diffusionpipe.models.parts.autoencoder import encoder_inputs, encoder_layers, latent_shape, vae_problems
from diffusionpipe.models.parts.clip import (
    joined_chunks,
    penultimate_layers,
    pooled_layers,
    text_inputs,
    text_problems,
    zeroed_where_marked,
)
from diffusionpipe.models.parts.hole_channels import unet_fills_holes
from diffusionpipe.models.parts.masks import MaskedInputs, unet_masks

_TRAINABLE = ("unet",)


def sdxl_graph(
    components: Mapping[str, Any],
    *,
    objective: Objective,
    resolution: int,
    train: Collection[str] = _TRAINABLE,
    dtype: str = "float32",
    captions: CaptionReading = WHOLE,
    clip: Clip | None = None,
) -> LayerGraph:
    """The layer graph over "text_encoder", "text_encoder_2", "vae" and "unet" for square pictures of `resolution`.

    `clip`: the size of pictures, in place of `resolution`. The raw input "time_ids" holds the original height and
    width, the top and left of the crop, and the height and width wanted.

    Raises ModelError for everything in the configurations that the layers would not run exactly.
    """
    first, second, vae, unet = (components[name] for name in FAMILY.components)
    problems = [
        *text_problems(first),
        *text_problems(second, component="text_encoder_2"),
        *vae_problems(vae),
        *_unet_problems(unet, vae, first, second),
    ]
    if problems:
        raise ModelError("\n".join(problems))
    set_trainable({name: components[name] for name in FAMILY.components}, train, _TRAINABLE)
    picture = clip or resolution
    latents, reads_mask = latent_shape(vae, picture), unet_fills_holes(unet.config, vae.config)
    masks = unet_masks(vae, picture, dtype) if reads_mask else MaskedInputs()
    return LayerGraph(
        layers=(
            *_text_layers(first, second),
            *encoder_layers(vae),
            *masks.layers,
            noise_layer(),
            _time_layer(),
            *unet_layers(UNet(model=unet, reads_mask=reads_mask), latents[-2:]),
            loss_layer(),
        ),
        components={**{name: components[name] for name in FAMILY.components}, "objective": objective},
        inputs=(
            *encoder_inputs(vae, picture, dtype),
            *masks.inputs,
            *text_inputs(first, chunks=captions.chunks),
            *text_inputs(second, "input_ids_2", chunks=captions.chunks),
            TensorSpec(name="time_ids", shape=(6,)),
            *objective_inputs(latents, dtype),
        ),
    )


FAMILY = Family(
    convolution="conv_in",
    places="conv_in",
    components={
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "vae": "AutoencoderKL",
        "unet": "UNet2DConditionModel",
    },
    trainable=_TRAINABLE,
    graph=sdxl_graph,
    guidance=5.0,
    has_aspects=True,
    has_chunks=True,
    settings={"requires_aesthetics_score": False},  # a score in place of the wanted sizes
    zeroed="force_zeros_for_empty_prompt",
)
INPAINT = replace(FAMILY, places=None)
"""The family of the inpainting pipeline: it cannot be trained on patches, because it reads a mask."""


def _unet_problems(unet: Any, vae: Any, first: Any, second: Any) -> list[str]:
    problems = unet_problems(
        unet,
        vae,
        text_width=first.config.hidden_size + second.config.hidden_size,
        addition="text_time",
        may_fill=True,
    )
    if not problems:
        # Height and width of the original, of the crop's corner, and of the size wanted.
        expected = second.config.projection_dim + 6 * unet.config.addition_time_embed_dim
        if unet.config.projection_class_embeddings_input_dim != expected:
            problems.append(
                f"unet: projection_class_embeddings_input_dim {unet.config.projection_class_embeddings_input_dim} is "
                f"not {expected}, the pooled text and six embedded sizes"
            )
    return problems


def _text_layers(first: Any, second: Any) -> tuple[Layer, ...]:
    join = Layer(
        name="text_encoder_2.text_states",
        component="text_encoder_2",
        reads=("text_encoder.states", "text_encoder_2.states", "input_ids"),
        writes=("text_states",),
        run=_join,
    )
    return (
        *penultimate_layers(first, component="text_encoder", ids="input_ids", states="text_encoder.states"),
        *pooled_layers(
            second,
            component="text_encoder_2",
            ids="input_ids_2",
            states="text_encoder_2.states",
            pooled="pooled_text",
            zeroes_marked=True,
        ),
        join,
    )


def _join(_: Any, first: Tensor, second: Tensor, input_ids: Tensor) -> tuple[Tensor, ...]:
    states = joined_chunks(torch.cat([first, second], dim=-1))  # (B, T, D1 + D2)
    return (zeroed_where_marked(states, input_ids),)


def _time_layer() -> Layer:
    return Layer(
        name="unet.time_embedding",
        component="unet",
        reads=("timesteps", "pooled_text", "time_ids"),
        writes=("temb",),
        modules=("time_proj", "time_embedding", "add_time_proj", "add_embedding"),
        run=_embed_time,
    )


def _embed_time(unet: Any, timesteps: Tensor, pooled: Tensor, time_ids: Tensor) -> tuple[Tensor, ...]:
    time = unet.time_embedding(unet.time_proj(timesteps).to(dtype_of(unet.time_embedding)))  # (B, D)
    # (6 B, D) becomes (B, 6 D): six sizes of each sample.
    sizes = unet.add_time_proj(time_ids.flatten()).reshape(len(pooled), -1)
    added = unet.add_embedding(torch.cat([pooled, sizes], dim=-1).to(time.dtype))
    return (time + added,)
