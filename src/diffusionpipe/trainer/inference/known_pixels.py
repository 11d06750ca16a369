"""Pictures with holes for an inpainting model: makes its inputs, and puts known pixels into drawn pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionpipe.errors import RecipeError
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.parts.masks import MASK, MASKED_NOISE
from diffusionpipe.trainer.data.decoding.images import Size, load_levels, upright_size
from diffusionpipe.trainer.data.decoding.levels import values_of_pictures
from diffusionpipe.trainer.data.masks.holes import load_mask
from diffusionpipe.trainer.inference.denoise import SamplingSettings, drawn_noise


@dataclass(frozen=True, slots=True)
class KnownPixels:
    """The file of a picture that is known except for its hole, and the file of the hole's mask."""

    picture: Path
    """The path of the picture; for a clip it is the first frame, and all other frames are the hole."""
    mask: Path | None = None
    """The path of the mask, which is white in the hole; None: the picture has no hole, as the first frame of a clip."""


def known_of(pictures: Sequence[Path], masks: Sequence[Path], count: int) -> tuple[KnownPixels, ...]:
    """The picture and its mask for each of `count` samples; () where no pictures and masks are given.

    Raises:
        RecipeError: the number of pictures or masks is neither 1, for all samples, nor `count`, or a file is missing.
    """
    if not pictures and not masks:
        return ()
    holes: Sequence[Path | None] = masks or [None]  # no masks: one hole for all, the later frames of a clip
    every = [list(given) * count if len(given) == 1 else list(given) for given in (pictures, holes)]
    if not pictures or any(len(given) != count for given in every):
        raise RecipeError(
            f"{len(pictures)} pictures and {len(masks)} masks do not match {count} samples; give one of each for all, "
            "or one of each for each sample"
        )
    for path in (*pictures, *masks):
        if not path.is_file():
            raise RecipeError(
                f"there is no file {path}, which is named as a picture or mask of a hole; correct the path"
            )
    return tuple(KnownPixels(picture, mask) for picture, mask in zip(*every, strict=True) if picture is not None)


def known_conditions(known: Sequence[KnownPixels], graph: LayerGraph, settings: SamplingSettings) -> dict[str, Tensor]:
    """The raw inputs by name of an inpainting model: pictures, masks and noise; if guided, each row is there twice.

    Raises:
        PictureError: a picture or a mask cannot be read, or the two do not fit together.
    """
    shapes = {spec.name: spec.shape for spec in graph.inputs}
    channels, *frames, height, width = shapes["pixels"]
    read = {one: _read(one, (width, height), channels) for one in dict.fromkeys(known)}  # each file once
    levels, masks = (torch.stack([read[one][part] for one in known]) for part in (0, 1))
    pixels = values_of_pictures("pixels", levels)
    if frames:
        # Grey under the mask, which covers all other frames.
        pixels, masks = _first_of(pixels, 0, frames[0]), _first_of(masks, 1, frames[0])
    found = {"pixels": pixels, MASK: masks}
    if MASKED_NOISE in shapes:
        found[MASKED_NOISE] = drawn_noise("masked", settings, len(known), shapes[MASKED_NOISE])
    return {name: torch.cat([value] * settings.copies) for name, value in found.items()}


def _first_of(values: Tensor, other: float, frames: int) -> Tensor:
    """Clips (B, C, F, H, W) with `values`, (B, C, H, W), as first frame and the number `other` in all later frames."""
    clip = torch.full((*values.shape[:2], frames, *values.shape[2:]), other, dtype=values.dtype)
    clip[:, :, 0] = values
    return clip


def with_known(pictures: Sequence[NDArray[np.uint8]], known: Sequence[KnownPixels]) -> list[NDArray[np.uint8]]:
    """The drawn pictures with the known pixels in their places, bit for bit; unchanged where `known` is ().

    Pictures are (H, W, 3). Of a clip, (F, H, W, 3), only the first frame has known pixels.

    Raises:
        PictureError: a picture or a mask cannot be read.
    """
    if not known:
        return list(pictures)
    return [_over(picture, one) for picture, one in zip(pictures, known, strict=True)]


def _over(picture: NDArray[np.uint8], known: KnownPixels) -> NDArray[np.uint8]:
    if picture.ndim == 4:
        # Only the first frame of a clip has known pixels.
        return np.concatenate([_over(picture[0], known)[None], picture[1:]])
    levels, mask = _read(known, (picture.shape[1], picture.shape[0]), picture.shape[2])
    return np.where(mask.permute(1, 2, 0).numpy() == 1, picture, levels.permute(1, 2, 0).numpy())


def _read(known: KnownPixels, size: Size, channels: int) -> tuple[Tensor, Tensor]:
    """The levels of a picture, (C, H, W), and its mask, (1, H, W), cut to the width and height `size`.

    The mask is 0 everywhere if there is no mask file.
    """
    levels = load_levels(known.picture, size=size, channels=channels)
    if known.mask is None:
        return levels, torch.zeros(1, size[1], size[0])
    return levels, load_mask(known.mask, found=upright_size(known.picture), size=size)
