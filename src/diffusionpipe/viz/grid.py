"""Captioned pictures in a grid."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.ir.output_file import write_atomically

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

_SIDE = 144
"""Small pictures are enlarged to about this many pixels, by a whole factor."""
_GAP = 12
_FONT_SIZE = 15
_LINE = 19
_MAX_LINES = 3


def sample_grid(images: Sequence[tuple[str, np.ndarray | Image]], path: Path, *, columns: int) -> None:
    """Write a PNG with the pictures row by row, each over its caption.

    Pictures are (H, W, 3) uint8 arrays or PIL images. Small ones are enlarged by a whole factor without smoothing, so
    that every pixel stays crisp. Captions wrap to the width of the picture, at most three lines.

    Raises:
        ConfigError: the file cannot be written.
    """
    from PIL import Image, ImageDraw

    assert images, "a grid needs pictures"
    assert columns >= 1, columns
    pictures = [_enlarged(image) for _, image in images]
    width = max(max(picture.width for picture in pictures), 96)
    height = max(picture.height for picture in pictures)
    font = _font()
    captions = [_wrapped(caption, font, width) for caption, _ in images]
    columns = min(columns, len(images))
    num_rows = ceil(len(images) / columns)
    row_height = height + max(map(len, captions)) * _LINE + _GAP + 6
    sheet = Image.new("RGB", (columns * (width + _GAP) + _GAP, num_rows * row_height + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (picture, lines) in enumerate(zip(pictures, captions, strict=True)):
        x, y = _GAP + index % columns * (width + _GAP), _GAP + index // columns * row_height
        sheet.paste(picture, (x + (width - picture.width) // 2, y + (height - picture.height) // 2))
        for number, line in enumerate(lines):
            draw.text((x + width / 2, y + height + 5 + number * _LINE), line, font=font, fill="#222222", anchor="ma")
    drawn = BytesIO()
    sheet.save(drawn, format="PNG")
    write_atomically(path, drawn.getvalue())


def _enlarged(image: np.ndarray | Image) -> Image:
    from PIL import Image

    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    picture = picture.convert("RGB")
    factor = max(1, round(_SIDE / max(picture.width, picture.height)))
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def _font() -> FreeTypeFont:
    """DejaVu Sans, which every matplotlib brings along: Latin, Greek, Cyrillic and more."""
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), _FONT_SIZE)


def _wrapped(caption: str, font: FreeTypeFont, width: int) -> list[str]:
    """The caption in lines that fit; an ellipsis ends what does not."""
    lines = [""]
    if len(caption) > _MAX_LINES * width:  # no line has more letters than pixels
        caption = f"{caption[: _MAX_LINES * width]}…"
    for word in caption.split():
        longer = f"{lines[-1]} {word}".strip()
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
