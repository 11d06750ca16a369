"""Files of drawn pictures and clips, of the kind that the name's ending says.

.png    a picture; of several frames an animated PNG, with all colours
.webp   the same, smaller
.gif    256 colours a frame, at most 50 frames a second
.mp4    H.264, which every browser and editor plays; a picture is a clip of one second
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from fractions import Fraction
from io import BytesIO
from itertools import chain, pairwise
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

from diffusionpipe.errors import ConfigError
from diffusionpipe.files.output_file import write_atomically

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

logger = logging.getLogger(__name__)

MOVING = (".webp", ".gif", ".mp4")
"""Endings of files in which clips play; a PNG shows some of their frames side by side."""
ENDINGS = (".png", *MOVING)
_MOST_OF_GIF = 50
"""The most frames a second of a GIF. Browsers show a frame with a shorter delay for a tenth of a second."""
_MOST_SIDE = {".webp": 16_383, ".gif": 65_535, ".mp4": 4_096}
"""The longest side in pixels that the kind of file or its players can hold."""
_BT709 = 1
"""The number with which H.264 names the colours of television (BT.709), and also its range of levels."""


def check_drawing_file(path: Path, rate: float | None = None) -> None:
    """Check that drawings can be written to a file of this name; `rate`: frames of a second of clips, None: unknown.

    Raises:
        ConfigError: its ending is unknown, a package is missing, or it cannot show that rate.
    """
    if _is_device(path):
        return
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        *others, last = ENDINGS
        ends = f"ends in {path.suffix}" if path.suffix else "has no ending"
        raise ConfigError(f"{path} {ends}; pictures and clips are written as {', '.join(others)} or {last}")
    if ending == ".mp4":
        _check_encoder()
    if ending == ".gif" and rate is not None and rate > _MOST_OF_GIF:
        raise ConfigError(
            f"{path}: a GIF shows at most {_MOST_OF_GIF} frames a second, not {rate:g}; use .mp4 or .webp, or a "
            "smaller --frame-rate"
        )


def _check_encoder() -> None:
    try:
        import av

        av.Codec("libx264", "w")
    except ImportError as error:
        raise ConfigError(
            f".mp4 files are encoded by PyAV, which cannot be imported ({error}); install it with: "
            "pip install av, or use .webp"
        ) from error
    except ValueError as error:
        raise ConfigError("this PyAV has no encoder for H.264; use .webp, or install PyAV from PyPI") from error


def write_drawing(frames: Iterable[Image], count: int, path: Path, *, rate: float) -> None:
    """Write `count` frames, RGB and of one size, as a picture or clip file by its ending; `rate`: frames of a second.

    Raises:
        ConfigError: the ending is unknown, or the file cannot be written.
    """
    check_drawing_file(path)
    ending = ".png" if _is_device(path) else path.suffix.lower()
    coming = iter(frames)
    first = next(coming)
    if (size := _fitting(first.size, ending)) != first.size:
        logger.warning('out=%s pixels=%dx%d reason="%s files hold no larger ones"', path, *size, ending)
    shown = (frame if frame.size == size else frame.resize(size) for frame in chain([first], coming))
    write_atomically(path, _mp4(shown, count, rate) if ending == ".mp4" else _picture(shown, count, ending, rate))


def write_clip(levels: np.ndarray, path: Path, *, rate: float) -> None:
    """Write a picture, (H, W, 3), or a clip, (F, H, W, 3), of uint8 levels to a file; `rate`: frames of a second.

    Raises:
        ConfigError: the ending is unknown, or the file cannot be written.
    """
    from PIL import Image

    frames = levels.reshape(-1, *levels.shape[-3:])
    write_drawing(map(Image.fromarray, frames), len(frames), path, rate=rate)


def _fitting(size: tuple[int, int], ending: str) -> tuple[int, int]:
    """The (width, height) in pixels for a file with this ending: `size`, or scaled down if the file cannot hold it."""
    scale = min(1.0, _MOST_SIDE.get(ending, max(size)) / max(size))
    return max(1, int(size[0] * scale)), max(1, int(size[1] * scale))


def _picture(frames: Iterator[Image], count: int, ending: str, rate: float) -> bytes:
    """The bytes of a picture file that Pillow writes, from `count` frames at `rate` frames a second."""
    first, *others = map(_with_palette, frames) if ending == ".gif" else frames
    quality: dict[str, Any] = {}
    if ending == ".webp":
        quality = {"quality": 90, "method": 4} if count > 1 else {"lossless": True}
    played: dict[str, Any] = {}
    if count > 1:
        unit = 10 if ending == ".gif" else 1  # delays of a GIF are whole hundredths of a second
        played = {"save_all": True, "append_images": others, "duration": _durations(count, rate, unit), "loop": 0}
    drawn = BytesIO()
    first.save(drawn, format=ending[1:], **quality, **played)
    return drawn.getvalue()


def _with_palette(frame: Image) -> Image:
    """The frame reduced to a palette of its own 256 colours, with dithering for its other colours."""
    from PIL import Image

    return frame.quantize(palette=frame.quantize(256), dither=Image.Dither.FLOYDSTEINBERG)


def _durations(count: int, rate: float, unit: int) -> list[int]:
    """How long each of `count` frames is shown, in milliseconds, rounded to `unit` so that errors do not add up.

    >>> _durations(4, 16, 10)
    [60, 60, 70, 60]
    """
    ends = [round(number * 1000 / (rate * unit)) * unit for number in range(count + 1)]
    return [end - start for start, end in pairwise(ends)]


def _mp4(frames: Iterator[Image], count: int, rate: float) -> bytes:
    """The bytes of an .mp4 file with `count` frames in H.264, with the colours of television (BT.709).

    Players need even sides, so the last line and the last column of pixels may be doubled.
    """
    import av
    import numpy as np

    drawn = BytesIO()
    with av.open(drawn, "w", format="mp4") as container:
        # Film and television have rates such as 30000/1001.
        shown = Fraction(rate).limit_denominator(1001) if count > 1 else Fraction(1)
        stream: Any = container.add_stream("libx264", rate=shown, options={"crf": "14", "preset": "medium"})
        for number, picture in enumerate(frames):
            levels = np.asarray(picture)
            even = np.pad(levels, [(0, levels.shape[0] % 2), (0, levels.shape[1] % 2), (0, 0)], mode="edge")
            if number == 0:
                stream.height, stream.width, stream.pix_fmt = *even.shape[:2], "yuv420p"
                context = stream.codec_context
                context.color_primaries = context.color_trc = context.colorspace = context.color_range = _BT709
            frame = av.VideoFrame.from_ndarray(even, format="rgb24").reformat(
                format="yuv420p", dst_colorspace=_BT709, dst_color_range=_BT709
            )
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))  # frames that the encoder still holds
    return drawn.getvalue()


def _is_device(path: Path) -> bool:
    """Whether the path names a device or a FIFO, such as /dev/stdout, which gets a PNG."""
    try:
        found = path.stat()
    except OSError:
        return False
    return not S_ISREG(found.st_mode) and not path.is_dir()
