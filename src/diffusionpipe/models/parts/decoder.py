"""The decoder of any VAE class of diffusers: which latents it reads for a picture, and how it decodes tile by tile."""

from collections.abc import Sequence
from typing import Any

from diffusionpipe.models.parts.autoencoder import is_cut_into_patches
from diffusionpipe.models.parts.latents import latent_frames, temporal_factor

TILE = 512
"""Side of a tile in pixels."""
_OVERLAP = 4
"""The side of a tile divided by the width of its overlap with the next one."""


def decoded_latents(vae: Any, pixels: Sequence[int]) -> tuple[int, ...]:
    """The shape of the latents that the VAE decodes to a sample of the shape (C, H, W), or (C, F, H, W) of a clip."""
    channels = vae.config.get("z_dim") or vae.config.latent_channels
    sides = tuple(max(1, side // shrinkage(vae)) for side in pixels[-2:])
    if reads_pictures(vae):
        return (channels, *sides)
    frames = pixels[1] if len(pixels) == 4 else 1
    return (channels, latent_frames(temporal_factor(vae), frames), *sides)


def shrinkage(vae: Any) -> int:
    """The number of pixels along a side for one latent of the VAE."""
    known = getattr(vae, "spatial_compression_ratio", None)
    return int(known or 2 ** (len(vae.config.block_out_channels) - 1))


def reads_pictures(vae: Any) -> bool:
    """Whether the VAE is for pictures; a VAE for clips takes a picture as a clip of one frame."""
    return is_cut_into_patches(vae) or type(vae).__name__ in ("AutoencoderKL", "AutoencoderDC")


def tiles_of(vae: Any, latents: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(height, width) of each tile in which latents (..., H, W) are decoded, in order, the first ones the largest.

    Latents that fit into one tile are decoded as one.
    """
    side = TILE // shrinkage(vae)
    stride = side - side // _OVERLAP
    height, width = latents[-2:]
    if max(height, width) <= side:
        return ((height, width),)
    return tuple(
        (min(side, height - top), min(side, width - left))
        for top in range(0, height, stride)
        for left in range(0, width, stride)
    )


def decode_in_tiles(vae: Any) -> None:
    """Set a VAE so that `vae.decode` decodes one tile after the other, and blends them where they overlap."""
    if hasattr(vae, "tile_overlap_factor"):  # its tiles are as large as the pictures that it was trained on
        vae.tile_overlap_factor = 1 / _OVERLAP
        vae.tile_sample_min_size = TILE
        vae.tile_latent_min_size = TILE // shrinkage(vae)
        vae.enable_tiling()
        return
    stride = TILE - TILE // _OVERLAP
    vae.enable_tiling(
        tile_sample_min_height=TILE,
        tile_sample_min_width=TILE,
        tile_sample_stride_height=stride,
        tile_sample_stride_width=stride,
    )
