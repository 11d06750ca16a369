"""Decodes picture files to tensors: upright, cut to one size, as levels or in [-1, 1]."""

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from diffusionpipe.errors import DataError
from diffusionpipe.files.input_file import problem_of_file
from diffusionpipe.trainer.data.content import Content, bytes_of
from diffusionpipe.trainer.data.decoding.colours import colours_of, problem_of_colours, srgb_on_white
from diffusionpipe.trainer.data.decoding.levels import values_of_pictures
from diffusionpipe.trainer.data.decoding.picture_file import opened_picture

Size = tuple[int, int]
"""Width and height in pixels."""
CENTRE = (0.5, 0.5)
_BLOCK = 4096
_MAX_RATIO = 100
"""The largest ratio of a picture's sides: a file of a few bytes may hold a line of pixels that would fill the memory
when enlarged."""
_FIRST_TURNED = 5  # EXIF orientations from this one on exchange width and height


class PictureError(DataError):
    """The error that a picture or clip cannot be decoded, with its path and the reason in words."""

    def __init__(self, path: Content, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: cannot be decoded: {reason}; repair or remove it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The facts in the header of a picture or clip: its size, rate and frames, or the reason why it cannot be used."""

    problem: str | None = None
    """Why the picture or clip cannot be used; None if it can."""
    colours: str | None = None
    """Why the picture is taken as sRGB though its file states other colours; None if it is not so."""
    size: Size | None = None
    """Width and height as the picture is seen; None if it cannot be opened."""
    rate: float | None = None
    """The number of frames per second of a clip; None for a picture."""
    frames: int = 1
    """The largest number of frames that can be taken of a clip; 1 for a picture."""


def read_header(path: Content) -> Header:
    """The size of a picture as it is seen, and the problems of its file or its colours.

    The file is read to its end, and its checksums are compared. It raises nothing: `problem` has the reason why a
    picture cannot be opened.
    """
    if isinstance(path, Path) and (problem := problem_of_file(path)):
        return Header(problem=problem)
    try:
        if isinstance(path, Path) and path.stat().st_size == 0:
            return Header(problem="it is empty")
        with opened_picture(path) as picture:
            _refuse_unfit(picture)
            # Pillow would decode a whole PNG to find an orientation behind its pixels, where it hardly ever is.
            is_plain = picture.format == "PNG" and "exif" not in picture.info
            colours, size = problem_of_colours(picture), picture.size if is_plain else _upright(picture)
            picture.verify()  # last, because it reads the file to its end
    except Exception as error:  # the formats' readers raise whatever their parsers stumble over
        return Header(problem=reason_of(error))
    return Header(colours=colours, size=size)


def fingerprint(path: Content) -> bytes:
    """16 bytes that identify a file: a digest of its length and of the bytes at its start, middle and end.

    The date of the file does not count, so a copy of a data folder has the same fingerprints. A picture that replaces
    another one has another fingerprint.

    Raises:
        OSError, ValueError: the file cannot be read.
    """
    if not isinstance(path, Path):
        held = bytes_of(path)
        digest = blake2b(str(len(held)).encode(), digest_size=16)
        for place in (0, len(held) // 2, max(0, len(held) - _BLOCK)):
            digest.update(held[place : place + _BLOCK])
        return digest.digest()
    size = path.stat().st_size
    digest = blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        for place in (0, size // 2, max(0, size - _BLOCK)):
            file.seek(place)
            digest.update(file.read(_BLOCK))
    return digest.digest()


def load_pixels(
    path: Content, *, resolution: int, channels: int = 3, crop: tuple[float, float] = CENTRE, flip: bool = False
) -> Tensor:
    """The picture as float32 in [-1, 1], cut to a square, (channels, resolution, resolution).

    It is resized, cut at `crop` and mirrored as `load_levels` does it.

    Raises:
        PictureError: the file cannot be decoded; the message names it.
    """
    levels = load_levels(path, size=(resolution, resolution), channels=channels, crop=crop, flip=flip)
    return values_of_pictures("pixels", levels)


def load_levels(
    path: Content, *, size: Size, channels: int = 3, crop: tuple[float, float] = CENTRE, flip: bool = False
) -> Tensor:
    """The picture as uint8 levels, upright and cut to `size`, (channels, height, width).

    It is resized until it just covers `size` (bicubic, with antialiasing), then `size` is cut out at `crop`: fractions
    in [0, 1) of what is left over to the left and above. EXIF rotation and colour profile are applied, transparency
    becomes white (see `colours`). `channels` is 3 for RGB, 1 for grey.

    Raises:
        PictureError: the file cannot be decoded; the message names it.
    """
    try:
        with opened_picture(path) as opened:
            _refuse_unfit(opened)
            colours = colours_of(opened)
            picture = srgb_on_white(ImageOps.exif_transpose(opened), colours, "L" if channels == 1 else "RGB")
    except Exception as error:  # as above; nothing goes on after it
        raise PictureError(path, reason_of(error)) from error
    picture = cut_out(picture, placing(picture.size, size, crop), size, flip=flip)
    levels = np.array(picture, dtype=np.uint8).reshape(size[1], size[0], channels)
    return torch.from_numpy(levels).permute(2, 0, 1).contiguous()  # (C, H, W)


@dataclass(frozen=True, slots=True, kw_only=True)
class CropPlacing:
    """The size to which a picture is resized, and the corner of the piece that is cut out of it, in pixels."""

    resized: Size
    """The width and height to which the picture is resized."""
    left: int
    """The number of pixels left of the piece."""
    top: int
    """The number of pixels above the piece."""


def placing(found: Size, size: Size, crop: tuple[float, float]) -> CropPlacing:
    """The size to which a picture of size `found` is resized so that it covers `size`, and the corner of the cut.

    `crop`: fractions in [0, 1) of what is left over to the left and above.
    """
    scale = max(wanted / side for wanted, side in zip(size, found, strict=True))
    # Rounding must not leave a side too short.
    width, height = (max(wanted, round(side * scale)) for wanted, side in zip(size, found, strict=True))
    left, top = (  # each place of the cut has the same probability
        int(fraction * (side - wanted + 1)) for fraction, side, wanted in zip(crop, (width, height), size, strict=True)
    )
    return CropPlacing(resized=(width, height), left=left, top=top)


def upright_size(path: Content) -> tuple[int, int]:
    """Width and height of the picture as it is seen, from its header.

    Raises:
        PictureError: the header cannot be read; the message names the file.
    """
    try:
        with opened_picture(path) as picture:
            return _upright(picture)
    except Exception as error:  # as in read_header
        raise PictureError(path, reason_of(error)) from error


def _upright(picture: Image.Image) -> Size:
    """Width and height of an opened picture as it is seen, after the turn that its EXIF data state."""
    is_turned = picture.getexif().get(ExifTags.Base.Orientation, 1) >= _FIRST_TURNED
    return picture.size[::-1] if is_turned else picture.size


def save_picture(pixels: Tensor, path: Path) -> None:
    """Writes pixels in [-1, 1], (3, H, W) or (1, H, W), as the picture file `path`; clamps values outside the range."""
    levels = ((pixels.detach().float().cpu().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    values = levels.permute(1, 2, 0).numpy()  # (H, W, C)
    Image.fromarray(values[..., 0] if values.shape[-1] == 1 else values).save(path)


def _refuse_unfit(picture: Image.Image) -> None:
    """Refuses pictures whose sides differ too much, or whose levels have no known meaning.

    Raises:
        ValueError: the picture is such a one.
    """
    if picture.mode == "F":  # nothing says which level is white, and Pillow cuts them at 255
        raise ValueError("its levels are floating-point numbers of unknown range; save it with 8 or 16 bits")
    if problem := problem_of_sides(*picture.size):
        raise ValueError(problem)


def problem_of_sides(width: int, height: int) -> str | None:
    """A sentence if one side of a picture is more than 100 times as long as the other; else None."""
    if max(width, height) <= _MAX_RATIO * min(width, height):
        return None
    return f"it has {width} x {height} pixels; one side may be at most {_MAX_RATIO} times the other"


def cut_out(picture: Image.Image, place: CropPlacing, size: Size, *, flip: bool) -> Image.Image:
    """The piece of the given size that is cut out of a picture, which is first resized.

    `place`: the size to which it is resized, and the corner of the piece. `flip`: mirror the piece.
    """
    if place.resized != picture.size:
        picture = picture.resize(place.resized, Image.Resampling.BICUBIC)
    picture = picture.crop((place.left, place.top, place.left + size[0], place.top + size[1]))
    return ImageOps.mirror(picture) if flip else picture


def reason_of(error: Exception) -> str:
    """The error's class and message in one line."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
