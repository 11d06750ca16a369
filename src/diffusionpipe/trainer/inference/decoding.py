"""Decodes latents with a folder's own VAE, one after the other, each whole if the device has room for it."""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.costs.decoding import Decoding
from diffusionpipe.models.base.family import Clip
from diffusionpipe.models.opening.folder import component_config, family_of, open_component
from diffusionpipe.models.opening.meta import module_on_meta
from diffusionpipe.models.parts.decoder import TILE, decode_in_tiles, decoded_latents
from diffusionpipe.profiler.decoding import decoding_of
from diffusionpipe.runtime.machine.free_memory import free_on

logger = logging.getLogger(__name__)

SPARE = 1.05
"""The bytes of memory that a device needs for each counted byte: kernels also take memory by themselves."""
_GIB = 2**30


def open_vae(folder: Path, device: torch.device, variant: str | None = None) -> Any:
    """The folder's VAE on the device, in float32.

    Raises:
        ModelError: the folder has no VAE, or its configuration or weights cannot be read.
    """
    return open_component(folder, "vae", device=device, variant=variant)


def decoded(vae: Any, latents: Tensor, *times: Tensor | None, **options: Any) -> Tensor:
    """The pictures that the VAE makes of latents, (N, 3, ...), float32 in host memory, as the VAE returns them.

    They are decoded one by one, so a picture has the same bits beside any others. Where a whole picture does not fit
    into memory, it is decoded by tiles, with a warning. diffusers' own slicing would mix up latents and times where a
    VAE reads times. `times` and `options` are further arguments of the VAE's `decode`.
    """
    if _needs_tiles(vae, latents):
        decode_in_tiles(vae)
    found: Tensor | None = None
    # Rows of one sample each.
    rows = zip(*(rows.float().split(1) for rows in (latents, *times) if rows is not None), strict=True)
    with torch.no_grad():
        for index, row in enumerate(rows):
            picture: Tensor = vae.decode(*row, **{**options, "return_dict": False})[0]
            if found is None:
                found = torch.empty((len(latents), *picture.shape[1:]))
            found[index] = picture[0]
            del picture  # before the next one is made
    assert found is not None, "at least one picture is decoded"
    return found


def _needs_tiles(vae: Any, latents: Tensor) -> bool:
    """Whether a whole picture does not fit into memory; then it logs a warning."""
    free = free_on(latents.device)
    if free is None:
        return False
    needs = decoding_of(vae, latents.shape[1:])
    there = needs.weights + len(latents) * 2 * needs.latents  # already
    if not needs.needs_tiles(int(free / SPARE) + there, len(latents), on_host=latents.device.type == "cpu"):
        return False
    logger.warning(
        'decoding=tiled tile_pixels=%d reason="a whole picture takes %.2f GiB, by tiles %.2f GiB, and %.2f GiB are '
        'free"; tiles are blended, so pictures differ a little; leave more memory free, or draw smaller pictures',
        TILE,
        needs.whole / _GIB,
        needs.tiled / _GIB,
        free / _GIB,
    )
    return True


def folder_decoding(folder: Path, size: Clip) -> Decoding | None:
    """The memory that the folder's VAE needs to decode samples of a size; None if the folder has no VAE.

    It follows from the VAE's configuration, without its weights.

    Raises:
        ModelError: the configuration makes no VAE.
    """
    if "vae" not in family_of(folder).components:
        return None
    kind = family_of(folder).components["vae"]
    vae = module_on_meta(kind, component_config(folder, "vae"), source=folder / "vae" / "config.json")
    return decoding_of(vae, decoded_latents(vae, size.pixels))
