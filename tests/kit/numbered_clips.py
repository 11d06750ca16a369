"""Clips whose frames carry their numbers, written by av's encoders at times that the test knows.

A frame is a board of 4 x 3 blocks. Of the upper row only the left block is white, so a frame that is turned or mirrored
is noticed; the other eight blocks are the bits of the number. Blocks of 16 pixels survive every codec.
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import radians
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

COLUMNS, ROWS, BLOCK = 4, 3, 16
SIZE = (COLUMNS * BLOCK, ROWS * BLOCK)
_MARK = (1, 0, 0, 0)
Pixels = NDArray[np.uint8]


def board(number: int) -> Pixels:
    """The frame of a number, (48, 64), black and white."""
    bits = [number >> place & 1 for place in range(8)]
    blocks = np.array([*_MARK, *bits], dtype=np.uint8).reshape(ROWS, COLUMNS)
    return blocks.repeat(BLOCK, axis=0).repeat(BLOCK, axis=1) * 255


def numbers_of(levels: Pixels) -> list[int]:
    """The numbers of frames (F, 48, 64, 3)."""
    return [_number_of(frame) for frame in levels]


def _number_of(frame: Pixels) -> int:
    blocks = frame.astype(float).mean(axis=2).reshape(ROWS, BLOCK, COLUMNS, BLOCK)[:, 4:12, :, 4:12].mean(axis=(1, 3))
    assert (np.abs(blocks - 127.5) > 60).all(), f"blocks are neither black nor white: {blocks.round()}"
    bits = (blocks > 127.5).astype(int).ravel()
    assert tuple(bits[:4]) == _MARK, f"the frame is turned or mirrored: {bits}"
    return int(sum(bit << place for place, bit in enumerate(bits[4:])))


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a clip is written."""

    ending: str
    codec: str
    times: Sequence[Fraction]
    """In seconds, of each frame."""
    every: int
    """A key frame each so many frames, from the first on."""
    form: str = "yuv420p"
    options: dict[str, str] = field(default_factory=dict)
    stored: Callable[[Pixels], Pixels] = lambda seen: seen
    """What is stored of a frame that is seen so."""
    shown: tuple[int, bool, bool] | None = None
    """The display matrix: degrees counter-clockwise, then mirrored left to right and top to bottom."""
    aspect: Fraction | None = None
    """Width of a pixel for a height of 1."""
    base: Fraction = Fraction(1, 1000)
    is_transparent: bool = False
    """Whether white is a transparent black."""
    container: dict[str, str] = field(default_factory=dict)
    """Options of the file."""


def write(kind: Kind, path: Path) -> Path:
    """The clip as a file."""
    with av.open(str(path), "w", options=kind.container) as container:
        stream = container.add_stream(kind.codec, rate=Fraction(12), options=kind.options)
        first = kind.stored(board(0))
        stream.height, stream.width, stream.pix_fmt = *first.shape, kind.form
        stream.codec_context.gop_size = kind.every
        stream.time_base = stream.codec_context.time_base = kind.base
        if kind.aspect is not None:
            stream.codec_context.sample_aspect_ratio = kind.aspect
        for number, time in enumerate(kind.times):
            frame = _frame(kind, kind.stored(board(number)))
            frame.pts, frame.time_base = round(time / kind.base), kind.base
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    if kind.shown is not None:
        _show(path, *kind.shown)
    return path


def _show(path: Path, degrees: int, is_mirrored: bool, is_upside_down: bool) -> None:
    """Put a display matrix into an MP4 or QuickTime file: in "tkhd", as 16.16 numbers, for x and y downwards."""
    cos, sin = (round(part(radians(degrees)) * 2**16) for part in (math.cos, math.sin))
    across, down = (-1 if is_mirrored else 1), (-1 if is_upside_down else 1)
    matrix = (across * cos, down * -sin, 0, across * sin, down * cos, 0, 0, 0, 1 << 30)
    content = bytearray(path.read_bytes())
    place = content.index(b"tkhd") + 44
    content[place : place + 36] = struct.pack(">9i", *matrix)
    path.write_bytes(content)


def _frame(kind: Kind, pixels: Pixels) -> av.VideoFrame:
    if kind.is_transparent:
        levels = np.stack([np.zeros_like(pixels)] * 3 + [255 - pixels], axis=2)
        return av.VideoFrame.from_ndarray(np.ascontiguousarray(levels), format="rgba").reformat(format=kind.form)
    levels = np.ascontiguousarray(np.repeat(pixels[..., None], 3, axis=2))
    return av.VideoFrame.from_ndarray(levels, format="rgb24").reformat(format=kind.form)


def constant(rate: Fraction | int, count: int) -> list[Fraction]:
    """Times at a constant rate."""
    return [number / Fraction(rate) for number in range(count)]


def uneven(count: int, unit: Fraction = Fraction(1, 1000), seed: int = 0) -> list[Fraction]:
    """Times as of a screen that was recorded where something moved."""
    gaps = np.random.default_rng(seed).choice((20, 30, 40, 50, 80, 120), count - 1)
    return [Fraction(0), *(Fraction(int(time), 1000) // unit * unit for time in np.cumsum(gaps))]


def paused(count: int) -> list[Fraction]:
    """25 frames a second, with two pauses."""
    gaps = [40 if number % 9 else 1400 for number in range(1, count)]
    return [Fraction(0), *(Fraction(int(time), 1000) for time in np.cumsum(gaps))]
