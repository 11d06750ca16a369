"""Class-conditional DiT (Peebles & Xie, 2023, https://arxiv.org/abs/2212.09748) as layers, with AutoencoderKL.

diffusers' output layer reads the embedding of time and class of the first block. Here that embedding is a layer of its
own: it writes "conditioning.0" for the first block and "conditioning.out" for the output layer, two runs of the same
weights as in diffusers, so that the sum of their gradients is formed where the weights are, and bit for bit the same.
So `cutting.cut` cannot make these layers, with or without the labels' dropout: first block and output layer would own
the same weights.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import ModelError
from diffusionpipe.models.base.family import HINT, Family, Step, chain, dtype_of, set_trainable, unsupported
from diffusionpipe.models.graphs.graph import Layer, LayerGraph, attribute
from diffusionpipe.models.objectives.objective import Objective, loss_layer, noise_layer, objective_inputs
from diffusionpipe.models.parts.autoencoder import encoder_inputs, encoder_layers, latent_shape, vae_problems

_ALLOWED: dict[str, tuple[object, ...]] = {"dropout": (0, 0.0), "norm_type": ("ada_norm_zero",)}
_TRAINABLE = ("transformer",)


def dit_graph(
    components: Mapping[str, Any],
    *,
    objective: Objective,
    resolution: int,
    train: Collection[str] = _TRAINABLE,
    dtype: str = "float32",
) -> LayerGraph:
    """The layer graph over "vae" and "transformer" for square pictures of `resolution` pixels.

    The raw input "labels" holds class numbers; the null class of classifier-free guidance is the number of classes and
    is put in by the data path: the labels are embedded as they come, because the label embeddings' own dropout, which
    draws from the global generator in each block again, is switched off (the row of the null class stays).

    A model that also predicts variances (out_channels = 2 * in_channels) is trained on the first half alone; the second
    half, which diffusers' DiTPipeline drops as well, gets zero gradients.

    Raises ModelError for everything in the configurations that the layers would not run exactly.
    """
    vae, transformer = components["vae"], components["transformer"]
    latents = latent_shape(vae, resolution)
    problems = [*vae_problems(vae), *_transformer_problems(transformer, latents)]
    if problems:
        raise ModelError("\n".join(problems))
    set_trainable({name: components[name] for name in FAMILY.components}, train, _TRAINABLE)
    for block in transformer.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = 0.0
    return LayerGraph(
        layers=(
            *encoder_layers(vae),
            noise_layer(transformer.config.patch_size),
            *_transformer_layers(transformer),
            loss_layer(),
        ),
        components={"vae": vae, "transformer": transformer, "objective": objective},
        inputs=(
            *encoder_inputs(vae, resolution, dtype),
            TensorSpec(name="labels", shape=(), dtype="int64"),
            *objective_inputs(latents, dtype),
        ),
        patch=transformer.config.patch_size,
    )


FAMILY = Family(
    convolution="pos_embed.proj",
    components={"vae": "AutoencoderKL", "transformer": "DiTTransformer2DModel"},
    trainable=_TRAINABLE,
    graph=dit_graph,
    guidance=4.0,
)


def _transformer_problems(transformer: Any, latents: tuple[int, int, int]) -> list[str]:
    config = transformer.config
    problems = unsupported("transformer", config, _ALLOWED)
    channels, size, _ = latents
    if config.in_channels != channels:
        hint = HINT if config.in_channels == 2 * channels else ""
        problems.append(f"transformer: in_channels {config.in_channels} is not the VAE's {channels}{hint}")
    if transformer.out_channels not in (channels, 2 * channels):
        problems.append(
            f"transformer: out_channels {transformer.out_channels} must be {channels}, or {2 * channels} with variances"
        )
    if size % config.patch_size:
        problems.append(f"transformer: latents of size {size} cannot be cut into patches of {config.patch_size}")
    return problems


def _transformer_layers(transformer: Any) -> tuple[Layer, ...]:
    embedding = "transformer_blocks.0.norm1.emb"
    conditioning = Layer(
        name="transformer.conditioning",
        component="transformer",
        reads=("timesteps", "labels"),
        writes=("conditioning.0", "conditioning.out"),
        modules=(embedding,),
        run=_embed_twice,
    )
    steps = [Step(name="pos_embed", run=_patchify, modules=("pos_embed",))]
    for i, block in enumerate(transformer.transformer_blocks):
        name = f"transformer_blocks.{i}"
        # The first block's embedding belongs to the layer before; everything else of a block is its own.
        modules = (
            tuple(f"{name}.norm1.{child}" for child, _ in block.norm1.named_children() if child != "emb")
            + tuple(f"{name}.{child}" for child, _ in block.named_children() if child != "norm1")
            if i == 0
            else (name,)
        )
        reads = ("conditioning.0",) if i == 0 else ("timesteps", "labels")
        run = partial(_run_first_block if i == 0 else _run_block, name)
        steps.append(Step(name=name, run=run, modules=modules, reads=reads))
    out = ("norm_out", "proj_out_1", "proj_out_2")
    steps.append(Step(name="proj_out", run=_unpatchify, modules=out, reads=("conditioning.out",)))
    return (conditioning, *chain("transformer", "noisy", steps, "prediction"))


def _embed_twice(transformer: Any, timesteps: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    embed = transformer.transformer_blocks[0].norm1.emb
    dtype = dtype_of(embed)
    return embed(timesteps, labels, hidden_dtype=dtype), embed(timesteps, labels, hidden_dtype=dtype)  # (B, D)


def _patchify(transformer: Any, noisy: Tensor) -> Tensor:
    hidden: Tensor = transformer.pos_embed(noisy.to(dtype_of(transformer.pos_embed)))  # (B, T, D)
    return hidden


def _run_block(name: str, transformer: nn.Module, hidden: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
    block: Any = attribute(transformer, name)
    result: Tensor = block(hidden, timestep=timesteps, class_labels=labels)
    return result


def _run_first_block(name: str, transformer: nn.Module, hidden: Tensor, conditioning: Tensor) -> Tensor:
    """The result of the first block, (B, T, D), for an embedding of time and class that is given.

    It is written out here, because diffusers' own block always embeds time and class itself.
    """
    block: Any = attribute(transformer, name)
    norm = block.norm1
    modulation = norm.linear(norm.silu(conditioning))  # (B, 6D)
    shift_attn, scale_attn, gate_attn, shift_ff, scale_ff, gate_ff = modulation.chunk(6, dim=1)
    attended = block.attn1(norm.norm(hidden) * (1 + scale_attn[:, None]) + shift_attn[:, None])
    hidden = gate_attn.unsqueeze(1) * attended + hidden
    fed = block.ff(block.norm3(hidden) * (1 + scale_ff[:, None]) + shift_ff[:, None])
    result: Tensor = gate_ff.unsqueeze(1) * fed + hidden
    return result


def _unpatchify(transformer: Any, hidden: Tensor, conditioning: Tensor) -> Tensor:
    shift, scale = transformer.proj_out_1(functional.silu(conditioning)).chunk(2, dim=1)
    hidden = transformer.norm_out(hidden) * (1 + scale[:, None]) + shift[:, None]
    hidden = transformer.proj_out_2(hidden)  # (B, T, P * P * C)
    # Pictures are square, so the side follows from the number of tokens.
    size, patch, channels = int(hidden.shape[1] ** 0.5), transformer.patch_size, transformer.out_channels
    hidden = hidden.reshape(-1, size, size, patch, patch, channels)
    hidden = torch.einsum("nhwpqc->nchpwq", hidden)
    output = hidden.reshape(-1, channels, size * patch, size * patch)  # (B, C, H, W)
    # The second half states variances.
    return output[:, : transformer.config.in_channels]
