"""The inputs of a denoiser that fills holes, beside its noisy latents: a mask, and the picture without its hole.

    pixels ─┬────────────────────── VAE ── latents ── noise ── noisy ─┐
            └─ x (1 - mask) ─────── VAE ── masked latents ─┐          ├─ denoiser
    mask  ─────────────── reduced to the size of latents ──┴──────────┘
                                                          mask channels

A mask is 1 where a model shall draw (the hole) and 0 where the picture is known. All of this is frozen. U-Nets read the
reduced mask first and the masked latents after it; FLUX.1 Fill reads the masked latents first. Wan reads
1 where a frame is known.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pixel_unshuffle

from diffusionpipe.costs import TensorSpec
from diffusionpipe.models.graphs.graph import Layer, LayerGraph
from diffusionpipe.models.parts.autoencoder import Branch, Picture, as_clip, encoder_inputs, encoder_layers
from diffusionpipe.models.parts.hole_channels import (
    clip_mask_channels,
    fill_mask_channels,
    shrinking,
    unet_mask_channels,
)
from diffusionpipe.models.parts.latents import clip_encoder, mean_latents, temporal_factor

MASK = "mask"
"""The name of the raw input with the mask of a sample's pixels, (1, H, W)."""
MASKED_NOISE = "masked_noise"
"""The name of the raw input with noise for the posterior of the picture without its hole."""
CHANNELS = "mask_channels"
"""The name of the tensor of mask channels, which the denoiser reads after the channels of its noisy latents."""
_MASKED = Branch(
    prefix="masked.", pixels="masked_pixels", moments="masked_moments", noise=MASKED_NOISE, latents="masked_latents"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedInputs:
    """The layers that prepare a mask for an inpainting model, their raw inputs, and the number of mask channels."""

    layers: tuple[Layer, ...] = ()
    """The layers; the last one writes the tensor `CHANNELS`."""
    inputs: tuple[TensorSpec, ...] = ()
    """Descriptions of the raw inputs that they read beside "pixels"."""
    channels: int = 0
    """The number of channels of the tensor `CHANNELS`; 0 for a model that reads no mask."""


def unet_masks(vae: Any, picture: Picture, dtype: str) -> MaskedInputs:
    """The mask's layers for a U-Net. Channels: the mask at the corner of each latent, then the masked latents."""
    return _masks(vae, picture, dtype, partial(_reduce_to_corners), unet_mask_channels(vae.config.latent_channels))


def fill_masks(vae: Any, picture: Picture, dtype: str) -> MaskedInputs:
    """The mask's layers for FLUX.1 Fill. Channels: the masked latents, then all pixels of the mask for each latent."""
    factor = shrinking(vae.config)
    channels = fill_mask_channels(vae.config.latent_channels, factor)
    return _masks(vae, picture, dtype, partial(_keep_all, factor), channels)


def clip_masks(vae: Any, picture: Picture, dtype: str) -> MaskedInputs:
    """The mask's layers for Wan. Channels: whether each frame is known, then the latents of the known pixels."""
    size, factor = as_clip(picture), temporal_factor(vae)
    return MaskedInputs(
        layers=(
            Layer(
                name="vae.masked_pixels",
                component="vae",
                reads=("pixels", MASK),
                writes=(_MASKED.pixels,),
                run=_hide,
            ),
            Layer(
                name="vae.masked_encoder",
                component="vae",
                reads=(_MASKED.pixels,),
                writes=(_MASKED.latents,),
                modules=clip_encoder(vae),
                run=_encode_known,
            ),
            Layer(
                name="vae.mask_channels",
                component="vae",
                reads=(MASK, _MASKED.latents),
                writes=(CHANNELS,),
                run=partial(_known_frames, factor),
            ),
        ),
        inputs=(TensorSpec(name=MASK, shape=(1, *size.pixels[1:]), dtype=dtype),),
        channels=clip_mask_channels(vae.config.z_dim, factor),
    )


def reads_mask(graph: LayerGraph) -> bool:
    """Whether the model reads a mask, because it is for inpainting."""
    return any(spec.name == MASK for spec in graph.inputs)


def _masks(vae: Any, picture: Picture, dtype: str, join: Any, channels: int) -> MaskedInputs:
    pixels, noise = encoder_inputs(vae, picture, dtype)
    return MaskedInputs(
        layers=(
            Layer(
                name="vae.masked_pixels",
                component="vae",
                reads=(pixels.name, MASK),
                writes=(_MASKED.pixels,),
                run=_hide,
            ),
            *encoder_layers(vae, _MASKED),
            Layer(
                name="vae.mask_channels",
                component="vae",
                reads=(MASK, _MASKED.latents),
                writes=(CHANNELS,),
                run=join,
            ),
        ),
        inputs=(
            TensorSpec(name=MASK, shape=(1, *pixels.shape[1:]), dtype=dtype),
            TensorSpec(name=MASKED_NOISE, shape=noise.shape, dtype=dtype),
        ),
        channels=channels,
    )


def _hide(_: Any, pixels: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """(pixels,): the pictures (B, C, H, W), with 0, a middle grey, in their holes."""
    return (pixels * (mask < 0.5),)


def _encode_known(vae: Any, pixels: Tensor) -> tuple[Tensor, ...]:
    return (mean_latents(vae, pixels),)


def _known_frames(factor: int, _: Any, mask: Tensor, latents: Tensor) -> tuple[Tensor, ...]:
    """(mask channels,): 1 where a frame is known, else 0, then the latents, (B, factor + C, F, h, w).

    It is the same as in diffusers' WanImageToVideoPipeline. The first frame fills all `factor` channels of its latent
    frame.
    """
    # A mask of a single picture has no axis of frames.
    holes = mask if mask.ndim == 5 else mask.unsqueeze(2)  # (B, 1, F, H, W)
    frames, (height, width) = holes.shape[2], latents.shape[-2:]
    known = 1 - interpolate(holes, size=(frames, height, width), mode="nearest")
    # A VAE encodes the first frame alone, so it counts for all `factor` frames of its latent.
    known = torch.cat([known[:, :, :1].expand(-1, -1, factor - 1, -1, -1), known], dim=2)
    known = known.unflatten(2, (-1, factor)).squeeze(1).transpose(1, 2)  # (B, factor, F', h, w)
    return (torch.cat([known.to(latents.dtype), latents], dim=1),)


def _reduce_to_corners(_: Any, mask: Tensor, latents: Tensor) -> tuple[Tensor, ...]:
    small = interpolate(mask, size=latents.shape[-2:], mode="nearest")  # (B, 1, H / f, W / f)
    return (torch.cat([small.to(latents.dtype), latents], dim=1),)


def _keep_all(factor: int, _: Any, mask: Tensor, latents: Tensor) -> tuple[Tensor, ...]:
    small = pixel_unshuffle(mask, factor)  # (B, f * f, H / f, W / f)
    return (torch.cat([latents, small.to(latents.dtype)], dim=1),)
