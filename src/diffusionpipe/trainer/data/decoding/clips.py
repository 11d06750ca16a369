"""Decodes clip files to tensors: some frames of a clip, upright, cut to one size, as levels.

    file       |f0  |f1  |f2  |f3  |f4  |f5  |f6  |f7  |f8  |        12 frames a second
    taken            t0       t1       t2                            3 frames, 6 a second, from a start on
                     f1       f3       f5                            the last frame whose time is not after each

Times come from the file (see `clip_times`), so frames of uneven lengths are taken as they are seen. PyAV decodes from
the key frame before the start on.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionpipe.errors import ConfigError
from diffusionpipe.files.input_file import problem_of_file
from diffusionpipe.trainer.data.decoding.clip_file import Key, decoded_from
from diffusionpipe.trainer.data.decoding.clip_times import EXACT, FrameTimes, timeline_of
from diffusionpipe.trainer.data.decoding.colours import srgb_on_white
from diffusionpipe.trainer.data.decoding.images import (
    CENTRE,
    CropPlacing,
    Header,
    PictureError,
    Size,
    cut_out,
    placing,
    problem_of_sides,
    reason_of,
)

if TYPE_CHECKING:
    from PIL import Image

ENDINGS = (".mp4", ".webm", ".mov", ".mkv", ".avi", ".gif")
PLAYED = 16
"""The number of frames per second with which a clip is shown if nothing says how many."""
_SKEWED = 0.01
"""The largest ratio of a display matrix's small numbers to its large ones that counts as turned by a quarter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSelection:
    """The number of frames that are taken of each clip, and their rate."""

    frames: int
    """The number of frames that are taken of each clip."""
    rate: float | None = None
    """The number of frames per second that are taken; None: each frame of the file."""
    beside_pictures: bool = False
    """Whether pictures are samples too, besides clips."""

    def most(self, clip: FrameTimes) -> int:
        """The largest number of frames that can be taken of the clip at the rate."""
        if self.rate is None:
            return len(clip.times)
        return int((clip.times[-1] - clip.times[0] + EXACT) * self.rate) + 1

    def problem_of(self, clip: FrameTimes) -> str | None:
        """Why a clip has too few frames to take, None if it has enough."""
        if self.num_starts(clip):
            return None
        at = "" if self.rate is None else f", and {self.rate:g} of a second are taken"
        return (
            f"it has {len(clip.times)} frames, {clip.seconds:.2f} s{at}; {self.frames} are needed: use a longer clip, "
            "or set data.frames or data.frame_rate"
        )

    def num_starts(self, clip: FrameTimes) -> int:
        """The number of the clip's frames at which the taken frames may begin; 0 if the clip is too short."""
        if self.rate is None:
            return max(0, len(clip.times) - self.frames + 1)
        return bisect_right(clip.times, clip.times[-1] - (self.frames - 1) / self.rate + EXACT)

    def numbers(self, clip: FrameTimes, start: int) -> list[int]:
        """The numbers of the file's frames that are taken of the clip if they begin with frame `start`."""
        if self.rate is None:
            return list(range(start, start + self.frames))
        return [clip.shown_at(clip.times[start] + number / self.rate) for number in range(self.frames)]


def selection_of(counts: Sequence[int], rate: float | None) -> FrameSelection | None:
    """The smallest number of frames that a sample needs, and their rate; None where all samples are pictures.

    `counts`: the numbers of frames of all sizes of samples, ascending. `rate`: the frames per second that are taken.
    """
    if counts[-1] == 1:
        return None
    return FrameSelection(frames=counts[0], rate=rate, beside_pictures=counts[0] == 1)


def check_decoder() -> None:
    """Refuses to read clips where PyAV, which decodes them, is missing.

    Raises:
        ConfigError: PyAV cannot be imported.
    """
    try:
        import av  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"data.frames: clips are decoded by PyAV, which cannot be imported ({error}); install it with: "
            "pip install av"
        ) from error


def problem_of_clip(path: Path, taken: FrameSelection) -> str | None:
    """A sentence on why a clip cannot be trained on; None if it can."""
    return clip_header(path, taken).problem


def clip_header(path: Path, taken: FrameSelection) -> Header:
    """The size, rate and number of frames of a clip file, or its problem.

    `taken`: the frames that training takes of it.

    The first frame is decoded; of the others only the times are read.
    """
    if problem := problem_of_file(path):
        return Header(problem=problem)
    try:
        clip = timeline_of(path)
        first = next(decoded_from(path, None), None)
        if first is None:
            return Header(problem="none of its frames can be decoded; encode it again")
        size = _seen_size(first, clip.aspect)
    except Exception as error:  # the formats' readers raise whatever their parsers stumble over
        return Header(problem=_reason_of(error))
    return Header(problem=taken.problem_of(clip), size=size, rate=clip.rate, frames=taken.most(clip))


def is_clip(path: object) -> bool:
    """Whether `path` is the path of a clip file, by its ending."""
    return isinstance(path, Path) and path.suffix.lower() in ENDINGS


def load_clip(
    path: Path,
    *,
    size: Size,
    taken: FrameSelection,
    start: float = 0.0,
    crop: tuple[float, float] = CENTRE,
    flip: bool = False,
) -> Tensor:
    """The taken frames of the clip as uint8 levels, (3, frames, height, width).

    `start`: a fraction in [0, 1) that chooses among the frames at which they may begin. All frames are resized, cut and
    mirrored alike, as `images.load_levels` does with a picture.

    Raises:
        PictureError: the file cannot be decoded, or it has too few frames; the message names it.
    """
    try:
        clip = timeline_of(path)
        if problem := taken.problem_of(clip):
            raise ValueError(problem)
        pictures: list[NDArray[np.uint8]] = []
        place: CropPlacing | None = None
        for frame, times in _shown(path, clip, taken.numbers(clip, int(start * taken.num_starts(clip)))):
            # The first frame's, so that all are cut alike.
            place = place or placing(_seen_size(frame, clip.aspect), size, crop)
            pictures += [np.asarray(cut_out(_upright(frame), place, size, flip=flip))] * times
        if len(pictures) < taken.frames:
            raise ValueError(f"it ends after {len(pictures)} of {taken.frames} frames")
    except Exception as error:  # as above
        raise PictureError(path, _reason_of(error)) from error
    return torch.from_numpy(np.stack(pictures)).permute(3, 0, 1, 2).contiguous()  # (3, F, H, W)


def _reason_of(error: Exception) -> str:
    """The error of a reader of clips as text; for PyAV's errors without the path, and with FFmpeg's log."""
    if type(error) is ValueError:  # a sentence of ours
        return str(error)
    said = getattr(error, "strerror", None)
    if said is None or not hasattr(error, "log"):
        return reason_of(error)
    return f"{said} ({error.log[2].strip()})" if error.log else said


def _shown(path: Path, clip: FrameTimes, numbers: Sequence[int]) -> Iterator[tuple[Any, int]]:
    """Yields the frames of the clip with these numbers, in order, each with the number of times that it is taken.

    Fewer frames come if the clip ends before.
    """
    left, last, shown = list(numbers), -1, None
    for number, frame in _decoded(path, clip, numbers[0]):
        # A frame is shown until the next one begins: it serves all wanted numbers below that one's.
        if shown is not None and (taken := bisect_left(left, number)):
            yield shown, taken
            del left[:taken]
        if not left:
            return
        last, shown = number, frame
    # The last frame serves wanted numbers up to its own; the others lie after the end.
    if taken := bisect_right(left, last):
        yield shown, taken


def _decoded(path: Path, clip: FrameTimes, first: int) -> Iterator[tuple[int, Any]]:
    """An iterator of (number, frame) of the clip, which begins with frame `first` or before it.

    Raises:
        ValueError: the first frame cannot be decoded.
    """
    for key in clip.starts_before(first):
        frames = _numbered(path, clip, key)
        found = next(frames, None)
        if found is not None and found[0] <= first:  # else the seek has led too far
            return chain([found], frames)
    raise ValueError(f"its frame {first} cannot be decoded; encode it again")


def _numbered(path: Path, clip: FrameTimes, key: Key | None) -> Iterator[tuple[int, Any]]:
    """Yields (number, frame) of the clip from a key frame on, without frames before the clip's first shown frame."""
    seen: Counter[int] = Counter()
    for count, frame in enumerate(decoded_from(path, key)):
        if clip.is_counted:
            yield count, frame
        elif frame.pts is not None and frame.pts >= clip.stamps[0]:
            # Frames of equal times are told apart by counting them.
            yield min(bisect_left(clip.stamps, frame.pts) + seen[frame.pts], len(clip.stamps) - 1), frame
            seen[frame.pts] += 1


def _seen_size(frame: Any, aspect: float) -> Size:
    """Width and height of the frame as it is seen, upright and in square pixels.

    Where pixels are not square, one side is enlarged. `aspect`: the width of a pixel divided by its height.

    Raises:
        ValueError: the frame is too long or too high, or turned by less than a quarter.
    """
    width, height = round(frame.width * max(1.0, aspect)), round(frame.height / min(1.0, aspect))
    if problem := problem_of_sides(width, height):
        raise ValueError(problem)
    return (height, width) if _placed(frame).is_turned else (width, height)


class _Placed(NamedTuple):
    """The moves that bring a stored frame upright: rows and columns exchange, then each may reverse its order."""

    is_turned: bool = False
    """Whether rows and columns exchange."""
    is_mirrored: bool = False
    """Whether the left side becomes the right one."""
    is_upside_down: bool = False
    """Whether the top becomes the bottom."""


def _placed(frame: Any) -> _Placed:
    """The moves that bring the frame upright, by its display matrix.

    Telephones store clips lying down, some cameras mirrored.

    Raises:
        ValueError: the frame is turned by less than a quarter.
    """
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return _Placed()
    # x' = a x + c y and y' = b x + d y, with y downwards
    a, b, _, c, d, *_ = np.frombuffer(bytes(matrix), dtype=np.int32).astype(float) / 2**16  # numbers of 16.16 bits
    straight, turned = min(abs(a), abs(d)), min(abs(b), abs(c))
    if min(straight, turned) > _SKEWED * max(straight, turned):
        raise ValueError("its display matrix turns it by less than a quarter; turn its frames, and encode it again")
    if turned > straight:
        return _Placed(is_turned=True, is_mirrored=c < 0, is_upside_down=b < 0)
    return _Placed(is_mirrored=a < 0, is_upside_down=d < 0)


def _upright(frame: Any) -> "Image.Image":
    """The frame as a picture, upright, with white in place of transparent parts; its pixels may not be square yet."""
    from PIL import Image

    if frame.format.has_palette or any(component.is_alpha for component in frame.format.components):
        picture = srgb_on_white(Image.fromarray(frame.to_ndarray(format="rgba")), "RGB", "RGB")
    else:
        picture = frame.to_image()
    # First rows and columns are exchanged, then each is reversed: the order of `_Placed`.
    moves = zip(
        _placed(frame),
        (Image.Transpose.TRANSPOSE, Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM),
        strict=True,
    )
    for move in (move for is_done, move in moves if is_done):
        picture = picture.transpose(move)
    return picture
