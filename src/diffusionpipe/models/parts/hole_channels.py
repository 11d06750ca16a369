"""The input channels of denoisers that fill holes, from configurations alone, so that no model need be opened.

U-Nets of Stable Diffusion    C noisy latents, 1 of the mask, C of the picture without its hole
Wan, image to video           C noisy latents, 1 of each of the 4 frames of a latent, C of the clip without its hole
FLUX.1 Fill                   patches of 2 x 2: C noisy latents, C of the picture, all f x f pixels of the mask
"""

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
FLUX_PATCH = 2
"""Side of the patches of latents that FLUX.1 reads as one token."""


def unet_mask_channels(latent_channels: int) -> int:
    """The number of channels that an inpainting U-Net reads beside its noisy latents: the mask's and a picture's."""
    return 1 + latent_channels


def fill_mask_channels(latent_channels: int, factor: int) -> int:
    """The number of channels that FLUX.1 Fill reads after its noisy latents: the picture's latents and the mask.

    `factor`: the number of pixels along a side for one latent.
    """
    return latent_channels + factor**2


def shrinking(vae: Config) -> int:
    """The number of pixels along a side for one latent of an AutoencoderKL with this configuration."""
    return int(2 ** (len(vae["block_out_channels"]) - 1))


def unet_fills_holes(unet: Config, vae: Config) -> bool:
    """Whether a U-Net's configuration has the input channels for a mask and a picture with a hole."""
    latents = vae["latent_channels"]
    found = (unet["in_channels"], unet["out_channels"])
    return bool(found == (latents + unet_mask_channels(latents), latents))


def flux_fills_holes(transformer: Config, vae: Config) -> bool:
    """Whether a FLUX transformer's configuration has the input channels for a picture with a hole and its mask."""
    latents = vae["latent_channels"]
    channels = latents + fill_mask_channels(latents, shrinking(vae))
    return bool(transformer["in_channels"] == channels * FLUX_PATCH**2)


def clip_mask_channels(latent_channels: int, factor: int) -> int:
    """The number of channels that Wan reads beside its noisy latents: the mask's and a clip's.

    `factor`: the number of frames for one latent frame.
    """
    return factor + latent_channels


def wan_fills_holes(transformer: Config, vae: Config) -> bool:
    """Whether a Wan transformer's configuration has the input channels for a clip with a hole and its mask."""
    latents = vae["z_dim"]
    channels = latents + clip_mask_channels(latents, vae["scale_factor_temporal"])
    return bool((transformer["in_channels"], transformer["out_channels"]) == (channels, latents))


_RULES = {
    "UNet2DConditionModel": unet_fills_holes,
    "FluxTransformer2DModel": flux_fills_holes,
    "WanTransformer3DModel": wan_fills_holes,
}
"""Class of a denoiser that may be for inpainting -> function that decides it from both configurations."""


def fills_holes(denoiser: Config, vae: Config) -> bool:
    """Whether the denoiser of a folder is for inpainting, by its configuration and the VAE's.

    If a configuration lacks a field on which that depends, it is not.
    """
    rule = _RULES.get(str(denoiser.get("_class_name")))
    try:
        return rule is not None and rule(denoiser, vae)
    except (KeyError, TypeError):
        return False
