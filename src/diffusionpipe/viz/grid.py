"""Captioned pictures in a grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, isqrt
from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.viz.drawing_file import write_drawing

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

_SIDE = 144
"""The side in pixels to which small pictures are enlarged, about, by a whole factor."""
_GAP = 12
_FONT_SIZE = 15
_LINE = 19
_MAX_LINES = 3
_CLIP = 4
"""The number of dimensions of a clip's array."""


def square_columns(count: int) -> int:
    """The number of columns, at most 10, of a grid of `count` cells: about square, with full rows where possible."""
    square = min(10, isqrt(max(0, count - 1)) + 1)  # the square root, rounded up
    return next((columns for columns in range(square, 11) if count % columns == 0), square)


def sample_grid(
    images: Sequence[tuple[str, np.ndarray | Image]], path: Path, *, columns: int, rate: float = 1.0
) -> None:
    """Write pictures or clips as one file, row by row, each over its caption; the ending says the kind of file.

    Pictures are (H, W, 3) uint8 arrays or PIL images, clips (F, H, W, 3) arrays that play together, `rate` frames a
    second; a shorter one waits with its last frame. Small ones are enlarged by a whole factor without smoothing, so
    that every pixel stays crisp. Captions wrap to the width of the picture, at most three lines.

    Raises:
        ConfigError: the file cannot be written, or its ending is unknown.
    """
    assert images, "a grid needs pictures"
    assert columns >= 1, columns
    count = max(len(_frames(image)) for _, image in images)
    write_drawing(_sheets(images, columns, count), count, path, rate=rate)


def _sheets(images: Sequence[tuple[str, np.ndarray | Image]], columns: int, count: int) -> Iterator[Image]:
    """The `count` frames of the grid's file: each shows one frame of every clip, with the captions.

    A clip that is shorter than `count` frames waits with its last frame.
    """
    from PIL import Image, ImageDraw

    clips = [_frames(image) for _, image in images]
    pictures = [_enlarged(clip[0]) for clip in clips]
    width = max(max(picture.width for picture in pictures), 96)  # captions need some width
    height = max(picture.height for picture in pictures)
    font = _font()
    captions = [_wrapped(caption, font, width) for caption, _ in images]
    columns = min(columns, len(images))
    num_rows = ceil(len(images) / columns)
    row_height = height + max(map(len, captions)) * _LINE + _GAP + 6
    empty = Image.new("RGB", (columns * (width + _GAP) + _GAP, num_rows * row_height + _GAP), "white")
    draw = ImageDraw.Draw(empty)
    places = [(_GAP + i % columns * (width + _GAP), _GAP + i // columns * row_height) for i in range(len(images))]
    for (x, y), lines in zip(places, captions, strict=True):
        for number, line in enumerate(lines):
            draw.text((x + width / 2, y + height + 5 + number * _LINE), line, font=font, fill="#222222", anchor="ma")
    for number in range(count):
        sheet = empty.copy()
        for (x, y), clip in zip(places, clips, strict=True):
            picture = _enlarged(clip[min(number, len(clip) - 1)])
            sheet.paste(picture, (x + (width - picture.width) // 2, y + (height - picture.height) // 2))
        yield sheet


def _frames(image: np.ndarray | Image) -> Sequence[np.ndarray | Image]:
    """The frames of a clip; for a picture, the picture alone."""
    import numpy as np

    return list(image) if isinstance(image, np.ndarray) and image.ndim == _CLIP else [image]


def _enlarged(image: np.ndarray | Image) -> Image:
    from PIL import Image

    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    picture = picture.convert("RGB")
    factor = max(1, round(_SIDE / max(picture.width, picture.height)))
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def _font() -> FreeTypeFont:
    """The font of captions: DejaVu Sans, which every matplotlib has, with Latin, Greek, Cyrillic and more."""
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), _FONT_SIZE)


def _wrapped(caption: str, font: FreeTypeFont, width: int) -> list[str]:
    """The caption in at most `_MAX_LINES` lines of at most `width` pixels; an ellipsis ends a longer caption."""
    lines = [""]
    if len(caption) > _MAX_LINES * width:  # no line has more letters than pixels
        caption = f"{caption[: _MAX_LINES * width]}…"
    for word in caption.split():
        longer = f"{lines[-1]} {word}".strip()
        # A word too long for a line of its own gets one all the same, and is shortened below.
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    if len(lines) > _MAX_LINES:
        lines = [*lines[: _MAX_LINES - 1], f"{lines[_MAX_LINES - 1]}…"]
    return [_shortened(line, font, width) for line in lines]


def _shortened(line: str, font: FreeTypeFont, width: int) -> str:
    if font.getlength(line) <= width:
        return line
    stem = line.rstrip("…")
    while stem and font.getlength(f"{stem}…") > width:
        stem = stem[:-1]
    return f"{stem}…"
