"""The encoder of any VAE class of diffusers as one layer: pixels to latents. A picture is a clip of one frame."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import ModelError
from diffusionpipe.models.base.family import Clip, dtype_of
from diffusionpipe.models.graphs.graph import Layer
from diffusionpipe.models.parts.autoencoder import (
    encoder_inputs,
    encoder_layers,
    is_cut_into_patches,
    latent_shape,
    posterior_sample,
    vae_problems,
)

_STATISTICS = ("latents_mean", "latents_std")
_MOMENTS = "moments"


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeEncoding:
    """The layers of a VAE's encoder, the raw inputs that they read, and the shape of the latents."""

    layers: tuple[Layer, ...]
    """The layers from pictures or clips to latents."""
    inputs: tuple[TensorSpec, ...]
    """Descriptions of the raw inputs that they read."""
    latents: tuple[int, ...]
    """Shape of a sample's latents: (C, H, W), of a VAE for clips (C, F, H, W)."""


def encoding_of(vae: Any, resolution: int, dtype: str, clip: Clip | None = None) -> VaeEncoding:
    """The layers of a VAE's encoder for square pictures, or for pictures or clips of the size `clip`.

    `dtype`: the raw inputs' dtype. Raises ModelError for a size that the VAE cannot shrink, and for a configuration
    that the layers would not run exactly.
    """
    if type(vae).__name__ == "AutoencoderKL" or is_cut_into_patches(vae):
        if problems := vae_problems(vae):
            raise ModelError("\n".join(problems))
        picture = clip or resolution
        inputs = encoder_inputs(vae, picture, dtype)
        return VaeEncoding(layers=encoder_layers(vae), inputs=inputs, latents=latent_shape(vae, picture))
    size = clip or Clip.square(resolution)
    factor = vae.spatial_compression_ratio
    for side in (size.width, size.height):
        if side < factor or side % factor:
            raise ModelError(
                f"the VAE shrinks pictures {factor} times; resolution {side} is not a multiple of {factor}; "
                f"use e.g. {max(1, side // factor) * factor}"
            )
    width, height = size.width // factor, size.height // factor
    config = vae.config
    if type(vae).__name__ == "AutoencoderDC":
        pixels = TensorSpec(name="pixels", shape=size.pixels, dtype=dtype)
        return _plain_encoding(pixels, (config.latent_channels, height, width))
    latents = (
        config.get("z_dim") or config.latent_channels,
        latent_frames(temporal_factor(vae), size.frames),
        height,
        width,
    )
    return VaeEncoding(
        layers=(_encoder_layer(vae, latents, dtype),),
        inputs=(
            TensorSpec(name="pixels", shape=size.pixels, dtype=dtype),
            TensorSpec(name="posterior_noise", shape=latents, dtype=dtype),
        ),
        latents=latents,
    )


def clip_encoder(vae: Any) -> tuple[str, ...]:
    """The names of the modules and buffers of a VAE for clips that compute the latents of a clip."""
    return _own(vae, "encoder", "quant_conv", *_STATISTICS)


def _own(vae: Any, *names: str) -> tuple[str, ...]:
    """The names among `names` that a child module or a buffer of the VAE has."""
    own = {name for name, _ in (*vae.named_children(), *vae.named_buffers(recurse=False))}
    return tuple(name for name in names if name in own)


def latent_frames(factor: int, frames: int) -> int:
    """The number of latent frames of a clip: the first frame is encoded alone, the others `factor` at a time.

    Raises ModelError for a number of frames that cannot be divided so.
    """
    if (frames - 1) % factor:
        near = (frames - 1) // factor * factor + 1
        raise ModelError(
            f"the VAE encodes one frame, then {factor} at a time; {frames} frames do not divide so: use {near} or "
            f"{near + factor}"
        )
    return (frames - 1) // factor + 1


def temporal_factor(vae: Any) -> int:
    """The number of frames of a clip for one latent frame of the VAE, after the first; 1 for a VAE of pictures."""
    return int(vae.config.get("scale_factor_temporal") or getattr(vae, "temporal_compression_ratio", 1))


def _plain_encoding(pixels: TensorSpec, latents: tuple[int, ...]) -> VaeEncoding:
    """The encoding of a VAE for pictures that has no posterior; `latents`: the shape of a sample's latents."""
    layer = Layer(
        name="vae.encoder",
        component="vae",
        reads=("pixels",),
        writes=("latents",),
        modules=("encoder",),
        run=_encode_plainly,
    )
    return VaeEncoding(layers=(layer,), inputs=(pixels,), latents=latents)


def _encode_plainly(vae: Any, pixels: Tensor) -> tuple[Tensor, ...]:
    """(latents,): the latents of pictures, (B, C, H, W), scaled as the denoiser reads them, without a posterior."""
    latents = vae.encode(pixels.to(dtype_of(vae.encoder))).latent.to(pixels.dtype)
    return (latents * vae.config.scaling_factor,)


def _encoder_layer(vae: Any, latents: tuple[int, ...], dtype: str) -> Layer:
    """The layer of a VAE for clips that encodes and draws from the posterior, with the two as its parts.

    `latents`: the shape of a sample's latents. `dtype`: of the posterior's tensor.
    """
    encoder, statistics = _own(vae, "encoder", "quant_conv"), _own(vae, *_STATISTICS)
    whole = Layer(
        name="vae.encoder",
        component="vae",
        reads=("pixels", "posterior_noise"),
        writes=("latents",),
        modules=(*encoder, *statistics),
        run=_encode,
    )
    moments = replace(whole, reads=("pixels",), writes=(_MOMENTS,), modules=encoder, run=_posterior)
    draw = replace(whole, name="vae.latents", reads=(_MOMENTS, "posterior_noise"), modules=statistics, run=_draw)
    channels, *shape = latents
    between = TensorSpec(name=_MOMENTS, shape=(2 * channels, *shape), dtype=dtype)
    return replace(whole, parts=(moments, draw), between=(between,))


def _encode(vae: Any, pixels: Tensor, posterior_noise: Tensor) -> tuple[Tensor, ...]:
    """(latents,): latents of clips, drawn from the posterior, scaled as the denoiser reads them.

    They have the noise's dtype and are drawn in it, also under autocast.
    """
    (moments,) = _posterior(vae, pixels)
    return _draw(vae, moments, posterior_noise)


def mean_latents(vae: Any, pixels: Tensor) -> Tensor:
    """The mean of the posterior of pixels (B, 3, F, H, W), scaled as the denoiser reads latents, (B, C, f, h, w).

    It has the dtype of the pixels.
    """
    (moments,) = _posterior(vae, pixels)
    mean, _ = moments.to(pixels.dtype).chunk(2, dim=1)
    return _scaled(vae, mean)


def _posterior(vae: Any, pixels: Tensor) -> tuple[Tensor, ...]:
    """(moments,): mean and logarithm of the variance of the posterior, side by side, (B, 2C, F, H, W)."""
    clips = pixels.to(dtype_of(vae.encoder))
    if clips.ndim == 4:  # pictures
        clips = clips.unsqueeze(2)  # (B, 3, F, H, W)
    return (vae.encode(clips).latent_dist.parameters,)


def _draw(vae: Any, moments: Tensor, posterior_noise: Tensor) -> tuple[Tensor, ...]:
    """(latents,): latents drawn from the posterior with these moments, scaled as the denoiser reads them."""
    return (_scaled(vae, posterior_sample(moments, posterior_noise)),)


def _scaled(vae: Any, latents: Tensor) -> Tensor:
    shift, std = (_statistic(vae, name, latents) for name in _STATISTICS)
    factor = vae.config.get("scaling_factor")
    if shift is not None:
        latents = latents - shift
    if factor is not None:
        latents = latents * factor
    return latents if std is None else latents / std


def _statistic(vae: Any, name: str, latents: Tensor) -> Tensor | None:
    """The VAE's buffer or setting `name`, a number for each channel, (1, C, 1, 1, 1); None if it has none."""
    own = dict(vae.named_buffers(recurse=False))  # as an attribute, diffusers would warn of a configured one
    found = own.get(name)
    found = vae.config.get(name) if found is None else found
    return None if found is None else torch.as_tensor(found).to(latents).view(1, -1, 1, 1, 1)
