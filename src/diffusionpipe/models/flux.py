"""FLUX.1 (Black Forest Labs, 2024, https://github.com/black-forest-labs/flux) as layers.

Text comes from two frozen encoders: T5's states, and the pooled embedding of a CLIP, which is embedded with the time
and, in the distilled model, with the guidance. Latents are cut into patches of 2 x 2 as they enter the transformer.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import ModelError
from diffusionpipe.models.autoencoder import encoder_inputs, encoder_layers, latent_shape, vae_problems
from diffusionpipe.models.clip import pooled_layers, text_inputs, text_problems
from diffusionpipe.models.family import Family, dtype_of, joint_layers, set_trainable
from diffusionpipe.models.graph import Layer, LayerGraph, attribute
from diffusionpipe.models.objective import Objective, loss_layer, noise_layer, objective_inputs
from diffusionpipe.models.t5 import t5_inputs, t5_layers, t5_problems

T5_LENGTH = 512
"""Tokens that T5 reads, as diffusers' pipeline does by default."""
_TRAINABLE = ("transformer",)
_PATCH = 2
_TIME_SCALE = 1000


def flux_graph(
    components: Mapping[str, Any],
    *,
    objective: Objective,
    resolution: int,
    train: Collection[str] = _TRAINABLE,
    dtype: str = "float32",
) -> LayerGraph:
    """The graph over "text_encoder", "text_encoder_2", "vae" and "transformer" for square pictures.

    A model with guidance embeddings reads the raw input "guidance", the guidance that the prediction stands for.
    Registers the buffer "rotations" in the transformer: the rotary position embedding, as complex numbers, so that no
    cast to the parameters' dtype reaches it.

    Raises ModelError for everything in the configurations that the layers would not run exactly.
    """
    clip, t5, vae, transformer = (components[name] for name in FAMILY.components)
    latents = latent_shape(vae, resolution)
    problems = [
        *text_problems(clip),
        *t5_problems(t5, component="text_encoder_2"),
        *vae_problems(vae),
        *_transformer_problems(transformer, latents, clip, t5),
    ]
    if problems:
        raise ModelError("\n".join(problems))
    transformer.register_buffer("rotations", _rotations(transformer, latents[-1] // _PATCH), persistent=False)
    set_trainable({name: components[name] for name in FAMILY.components}, train, _TRAINABLE)
    has_guidance = transformer.config.guidance_embeds
    return LayerGraph(
        layers=(
            *pooled_layers(
                clip, component="text_encoder", ids="input_ids", states="text_encoder.states", pooled="pooled_text"
            ),
            *t5_layers(t5, component="text_encoder_2", ids="input_ids_2", states="text_states"),
            *encoder_layers(vae),
            noise_layer(_PATCH),
            *_transformer_layers(transformer),
            loss_layer(),
        ),
        components={**{name: components[name] for name in FAMILY.components}, "objective": objective},
        inputs=(
            *encoder_inputs(vae, resolution, dtype),
            *text_inputs(clip),
            *t5_inputs("input_ids_2", T5_LENGTH),
            *((TensorSpec(name="guidance", shape=()),) if has_guidance else ()),
            *objective_inputs(latents, dtype),
        ),
        patch=_PATCH,
        has_even_sigmas=True,
    )


FAMILY = Family(
    components={
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "T5EncoderModel",
        "vae": "AutoencoderKL",
        "transformer": "FluxTransformer2DModel",
    },
    trainable=_TRAINABLE,
    graph=flux_graph,
    guidance=1.0,
    embedded_guidance=3.5,
    sample_size=128,
)


def _transformer_problems(transformer: Any, latents: tuple[int, int, int], clip: Any, t5: Any) -> list[str]:
    config = transformer.config
    channels, size, _ = latents
    expected = {
        "patch_size": (1, "for the latents are cut before it"),
        "in_channels": (channels * _PATCH**2, "a patch of the VAE's latents"),
        "joint_attention_dim": (t5.config.d_model, "the width of T5"),
        "pooled_projection_dim": (clip.config.hidden_size, "the width of CLIP"),
    }
    problems = [
        f"transformer: {field} {config[field]} is not {value}, {what}"
        for field, (value, what) in expected.items()
        if config[field] != value
    ]
    if transformer.out_channels != config.in_channels:
        problems.append(f"transformer: out_channels {transformer.out_channels} is not in_channels {config.in_channels}")
    if size % _PATCH:
        problems.append(f"transformer: latents of size {size} cannot be cut into patches of {_PATCH}")
    return problems


def _rotations(transformer: Any, size: int) -> Tensor:
    """Cosine and sine of the position of every token, text first, as complex64 (T + size * size, head's width)."""
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    picture = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(size * size, 3)
    cosine, sine = transformer.pos_embed(torch.cat([torch.zeros(T5_LENGTH, 3), picture]))
    return torch.complex(cosine, sine)


def _transformer_layers(transformer: Any) -> tuple[Layer, ...]:
    names = [f"transformer_blocks.{i}" for i in range(len(transformer.transformer_blocks))]
    names += [f"single_transformer_blocks.{i}" for i in range(len(transformer.single_transformer_blocks))]
    blocks = joint_layers("transformer", {name: partial(_run_block, name) for name in names}, extra=("rotations",))
    guidance = ("guidance",) if transformer.config.guidance_embeds else ()
    embed = partial(Layer, component="transformer")
    return (
        embed(
            name="transformer.time_text_embed",
            reads=("timesteps", "pooled_text", *guidance),
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
            name="transformer.x_embedder",
            reads=("noisy",),
            writes=("transformer.picture",),
            modules=("x_embedder",),
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


def _embed_time(transformer: Any, timesteps: Tensor, pooled: Tensor, *guidance: Tensor) -> tuple[Tensor, ...]:
    embed = transformer.time_text_embed
    dtype = dtype_of(embed)
    # Diffusers' model reads times in [0, 1] and scales them itself, in the dtype of its weights.
    times = [(timesteps / _TIME_SCALE).to(dtype) * _TIME_SCALE, *(g.to(dtype) * _TIME_SCALE for g in guidance)]
    return (embed(*times, pooled.to(dtype)),)  # (B, D)


def _embed_text(transformer: Any, text_states: Tensor) -> tuple[Tensor, ...]:
    embed = transformer.context_embedder
    return (embed(text_states.to(dtype_of(embed))),)  # (B, T, D)


def _patchify(transformer: Any, noisy: Tensor) -> tuple[Tensor, ...]:
    B, C, H, W = noisy.shape
    patches = noisy.reshape(B, C, H // _PATCH, _PATCH, W // _PATCH, _PATCH).permute(0, 2, 4, 1, 3, 5)
    patches = patches.reshape(B, -1, C * _PATCH**2)  # (B, T, 4C)
    embed = transformer.x_embedder
    return (embed(patches.to(dtype_of(embed))),)  # (B, T, D)


def _run_block(name: str, transformer: Any, picture: Tensor, text: Tensor, temb: Tensor) -> tuple[Tensor, Tensor]:
    block: Any = attribute(transformer, name)
    rotations = transformer.rotations
    text, picture = block(
        hidden_states=picture,
        encoder_hidden_states=text,
        temb=temb,
        image_rotary_emb=(rotations.real, rotations.imag),
    )
    return picture, text


def _unpatchify(transformer: Any, hidden: Tensor, temb: Tensor) -> tuple[Tensor, ...]:
    hidden = transformer.proj_out(transformer.norm_out(hidden, temb))  # (B, T, 4C)
    B, T, width = hidden.shape
    size, channels = int(T**0.5), width // _PATCH**2
    hidden = hidden.reshape(B, size, size, channels, _PATCH, _PATCH).permute(0, 3, 1, 4, 2, 5)
    return (hidden.reshape(B, channels, size * _PATCH, size * _PATCH),)  # (B, C, H, W)
