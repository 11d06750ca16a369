"""The U-Net of Stable Diffusion 1, 2 and XL, UNet2DConditionModel, as layers.

        conv_in ─ down.0.resnets.0 ─ ... ─ mid ─ ... ─ up.n.resnets.k ─ conv_out
           └────────────│─────── skips ────────────────────┘ │
                        └────────────────────────────────────┘

Every residual block of the way up reads its skip tensor straight from the layer that wrote it, and every residual block
reads the embedded time straight from the layer that embeds it. An attention of one transformer block is one layer with
the residual block before it; of a deeper attention (SDXL) every transformer block is a layer of its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.models.base.coordinates import has_coordinates
from diffusionpipe.models.base.family import HINT, PLACED, Step, chain, dtype_of, unsupported
from diffusionpipe.models.graphs.graph import Layer, attribute
from diffusionpipe.models.parts.hole_channels import unet_fills_holes
from diffusionpipe.models.parts.masks import CHANNELS

_DOWN = ("CrossAttnDownBlock2D", "DownBlock2D")
_MID = ("UNetMidBlock2DCrossAttn",)
_UP = ("CrossAttnUpBlock2D", "UpBlock2D")
_ALLOWED: dict[str, tuple[object, ...]] = {
    "addition_embed_type": (None,),
    "attention_type": ("default",),
    "center_input_sample": (False,),
    "class_embed_type": (None,),
    "class_embeddings_concat": (False,),
    "dropout": (0, 0.0),
    "dual_cross_attention": (False,),
    "encoder_hid_dim": (None,),
    "encoder_hid_dim_type": (None,),
    "mid_block_type": _MID,
    "num_class_embeds": (None,),
    "time_cond_proj_dim": (None,),
    "time_embedding_act_fn": (None,),
    "time_embedding_type": ("positional",),
}


def unet_problems(
    unet: Any,
    vae: Any,
    *,
    text_width: int,
    component: str = "unet",
    addition: str | None = None,
    may_fill: bool = False,
) -> list[str]:
    """Sentences about settings in a U-Net's or ControlNet's configuration that its layers do not support; [] if none.

    `text_width` is the width of the text states, `addition` the kind of input that is embedded beside the time
    (`addition_embed_type`). `may_fill`: it may have the input channels of a model for inpainting.
    """
    config = unet.config
    problems = unsupported(component, config, {**_ALLOWED, "addition_embed_type": (addition,)})
    for field, kinds in (("down_block_types", _DOWN), ("up_block_types", _UP)):
        problems += [
            f"{component}: block type {kind} in {field} is not supported; supported: {', '.join(kinds)}"
            for kind in config.get(field, ())
            if kind not in kinds
        ]
    latents = vae.config.latent_channels
    channels = tuple(config[field] for field in ("in_channels", "out_channels") if field in config)
    if set(channels) != {latents} and not (may_fill and unet_fills_holes(config, vae.config)):
        hint = HINT if channels == (2 * latents, latents) else PLACED if has_coordinates(config) else ""
        problems.append(f"{component}: in_channels and out_channels {channels} must both be the VAE's {latents}{hint}")
    width = config.cross_attention_dim
    if isinstance(width, int) and width != text_width:
        problems.append(f"{component}: cross_attention_dim {width} is not the text encoder's {text_width}")
    return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class UNet:
    """A U-Net or a ControlNet, with the names of its component and of its tensor of the embedded time."""

    model: Any
    """The module: diffusers' U-Net or ControlNet."""
    component: str = "unet"
    """The name of its component."""
    time: str = "temb"
    """The name of the tensor of the embedded time."""
    reads_mask: bool = False
    """Whether it is for inpainting, so that it reads the mask channels."""


def time_layer(unet: UNet) -> Layer:
    """The layer that reads "timesteps" and writes the embedded time, the tensor `unet.time`."""
    return Layer(
        name=f"{unet.component}.time_embedding",
        component=unet.component,
        reads=("timesteps",),
        writes=(unet.time,),
        modules=("time_proj", "time_embedding"),
        run=_embed_time,
    )


def unet_layers(unet: UNet, size: Sequence[int]) -> tuple[Layer, ...]:
    """The layers of a U-Net from "noisy" to "prediction", without the time's.

    They read the embedded time and "text_states" too. `size`: height and width of the latents.
    """
    down = down_steps(unet)
    steps = [step for group in down for step in group]
    steps += [*mid_steps(unet), *up_steps(unet, skip_tensors(unet, down), size)]
    return chain(unet.component, "noisy", steps, "prediction")


def down_steps(unet: UNet) -> tuple[tuple[Step, ...], ...]:
    """The steps from the noisy latents to the middle, in groups; the last step of each group writes a skip tensor."""
    return tuple(_down(unet))


def skip_tensors(unet: UNet, down: tuple[tuple[Step, ...], ...]) -> tuple[str, ...]:
    """The names of the skip tensors that the steps of `down_steps` write, in the order in which they are written."""
    return tuple(f"{unet.component}.{group[-1].name}" for group in down)


def mid_steps(unet: UNet) -> Iterator[Step]:
    """The steps of the middle block: a residual block, then each attention with the residual block after it."""
    path = "mid_block"
    yield from _block(unet, f"{path}.resnets.0", None)
    for j in range(len(unet.model.mid_block.attentions)):
        before, resnet, attention = f"{path}.resnets.{j}", f"{path}.resnets.{j + 1}", f"{path}.attentions.{j}"
        if _depth(unet, attention) > 1:
            yield from _transformer(unet, before, attention)
            yield from _block(unet, resnet, None)
            continue
        yield Step(
            name=resnet,
            run=partial(_run_mid, resnet, attention),
            modules=(attention, resnet),
            reads=(unet.time, "text_states"),
        )


def up_steps(unet: UNet, skips: tuple[str, ...], size: Sequence[int]) -> Iterator[Step]:
    """The steps from the middle to the prediction; steps named "...resnets.<k>" also read a skip tensor.

    `skips`: the names of the skip tensors. `size`: height and width of the latents.
    """
    model, left = unet.model, list(skips)
    sizes = list(zip(*(_sizes(unet.model, side) for side in size), strict=True))
    # diffusers gives upsamplers a size only where some side cannot be halved that many times.
    is_even = all(side % 2**model.num_upsamplers == 0 for side in size)
    for i, block in enumerate(model.up_blocks):
        path = f"up_blocks.{i}"
        for j in range(len(block.resnets)):
            yield from _block(unet, f"{path}.resnets.{j}", _attention(block, path, j), left.pop())
            # The next size on the list is then the one that the upsampler has to hit.
            sizes.pop()
        for j in range(len(block.upsamplers or ())):
            name = f"{path}.upsamplers.{j}"
            yield Step(name=name, run=partial(_upsample, name, None if is_even else sizes[-1]), modules=(name,))
    norm = ("conv_norm_out", "conv_act") if model.conv_norm_out is not None else ()
    yield Step(name="conv_out", run=_conv_out, modules=(*norm, "conv_out"))


def _down(unet: UNet) -> Iterator[tuple[Step, ...]]:
    reads = (CHANNELS,) if unet.reads_mask else ()
    yield (Step(name="conv_in", run=conv_in, modules=("conv_in",), reads=reads),)
    for i, block in enumerate(unet.model.down_blocks):
        path = f"down_blocks.{i}"
        for j in range(len(block.resnets)):
            yield tuple(_block(unet, f"{path}.resnets.{j}", _attention(block, path, j)))
        for j in range(len(block.downsamplers or ())):
            name = f"{path}.downsamplers.{j}"
            yield (Step(name=name, run=partial(_downsample, name), modules=(name,)),)


def _attention(block: Any, path: str, index: int) -> str | None:
    return f"{path}.attentions.{index}" if getattr(block, "has_cross_attention", False) else None


def _depth(unet: UNet, attention: str) -> int:
    transformer: Any = attribute(unet.model, attention)
    return len(transformer.transformer_blocks)


def _block(unet: UNet, resnet: str, attention: str | None, *skip: str) -> Iterator[Step]:
    """The steps of a residual block and the attention after it; on the way up it reads the tensor `skip`."""
    is_deep = attention is not None and _depth(unet, attention) > 1
    here = None if is_deep else attention
    yield Step(
        name=resnet,
        run=partial(_run_up if skip else _run_block, resnet, here),
        modules=(resnet,) if here is None else (resnet, here),
        reads=(*skip, unet.time) if here is None else (*skip, unet.time, "text_states"),
    )
    if is_deep:
        assert attention is not None
        yield from _transformer(unet, resnet, attention)


def _transformer(unet: UNet, before: str, attention: str) -> Iterator[Step]:
    """The steps of an attention, one for each transformer block; the last adds the tensor of the step `before`."""
    depth = _depth(unet, attention)
    first, *between, last = (f"{attention}.transformer_blocks.{k}" for k in range(depth))
    modules = (f"{attention}.norm", f"{attention}.proj_in", first)
    yield Step(name=first, run=partial(_run_first, attention, first), modules=modules, reads=("text_states",))
    for block in between:
        yield Step(name=block, run=partial(_run_between, block), modules=(block,), reads=("text_states",))
    yield Step(
        name=last,
        run=partial(_run_last, attention, last),
        modules=(last, f"{attention}.proj_out"),
        reads=("text_states", f"{unet.component}.{before}"),
    )


def _sizes(unet: Any, size: int) -> list[int]:
    """The heights (or widths) of the skip tensors, in the order in which they are written, for latents of this height.

    Where one is odd, diffusers gives the upsampler its size, because doubling would miss it.
    """
    sizes = [size]
    for block in unet.down_blocks:
        sizes += [sizes[-1]] * len(block.resnets)
        for downsampler in block.downsamplers or ():
            padding = 2 * downsampler.padding or 1  # diffusers pads one side only where the padding is 0
            # The size after a convolution with a kernel of 3 and a stride of 2.
            sizes.append((sizes[-1] + padding - 3) // 2 + 1)
    return sizes


def _embed_time(unet: Any, timesteps: Tensor) -> tuple[Tensor, ...]:
    return (unet.time_embedding(unet.time_proj(timesteps).to(dtype_of(unet.time_embedding))),)  # (B, D)


def conv_in(unet: Any, noisy: Tensor, *more: Tensor) -> Tensor:
    """The result of the first convolution for the noisy latents; `more`: tensors with channels after theirs."""
    wide = torch.cat([noisy, *(channels.to(noisy.dtype) for channels in more)], dim=1) if more else noisy
    hidden: Tensor = unet.conv_in(wide.to(dtype_of(unet.conv_in)))
    return hidden


def _call(name: str, unet: nn.Module, *arguments: object, **keywords: object) -> Any:
    module: Any = attribute(unet, name)
    return module(*arguments, **keywords)


def _run_block(
    resnet: str, attention: str | None, unet: nn.Module, hidden: Tensor, temb: Tensor, text: Tensor | None = None
) -> Tensor:
    hidden = _call(resnet, unet, hidden, temb)
    return hidden if attention is None else _attend(attention, unet, hidden, text)


def _run_up(
    resnet: str,
    attention: str | None,
    unet: nn.Module,
    hidden: Tensor,
    skip: Tensor,
    temb: Tensor,
    text: Tensor | None = None,
) -> Tensor:
    return _run_block(resnet, attention, unet, torch.cat([hidden, skip], dim=1), temb, text)


def _run_mid(resnet: str, attention: str, unet: nn.Module, hidden: Tensor, temb: Tensor, text: Tensor) -> Tensor:
    return _run_block(resnet, None, unet, _attend(attention, unet, hidden, text), temb)


def _attend(name: str, unet: nn.Module, hidden: Tensor, text: Tensor | None) -> Tensor:
    result: Tensor = _call(name, unet, hidden, encoder_hidden_states=text, return_dict=False)[0]
    return result


def _run_first(attention: str, block: str, unet: nn.Module, hidden: Tensor, text: Tensor) -> Tensor:
    transformer: Any = attribute(unet, attention)
    hidden = transformer.norm(hidden)  # (B, C, H, W)
    # A linear projection reads tokens, a convolution of 1 x 1 reads pixels.
    if transformer.use_linear_projection:
        hidden = transformer.proj_in(_to_tokens(hidden))
    else:
        hidden = _to_tokens(transformer.proj_in(hidden))
    return _run_between(block, unet, hidden, text)


def _run_between(block: str, unet: nn.Module, hidden: Tensor, text: Tensor) -> Tensor:
    result: Tensor = _call(block, unet, hidden, encoder_hidden_states=text)
    return result  # (B, T, D)


def _run_last(attention: str, block: str, unet: nn.Module, hidden: Tensor, text: Tensor, residual: Tensor) -> Tensor:
    transformer: Any = attribute(unet, attention)
    hidden = _run_between(block, unet, hidden, text)
    if transformer.use_linear_projection:
        hidden = _to_pixels(transformer.proj_out(hidden), residual)
    else:
        hidden = transformer.proj_out(_to_pixels(hidden, residual))
    return hidden + residual


def _to_tokens(hidden: Tensor) -> Tensor:
    B, C, H, W = hidden.shape
    return hidden.permute(0, 2, 3, 1).reshape(B, H * W, C)


def _to_pixels(hidden: Tensor, like: Tensor) -> Tensor:
    B, _, H, W = like.shape
    return hidden.reshape(B, H, W, hidden.shape[-1]).permute(0, 3, 1, 2).contiguous()


def _downsample(name: str, unet: nn.Module, hidden: Tensor) -> Tensor:
    result: Tensor = _call(name, unet, hidden)
    return result


def _upsample(name: str, size: tuple[int, int] | None, unet: nn.Module, hidden: Tensor) -> Tensor:
    result: Tensor = _call(name, unet, hidden, size)
    return result


def _conv_out(unet: Any, hidden: Tensor) -> Tensor:
    if unet.conv_norm_out is not None:
        hidden = unet.conv_act(unet.conv_norm_out(hidden))
    result: Tensor = unet.conv_out(hidden)
    return result
