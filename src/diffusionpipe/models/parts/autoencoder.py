"""The encoder of an AutoencoderKL as layers: pixels to latents."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pixel_unshuffle

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import ModelError
from diffusionpipe.ir.size import Clip
from diffusionpipe.models.base.family import Step, chain, dtype_of, unsupported
from diffusionpipe.models.graphs.graph import Layer, attribute

PATCH = 2
"""Side of the patches into which FLUX.2 cuts latents."""
_ALLOWED: dict[str, tuple[object, ...]] = {
    "latents_mean": (None,),
    "latents_std": (None,),
    "patch_size": ([PATCH, PATCH], (PATCH, PATCH)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """The names of the tensors in one pass through a VAE's encoder, and a prefix for its layers."""

    prefix: str = ""
    """The start of the names of layers, below the component."""
    pixels: str = "pixels"
    """The tensor of pictures with values in [-1, 1]."""
    moments: str = "moments"
    """The tensor of the posterior's mean and logarithm of the variance, side by side."""
    noise: str = "posterior_noise"
    """The raw input of noise with which latents are drawn."""
    latents: str = "latents"
    """The tensor of the drawn latents."""


_ONLY = Branch()


def encoder_layers(vae: Any, branch: Branch = _ONLY) -> tuple[Layer, ...]:
    """The layers of an AutoencoderKL's encoder, from pictures and the posterior's noise to scaled latents."""
    is_cut = is_cut_into_patches(vae)
    sample = Layer(
        name=f"vae.{branch.prefix}latents",
        component="vae",
        reads=(branch.moments, branch.noise),
        writes=(branch.latents,),
        modules=("bn",) if is_cut else (),
        run=_sample_patches if is_cut else _sample,
    )
    steps = [replace(step, name=branch.prefix + step.name) for step in _steps(vae)]
    return (*chain("vae", branch.pixels, steps, branch.moments), sample)


Picture = int | Clip
"""The size of a picture; a number is the side of a square."""


def as_clip(picture: Picture) -> Clip:
    """The size of a picture as a clip of one frame; a number is the side of a square one."""
    return Clip.square(picture) if isinstance(picture, int) else picture


def latent_shape(vae: Any, picture: Picture) -> tuple[int, int, int]:
    """The shape (C, H, W) of a picture's latents. Raises ModelError for a side that the VAE cannot halve."""
    channels, height, width = _encoded_shape(vae, picture)
    if not is_cut_into_patches(vae):
        return channels, height, width
    for side in (height, width):
        if side % PATCH:
            raise ModelError(f"latents of size {side} cannot be cut into patches of {PATCH}; choose another resolution")
    return channels * PATCH**2, height // PATCH, width // PATCH


def _encoded_shape(vae: Any, picture: Picture) -> tuple[int, int, int]:
    """The shape (C, H, W) of latents as the VAE's encoder makes them, before they are cut into patches.

    Raises ModelError for a side that the VAE cannot halve.
    """
    factor, size = 2 ** (len(vae.config.block_out_channels) - 1), as_clip(picture)
    for side in (size.height, size.width):
        if side < factor or side % factor:
            raise ModelError(
                f"the VAE shrinks pictures {factor} times; resolution {side} is not a multiple of {factor}; "
                f"use e.g. {max(1, side // factor) * factor}"
            )
    return vae.config.latent_channels, size.height // factor, size.width // factor


def encoder_inputs(vae: Any, picture: Picture, dtype: str) -> tuple[TensorSpec, ...]:
    """Descriptions of the raw inputs that `encoder_layers` read: "pixels" and "posterior_noise"."""
    size = as_clip(picture)
    return (
        TensorSpec(name="pixels", shape=(vae.config.in_channels, size.height, size.width), dtype=dtype),
        TensorSpec(name="posterior_noise", shape=_encoded_shape(vae, picture), dtype=dtype),
    )


def vae_problems(vae: Any) -> list[str]:
    """Sentences about settings in a VAE's configuration that its layers do not support; [] if there are none."""
    kinds = [kind for kind in vae.config.down_block_types if kind != "DownEncoderBlock2D"]
    return unsupported("vae", vae.config, _ALLOWED) + [
        f"vae: down block type {kind} is not supported; supported: DownEncoderBlock2D" for kind in kinds
    ]


def _steps(vae: Any) -> Iterator[Step]:
    yield Step(name="encoder.conv_in", run=_conv_in, modules=("encoder.conv_in",))
    for i, block in enumerate(vae.encoder.down_blocks):
        path = f"encoder.down_blocks.{i}"
        for j in range(len(block.resnets)):
            name = f"{path}.resnets.{j}"
            yield Step(name=name, run=partial(_resnet, name, None), modules=(name,))
        for j in range(len(block.downsamplers or ())):
            name = f"{path}.downsamplers.{j}"
            yield Step(name=name, run=partial(_call, name), modules=(name,))
    path = "encoder.mid_block"
    yield Step(
        name=f"{path}.resnets.0", run=partial(_resnet, f"{path}.resnets.0", None), modules=(f"{path}.resnets.0",)
    )
    for j, attention in enumerate(vae.encoder.mid_block.attentions):
        resnet = f"{path}.resnets.{j + 1}"
        before = None if attention is None else f"{path}.attentions.{j}"
        modules = (resnet,) if before is None else (before, resnet)
        yield Step(name=resnet, run=partial(_resnet, resnet, before), modules=modules)
    quant_conv = () if vae.quant_conv is None else ("quant_conv",)
    yield Step(
        name="encoder.conv_out",
        run=_conv_out,
        modules=("encoder.conv_norm_out", "encoder.conv_act", "encoder.conv_out", *quant_conv),
    )


def _conv_in(vae: Any, pixels: Tensor) -> Tensor:
    hidden: Tensor = vae.encoder.conv_in(pixels.to(dtype_of(vae.encoder.conv_in)))
    return hidden


def _call(name: str, vae: nn.Module, hidden: Tensor) -> Tensor:
    module: Any = attribute(vae, name)
    result: Tensor = module(hidden)
    return result


def _resnet(resnet: str, attention: str | None, vae: nn.Module, hidden: Tensor) -> Tensor:
    """The result of a residual block; in the middle block an attention may run before it. Both are given by name."""
    if attention is not None:
        hidden = _call(attention, vae, hidden)
    module: Any = attribute(vae, resnet)
    result: Tensor = module(hidden, None)
    return result


def _conv_out(vae: Any, hidden: Tensor) -> Tensor:
    encoder = vae.encoder
    moments: Tensor = encoder.conv_out(encoder.conv_act(encoder.conv_norm_out(hidden)))  # (B, 2C, H, W)
    return moments if vae.quant_conv is None else vae.quant_conv(moments)


def is_cut_into_patches(vae: Any) -> bool:
    """Whether the VAE is FLUX.2's, whose latents are patches of 2 x 2 of its encoder's results."""
    return type(vae).__name__ == "AutoencoderKLFlux2"


def posterior_sample(moments: Tensor, posterior_noise: Tensor) -> Tensor:
    """Latents drawn from the posterior, in the noise's dtype: mean + standard deviation * noise.

    `moments`: mean and logarithm of the variance, side by side in dimension 1.
    """
    mean, logvar = moments.to(posterior_noise.dtype).chunk(2, dim=1)
    # diffusers' limits of the logarithm of the variance.
    return mean + torch.exp(0.5 * logvar.clamp(-30.0, 20.0)) * posterior_noise


def _sample(vae: Any, moments: Tensor, posterior_noise: Tensor) -> tuple[Tensor, ...]:
    """(latents,): latents drawn from the posterior, scaled as the denoiser reads them.

    They have the noise's dtype and are computed in it, also under autocast.
    """
    latents = posterior_sample(moments, posterior_noise)
    if vae.config.shift_factor is not None:
        latents = latents - vae.config.shift_factor
    return (latents * vae.config.scaling_factor,)


def _sample_patches(vae: Any, moments: Tensor, posterior_noise: Tensor) -> tuple[Tensor, ...]:
    """(latents,): latents drawn from the posterior, cut into patches, (B, 4C, H / 2, W / 2), in the noise's dtype.

    Each channel is normalized: over many pictures it has mean 0 and deviation 1.
    """
    latents = pixel_unshuffle(posterior_sample(moments, posterior_noise), PATCH)  # (B, 4C, H / 2, W / 2)
    # FLUX.2's VAE keeps these statistics in a batch norm.
    mean, variance = (numbers.to(latents).view(1, -1, 1, 1) for numbers in (vae.bn.running_mean, vae.bn.running_var))
    return ((latents - mean) / torch.sqrt(variance + vae.config.batch_norm_eps),)
