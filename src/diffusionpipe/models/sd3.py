"""Stable Diffusion 3 (Esser et al., 2024, https://arxiv.org/abs/2403.03206) as layers.

Text comes from three frozen encoders: the penultimate states of two CLIPs side by side, padded to T5's width and put
before T5's states; the CLIPs' pooled embeddings are embedded with the time.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from diffusionpipe.errors import ModelError
from diffusionpipe.models.autoencoder import encoder_inputs, encoder_layers, latent_shape, vae_problems
from diffusionpipe.models.clip import pooled_layers, text_inputs, text_problems
from diffusionpipe.models.family import Family, dtype_of, joint_layers, set_trainable
from diffusionpipe.models.graph import Layer, LayerGraph, attribute
from diffusionpipe.models.objective import Objective, loss_layer, noise_layer, objective_inputs
from diffusionpipe.models.t5 import t5_inputs, t5_layers, t5_problems

T5_LENGTH = 256
"""Tokens that T5 reads, as diffusers' pipeline does by default."""
_TRAINABLE = ("transformer",)


def sd3_graph(
    components: Mapping[str, Any],
    *,
    objective: Objective,
    resolution: int,
    train: Collection[str] = _TRAINABLE,
    dtype: str = "float32",
) -> LayerGraph:
    """The graph over three text encoders, "vae" and "transformer" for square pictures of `resolution` pixels.

    Raises ModelError for everything in the configurations that the layers would not run exactly.
    """
    first, second, third, vae, transformer = (components[name] for name in FAMILY.components)
    latents = latent_shape(vae, resolution)
    problems = [
        *text_problems(first),
        *text_problems(second, component="text_encoder_2"),
        *t5_problems(third, component="text_encoder_3"),
        *vae_problems(vae),
        *_transformer_problems(transformer, latents, first, second, third),
    ]
    if problems:
        raise ModelError("\n".join(problems))
    set_trainable({name: components[name] for name in FAMILY.components}, train, _TRAINABLE)
    return LayerGraph(
        layers=(
            *_text_layers(first, second, third),
            *encoder_layers(vae),
            noise_layer(transformer.config.patch_size),
            *_transformer_layers(transformer),
            loss_layer(),
        ),
        components={**{name: components[name] for name in FAMILY.components}, "objective": objective},
        inputs=(
            *encoder_inputs(vae, resolution, dtype),
            *text_inputs(first),
            *text_inputs(second, "input_ids_2"),
            *t5_inputs("input_ids_3", T5_LENGTH),
            *objective_inputs(latents, dtype),
        ),
        patch=transformer.config.patch_size,
    )


FAMILY = Family(
    components={
        "text_encoder": "CLIPTextModelWithProjection",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "text_encoder_3": "T5EncoderModel",
        "vae": "AutoencoderKL",
        "transformer": "SD3Transformer2DModel",
    },
    trainable=_TRAINABLE,
    graph=sd3_graph,
    guidance=7.0,
)


def _transformer_problems(
    transformer: Any, latents: tuple[int, int, int], first: Any, second: Any, third: Any
) -> list[str]:
    config = transformer.config
    channels, size, _ = latents
    expected = {
        "in_channels": (channels, "the VAE's latent channels"),
        "out_channels": (channels, "the VAE's latent channels"),
        "joint_attention_dim": (third.config.d_model, "the width of T5"),
        "pooled_projection_dim": (
            first.config.projection_dim + second.config.projection_dim,
            "the width of both pooled embeddings",
        ),
    }
    problems = [
        f"transformer: {field} {config[field]} is not {value}, {what}"
        for field, (value, what) in expected.items()
        if config[field] != value
    ]
    clip_width = first.config.hidden_size + second.config.hidden_size
    if clip_width > third.config.d_model:
        problems.append(f"the CLIP encoders' states of width {clip_width} exceed T5's width {third.config.d_model}")
    if size % config.patch_size or size // config.patch_size > config.pos_embed_max_size:
        problems.append(
            f"transformer: latents of size {size} are no multiple of the patch size {config.patch_size} up to "
            f"{config.patch_size * config.pos_embed_max_size}"
        )
    return problems


def _text_layers(first: Any, second: Any, third: Any) -> tuple[Layer, ...]:
    names = ("text_encoder", "text_encoder_2", "text_encoder_3")
    states = tuple(f"{name}.states" for name in names)
    pooled = tuple(f"{name}.pooled_text" for name in names[:2])
    return (
        *pooled_layers(first, component=names[0], ids="input_ids", states=states[0], pooled=pooled[0]),
        *pooled_layers(second, component=names[1], ids="input_ids_2", states=states[1], pooled=pooled[1]),
        Layer(
            name="text_encoder_2.pooled_text.joined",
            component=names[1],
            reads=pooled,
            writes=("pooled_text",),
            run=_join_pooled,
        ),
        *t5_layers(third, component=names[2], ids="input_ids_3", states=states[2]),
        Layer(
            name="text_encoder_3.text_states",
            component=names[2],
            reads=states,
            writes=("text_states",),
            run=_join_states,
        ),
    )


def _join_pooled(_: Any, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    return (torch.cat([first, second], dim=-1),)  # (B, D1 + D2)


def _join_states(_: Any, first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, ...]:
    clip = torch.cat([first, second], dim=-1)  # (B, T, D1 + D2)
    clip = functional.pad(clip, (0, third.shape[-1] - clip.shape[-1]))  # (B, T, D)
    return (torch.cat([clip, third], dim=-2),)  # (B, T + T3, D)


def _transformer_layers(transformer: Any) -> tuple[Layer, ...]:
    names = [f"transformer_blocks.{i}" for i in range(len(transformer.transformer_blocks))]
    blocks = joint_layers("transformer", {name: partial(_run_block, name) for name in names})
    embed = partial(Layer, component="transformer")
    return (
        embed(
            name="transformer.time_text_embed",
            reads=("timesteps", "pooled_text"),
            writes=("temb",),
            modules=("time_text_embed",),
            run=_embed_time,
        ),
        embed(
            name="transformer.context_embedder",
            reads=("text_states",),
            writes=("transformer.text",),
            modules=("context_embedder",),
            run=_embed_text,
        ),
        embed(
            name="transformer.pos_embed",
            reads=("noisy",),
            writes=("transformer.picture",),
            modules=("pos_embed",),
            run=_patchify,
        ),
        *blocks,
        embed(
            name="transformer.proj_out",
            reads=(blocks[-1].writes[0], "temb"),
            writes=("prediction",),
            modules=("norm_out", "proj_out"),
            run=_unpatchify,
        ),
    )


def _embed_time(transformer: Any, timesteps: Tensor, pooled: Tensor) -> tuple[Tensor, ...]:
    embed = transformer.time_text_embed
    return (embed(timesteps, pooled.to(dtype_of(embed))),)  # (B, D)


def _embed_text(transformer: Any, text_states: Tensor) -> tuple[Tensor, ...]:
    embed = transformer.context_embedder
    return (embed(text_states.to(dtype_of(embed))),)  # (B, T, D)


def _patchify(transformer: Any, noisy: Tensor) -> tuple[Tensor, ...]:
    embed = transformer.pos_embed
    return (embed(noisy.to(dtype_of(embed))).contiguous(),)  # (B, T, D)


def _run_block(name: str, transformer: nn.Module, picture: Tensor, text: Tensor, temb: Tensor) -> tuple[Tensor, Tensor]:
    block: Any = attribute(transformer, name)
    text, picture = block(hidden_states=picture, encoder_hidden_states=text, temb=temb)
    return picture, text


def _unpatchify(transformer: Any, hidden: Tensor, temb: Tensor) -> tuple[Tensor, ...]:
    hidden = transformer.proj_out(transformer.norm_out(hidden, temb))  # (B, T, P * P * C)
    size, patch, channels = int(hidden.shape[1] ** 0.5), transformer.config.patch_size, transformer.out_channels
    hidden = hidden.reshape(-1, size, size, patch, patch, channels)
    hidden = torch.einsum("nhwpqc->nchpwq", hidden)
    return (hidden.reshape(-1, channels, size * patch, size * patch),)  # (B, C, H, W)
