"""Opens picture files, also large ones and ones with long texts, and corrects their transparent level."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from PIL import Image, PngImagePlugin

from diffusionpipe.trainer.data.content import Content, bytes_of
from diffusionpipe.trainer.data.decoding.colours import stored_mode
from diffusionpipe.units import Bytes

MAX_SIDE = 32_000
"""The square root of the largest number of pixels of a picture, which takes 3 GB of memory as RGB."""
_MAX_TEXT: Bytes = 64 * 2**20
"""The most bytes of one text or colour profile in a PNG, unpacked. Graphs of ComfyUI have a few MiB, printers' profiles
some more."""
_GREY_STEPS = {"L;2": 85, "L;4": 17}
"""The factor of the transparent level, by the stored mode: Pillow spreads grey of few bits over 0 to 255, but not this
level."""


@contextmanager
def opened_picture(path: Content) -> Iterator[Image.Image]:
    """A context with Pillow's picture, of which only the header has been read.

    Raises:
        ValueError: the picture has more than 32,000 x 32,000 pixels, or a text or profile of more than 64 MiB.
        Exception: any error of the reader of its format.
    """
    # Pillow has limits of its own, for the whole process: 179 megapixels, and 1 MiB of a text.
    Image.MAX_IMAGE_PIXELS = None
    PngImagePlugin.MAX_TEXT_CHUNK, PngImagePlugin.MAX_TEXT_MEMORY = _MAX_TEXT, 4 * _MAX_TEXT
    try:
        with Image.open(path if isinstance(path, Path) else BytesIO(bytes_of(path))) as picture:
            width, height = picture.size
            if width * height > MAX_SIDE**2:
                most = f"{MAX_SIDE:,} x {MAX_SIDE:,}"
                raise ValueError(f"it has {width:,} x {height:,} pixels; at most {most} are read: make it smaller")
            _correct_transparency(picture)
            yield picture
    except ValueError as error:
        if "MAX_TEXT" not in str(error):  # the name that Pillow's message has
            raise
        raise ValueError(
            f"it holds a text or a colour profile of more than {_MAX_TEXT // 2**20} MiB; save it without"
        ) from error


def _correct_transparency(picture: Image.Image) -> None:
    """Gives the transparent level or colour of a PNG the scale that Pillow gives the picture's pixels."""
    transparent, stored = picture.info.get("transparency"), stored_mode(picture)
    if transparent is None or picture.format != "PNG":
        return
    if stored in _GREY_STEPS:
        picture.info["transparency"] = transparent * _GREY_STEPS[stored]
    elif stored == "RGB;16B":  # Pillow keeps the upper byte: colours that differ in the lower ones cannot be told apart
        picture.info["transparency"] = tuple(level >> 8 for level in transparent)
