"""The holes of pictures that a model learns to fill: drawn for each sample, or read from files.

    edges    strips at one side, at two opposite sides or at all four, so the model learns to continue pictures
    boxes    one rectangle anywhere
    file     a picture of the sample's size, black where it is known and white where the hole is
    first    all of a clip after its first frame, so the model learns image to video

Source of the edges: Fan et al., "M3DDM", 2023, https://arxiv.org/abs/2312.03816, with the shares of M3DDM+'s program.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from diffusionpipe.trainer.data.content import Content
from diffusionpipe.trainer.data.decoding.images import CENTRE, PictureError, Size, placing, reason_of, upright_size
from diffusionpipe.trainer.data.decoding.picture_file import opened_picture
from diffusionpipe.trainer.data.masks.kinds import NAME, MaskKind

NUM_DRAWS = 4
"""The number of random numbers that decide a drawn mask."""
_THRESHOLD = 128
_LEAST, _MOST = 0.15, 0.75
"""The smallest and the largest part of a picture's side that a drawn hole takes."""
_ONE_SIDE, _TWO_SIDES = 0.3, 0.55
"""The probabilities of holes at one side and at two opposite sides; else they are at all four."""
_NO_GUIDES, _FIRST_AND_LAST = 0.3, 0.35
"""The probabilities that no frame of a clip is known whole, and that the first and the last are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskSource:
    """The kind of a data set's masks and, for files, the pattern of their paths."""

    kind: MaskKind
    pattern: str | None = None
    """For masks from files: the path of a picture's mask, with `NAME` in place of the picture's name."""

    def path(self, picture: str) -> Path:
        """The path of a picture's mask file: the pattern with the picture's name inserted.

        `picture`: the name in its folder; its ending is left out.
        """
        assert self.pattern is not None
        return Path(self.pattern.replace(NAME, str(PurePosixPath(picture).with_suffix(""))))


def drawn_mask(kind: MaskKind, numbers: Sequence[float], size: Size) -> Tensor:
    """A mask (1, H, W), 1 in the hole, of a kind that is drawn.

    `numbers`: `NUM_DRAWS` uniform numbers in [0, 1) that decide it. `size`: width and height.
    """
    width, height = size
    mask = torch.zeros(1, height, width)
    if kind is MaskKind.EDGES:
        for left, top, right, bottom in _edges(numbers, size):
            mask[:, top:bottom, left:right] = 1
        return mask
    if kind is MaskKind.FIRST:
        return torch.ones_like(mask)
    shares = [_LEAST + (_MOST - _LEAST) * number for number in numbers[:2]]
    sides = [max(1, int(side * share)) for side, share in zip(size, shares, strict=True)]
    left, top = (int(number * (side - own + 1)) for number, side, own in zip(numbers[2:], size, sides, strict=True))
    mask[:, top : top + sides[1], left : left + sides[0]] = 1
    return mask


def guide_frames(kind: MaskKind, numbers: Sequence[float], frames: int) -> list[bool]:
    """For each frame of a clip, whether it is a guide frame, which the model sees whole.

    `numbers`: uniform numbers in [0, 1), one for the clip and one for each frame.

    Guide frames are none (with probability 0.3), the first and the last (0.35), or each frame with probability 1/2
    (0.35), as M3DDM+ has it. All other frames of a clip have the same hole. With `MaskKind.FIRST` the first frame alone
    is one.

    >>> guide_frames(MaskKind.EDGES, (0.5, 0, 0, 0), 3), guide_frames(MaskKind.EDGES, (0.9, 0.1, 0.7, 0.2), 3)
    ([True, False, True], [True, False, True])
    """
    if kind is MaskKind.FIRST:
        return [frame == 0 for frame in range(frames)]
    if numbers[0] < _NO_GUIDES:
        return [False] * frames
    if numbers[0] < _NO_GUIDES + _FIRST_AND_LAST:
        return [frame in (0, frames - 1) for frame in range(frames)]
    return [number < 0.5 for number in numbers[1:]]


def _edges(numbers: Sequence[float], size: Size) -> Iterator[tuple[int, int, int, int]]:
    """Yields the strips at a picture's sides that form the hole, as (left, top, right, bottom) in pixels.

    `numbers`: uniform numbers in [0, 1) that decide them.
    """
    ratio = _LEAST + (_MOST - _LEAST) * numbers[0]
    width, height = size
    across, down = (max(1, int(side * ratio / 2)) for side in size)  # two opposite strips take the share together
    left, right = (0, 0, across, height), (width - across, 0, width, height)
    top, bottom = (0, 0, width, down), (0, height - down, width, height)
    if numbers[1] < _ONE_SIDE:
        yield (left, right, top, bottom)[int(4 * numbers[2])]
    elif numbers[1] < _ONE_SIDE + _TWO_SIDES:
        yield from (left, right) if numbers[2] < 0.5 else (top, bottom)
    else:
        yield from (left, right, top, bottom)


def load_mask(path: Path, *, found: Size, size: Size, crop: tuple[float, float] = CENTRE, flip: bool = False) -> Tensor:
    """The mask in a file, (1, H, W), 1 in the hole, resized and cut as its picture is.

    `found`: width and height of the picture's file. `size`: width and height of the result. `crop`, `flip`: as for
    `images.load_levels`.

    Raises:
        PictureError: the file cannot be the mask of such a picture; the message names it.
    """
    levels = mask_levels(path, found)
    place = placing(found, size, crop)
    picture = Image.fromarray(levels)
    if place.resized != found:
        picture = picture.resize(place.resized, Image.Resampling.NEAREST)  # a mask has two levels and no grey between
    picture = picture.crop((place.left, place.top, place.left + size[0], place.top + size[1]))
    hole = np.array(ImageOps.mirror(picture) if flip else picture) >= _THRESHOLD
    return torch.from_numpy(hole).to(torch.float32).unsqueeze(0)  # (1, H, W)


def mask_levels(path: Path, found: Size) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
    """The levels of a mask file, uint8 (H, W): 0 where the picture is known, 255 in the hole.

    `found`: width and height of the picture.

    Raises:
        PictureError: the file cannot be read, has another size, transparent pixels or grey values, or only one level.
    """
    try:
        with opened_picture(path) as opened:
            upright = ImageOps.exif_transpose(opened)
            alpha = np.array(upright.convert("RGBA").getchannel("A")) if upright.has_transparency_data else None
            levels = np.array(upright.convert("L"), dtype=np.uint8)
    except Exception as error:  # the formats' readers raise whatever their parsers stumble over
        raise PictureError(path, reason_of(error)) from error
    if alpha is not None and alpha.min() < 255:
        raise MaskError(path, "the mask has transparent pixels, which say nothing; save it in black and white alone")
    if problem := _problem_of(levels, found):
        raise MaskError(path, problem)
    return levels


class MaskError(PictureError):
    """The error that a file cannot be the mask of its picture; the message has the path and the reason."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.args = (f"{path}: {reason}",)


def _problem_of(levels: "np.ndarray[tuple[int, int], np.dtype[np.uint8]]", found: Size) -> str | None:
    size = levels.shape[1], levels.shape[0]
    if size != found:
        return f"the mask has {size[0]} x {size[1]} pixels and its picture {found[0]} x {found[1]}; make it as large"
    grey = levels[(levels != 0) & (levels != 255)]
    if grey.size:
        return (
            f"the mask has {grey.size} grey pixels, e.g. of level {grey[0]}; a mask has levels 0 (known) and 255 (hole)"
            f" alone: set levels from {_THRESHOLD} on to 255 and others to 0"
        )
    if not levels.any():
        return "the mask has no hole; make the pixels that a model shall draw white"
    if levels.all():
        return "the mask has no known pixels; make the pixels that shall stay black"
    return None


def problems_of_mask(path: Path, picture: Content) -> str | None:
    """A sentence on why the file `path` cannot be the mask of a picture; None if it can. Both files are read."""
    if not path.is_file():
        return f"{picture}: its mask {path} is missing"
    try:
        mask_levels(path, upright_size(picture))
    except PictureError as error:
        return str(error)
    return None
