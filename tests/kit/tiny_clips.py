"""Short clips of noise and of grey levels, written as files."""

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

CODECS = {"mp4": "libx264", "webm": "libvpx-vp9", "mkv": "libx264", "avi": "mpeg4", "mov": "mpeg4"}
"""Kinds of files, and how they are packed here."""


def write_clip(
    path: Path, frames: Sequence[np.ndarray], *, rate: float = 8, codec: str = "libx264", turned: int = 0
) -> Path:
    """A file of frames (H, W, 3), as exact as the codec can be."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(rate).limit_denominator(1000))
        stream.height, stream.width = frames[0].shape[:2]
        if codec == "libx264":
            stream.pix_fmt, stream.options = "yuv444p", {"qp": "0", "g": "4"}  # lossless, a key frame every fourth
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode(None))
    return path


def grey_frames(count: int, *, width: int = 32, height: int = 16, step: int = 8) -> list[np.ndarray]:
    """Frames of one grey each, the next one `step` levels lighter: a frame's level says its number."""
    return [np.full((height, width, 3), number * step, dtype=np.uint8) for number in range(count)]


def save_clips(folder: Path, count: int = 8, *, frames: int = 20, width: int = 32, height: int = 32) -> Path:
    """Clips of noise with captions."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    lines = []
    for number in range(count):
        noise = random.integers(0, 256, (frames, height // 4, width // 4, 3), dtype=np.uint8)
        write_clip(folder / f"{number:03d}.mp4", list(noise.repeat(4, axis=1).repeat(4, axis=2)))
        lines.append(json.dumps({"file_name": f"{number:03d}.mp4", "text": "abcdefgh"[number % 8]}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
