"""Clip files to tensors: some frames of a clip, upright, cut to one size, as levels.

    file       |f0  |f1  |f2  |f3  |f4  |f5  |f6  |f7  |f8  |        12 frames a second
    taken            t0       t1       t2                            3 frames, 6 a second, from a start on
                     f1       f3       f5                            the last frame that is shown at each time

PyAV decodes them, from the key frame before the start on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir.input_file import problem_of_file
from diffusionpipe.trainer.data.colours import srgb_on_white
from diffusionpipe.trainer.data.images import (
    CENTRE,
    PictureError,
    Size,
    cut_out,
    placing,
    problem_of_sides,
    reason_of,
)
from diffusionpipe.units import Seconds

if TYPE_CHECKING:
    from PIL import Image

ENDINGS = (".mp4", ".webm", ".mov", ".mkv", ".avi", ".gif")
PLAYED = 16
"""Frames of a second that a clip is shown with, where nothing says how many."""
_EARLY = 0.25
"""Of a frame's time: by so much a frame may be shown too late, because files round the times of frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What is taken of each clip."""

    frames: int
    rate: float | None = None
    """Frames of a second that are taken; None: each frame of the file."""

    def problem_of(self, clip: "Described") -> str | None:
        """Why a clip has too little, or None if it has enough."""
        if self.num_starts(clip):
            return None
        at = "" if self.rate is None else f", and {self.rate:g} of a second are taken"
        return (
            f"it has {clip.frames} frames, {clip.seconds:.2f} s{at}; {self.frames} are needed: use a longer clip, or "
            "set data.frames or data.frame_rate"
        )

    def num_starts(self, clip: "Described") -> int:
        """At how many frames of the clip the taken ones may begin; 0: it is too short."""
        last = (self.frames - 1) * self._step(clip)  # between the first and the last taken frame, in frames of the file
        return max(0, clip.frames - int(last + 1 - _EARLY))

    def times(self, clip: "Described", start: int) -> list[Seconds]:
        """When the taken frames are shown, from frame `start` of the file on."""
        return [(start + number * self._step(clip)) / clip.rate for number in range(self.frames)]

    def _step(self, clip: "Described") -> float:
        return 1.0 if self.rate is None else clip.rate / self.rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What a clip's file says of it."""

    frames: int
    rate: float
    """Frames in a second."""

    @property
    def seconds(self) -> Seconds:
        """How long it is."""
        return self.frames / self.rate


def check_decoder() -> None:
    """Refuse to read clips where the package that decodes them is missing.

    Raises:
        ConfigError: it is.
    """
    try:
        import av  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"data.frames: clips are decoded by PyAV, which cannot be imported ({error}); install it with: "
            "pip install 'diffusionpipe[clips]'"
        ) from error


def problem_of_clip(path: Path, taken: Taken) -> str | None:
    """Why a clip cannot be trained on, or None if it can; its first frame is decoded, the others are counted."""
    if problem := problem_of_file(path):
        return problem
    try:
        with _opened(path) as (container, stream):
            clip = _described(path, stream)
            first = next(container.decode(stream))
            if problem := problem_of_sides(first.width, first.height):
                return problem
    except StopIteration:
        return "it has no frames"
    except Exception as error:  # the formats' readers raise whatever their parsers stumble over
        return reason_of(error)
    return taken.problem_of(clip)


def load_clip(
    path: Path,
    *,
    size: Size,
    taken: Taken,
    start: float = 0.0,
    crop: tuple[float, float] = CENTRE,
    flip: bool = False,
) -> Tensor:
    """Frames of the clip as uint8 levels, (3, frames, height, width).

    `start`: a fraction in [0, 1) of the frames at which they may begin. All frames are resized, cut and mirrored alike,
    as `images.load_levels` does with a picture.

    Raises:
        PictureError: the file cannot be decoded, or it has too few frames; the message names it.
    """
    try:
        with _opened(path) as (container, stream):
            clip = _described(path, stream)
            if problem := taken.problem_of(clip):
                raise ValueError(problem)
            times = taken.times(clip, int(start * taken.num_starts(clip)))
            frames = list(_shown(container, stream, times, tolerance=_EARLY / clip.rate))
    except Exception as error:  # as above
        raise PictureError(path, reason_of(error)) from error
    if len(frames) < taken.frames:
        raise PictureError(path, f"it ends after {len(frames)} of {taken.frames} frames")
    place = placing(frames[0].size, size, crop)
    levels = np.stack([np.asarray(cut_out(frame, place, size, flip=flip)) for frame in frames])  # (F, H, W, 3)
    return torch.from_numpy(levels).permute(3, 0, 1, 2).contiguous()


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """The file and its first stream of pictures."""
    import av

    with av.open(str(path)) as container:
        if not container.streams.video:
            raise ValueError("it has no pictures")
        stream = container.streams.video[0]
        stream.thread_type = "NONE"  # data workers are processes of their own
        yield container, stream


def _described(path: Path, stream: Any) -> Described:
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    if not rate > 0:
        raise ValueError("its file does not say how many frames a second has")
    return Described(frames=stream.frames or _counted(path), rate=rate)


def _counted(path: Path) -> int:
    """The frames of a file that does not say how many it has; they are not decoded."""
    with _opened(path) as (container, stream):
        return sum(1 for packet in container.demux(stream) if packet.size)


def _shown(container: Any, stream: Any, times: Sequence[Seconds], *, tolerance: Seconds) -> "Iterator[Image.Image]":
    """The frames that are shown at these times, in order; fewer if the clip ends before."""
    base, first = float(stream.time_base), float((stream.start_time or 0) * stream.time_base)
    if times[0] > 0:
        container.seek(int((first + times[0]) / base), stream=stream, backward=True)
    wanted, shown = list(times), None
    for frame in container.decode(stream):
        while shown is not None and wanted and wanted[0] + tolerance < frame.time - first:
            yield _upright(shown)
            del wanted[0]
        if not wanted:
            return
        shown = frame if frame.time - first <= times[-1] + tolerance else None
    while shown is not None and wanted:
        yield _upright(shown)
        del wanted[0]


def _upright(frame: Any) -> "Image.Image":
    """The frame as it is seen: telephones store clips lying down, and say by how much they are turned.

    What is transparent becomes white, as in pictures.
    """
    from PIL import Image

    picture: Image.Image = frame.to_image()
    if any(component.is_alpha for component in frame.format.components):
        picture = srgb_on_white(Image.fromarray(frame.to_ndarray(format="rgba")), "RGB", "RGB")
    turned = int(getattr(frame, "rotation", 0)) % 360
    return picture.rotate(turned, expand=True) if turned else picture
