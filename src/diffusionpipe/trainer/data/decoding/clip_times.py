"""The time at which each frame of a clip is shown, from the time stamps of its file; no frame is decoded for it.

    in the file        I0   P3   B1   B2   I6   B4   B5   P9 ...      packets, in the order in which they are decoded
    time stamps         0  120   40   80  500  160  460  620 ...      here of a recording that paused
    times               0 .04 .08 .12 .16 .46 .5 .62 ...              sorted, in seconds from the first frame on

Frames before the first key frame, and frames that an edit list leaves out, are not shown. Files round times, most to
milliseconds: where all are less than one beside the times of a constant rate, they are taken as that rate's.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from diffusionpipe.trainer.data.decoding.clip_file import Key, opened_clip, problem_of_end
from diffusionpipe.units import Seconds

_ROUNDED: Seconds = 1e-3
"""The most seconds by which rounding moves a frame against another one."""
_NTSC = Fraction(1000, 1001)
"""The factor of a whole number that gives the rates of American television, e.g. 29.97."""
EXACT: Seconds = 1e-6
"""A small time in seconds, above the errors of floating-point numbers and far below the time of a frame."""
_CERTAIN = ("h264", "hevc", "vp8", "vp9", "av1")
"""Decoders that give no frame before a true key frame. An MP4 may say that all its frames are key frames."""
_SHOWN = 0x10
"""The bit of a VP8 packet's first byte that says whether the frame is shown, or only read by others."""
_CONTROL = re.compile(rb"\x21\xf9\x04.(..).\x00[\x21\x2c]", re.DOTALL)
"""The block of a GIF that says how long the next frame is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameTimes:
    """The times of a clip's frames in the order in which they are shown, and its key frames."""

    stamps: tuple[int, ...]
    """The times of the frames in the file's units of time, sorted."""
    times: tuple[Seconds, ...]
    """The times of the frames, in seconds since the first frame."""
    seconds: Seconds
    """The length of the clip in seconds."""
    keys: tuple[Key, ...]
    """The key frames of the clip, sorted."""
    aspect: float
    """The width of a pixel divided by its height."""
    is_counted: bool
    """Whether frames are identified by counting: an AVI file has no times for frames that are shown later than decoded.
    """

    @property
    def rate(self) -> float:
        """The number of frames per second, on average; 0 for a clip of one frame."""
        return (len(self.times) - 1) / self.times[-1] if self.times[-1] > 0 else 0.0

    def shown_at(self, seconds: Seconds) -> int:
        """The number of the frame that is shown `seconds` after the first one begins; -1 before the first frame.

        It is the last frame that does not begin after this time.
        """
        return bisect_right(self.times, seconds + EXACT) - 1

    def starts_before(self, frame: int) -> list[Key | None]:
        """The key frames from which decoding of a frame may begin, the nearest first; None means the file's beginning.

        A seek may fail where frames near a key frame need frames before it; then the next start has to be tried.
        """
        if self.is_counted:
            return [None]
        before = [key for key in self.keys if key.stamp <= self.stamps[frame]]
        return [*reversed(before[1:]), None]


def timeline_of(path: Path) -> FrameTimes:
    """The times of a clip's frames and its key frames; read once for each state of the file.

    Raises:
        OSError: there is no such file.
        ValueError: the file is cut short, nothing says when frames are shown, or none can be decoded.
        Exception: any error of the reader of the format.
    """
    found = path.stat()
    return _read(path, (found.st_ino, found.st_mtime_ns, found.st_size))


@lru_cache(maxsize=4096)  # as clips are read anew in every epoch, and some 10 KiB each
def _read(path: Path, state: tuple[int, ...]) -> FrameTimes:
    if problem := problem_of_end(path):
        raise ValueError(problem)
    with opened_clip(path) as (container, stream):
        kind, codec = container.format.name, stream.codec_context.name
        packets = [_packet(packet, kind, codec) for packet in container.demux(stream) if packet.size]
        unit = Fraction(stream.time_base)
        rates = [rate for rate in (stream.average_rate, stream.guessed_rate) if rate]
        aspect = float(stream.sample_aspect_ratio or 1)
        has_doubtful_keys = codec not in _CERTAIN and not stream.codec_context.codec.intra_only
        is_counted = kind == "avi" and bool(stream.codec_context.has_b_frames)
    if not packets:
        raise ValueError("it has no frames")
    _refuse_no_delay(packets)
    shown = _decodable(packets)
    stamps = sorted(packet.stamp for packet in shown)
    if len(stamps) > 1 and stamps[0] == stamps[-1]:
        raise ValueError("all of its frames have the same time; encode it again, with time stamps")
    times = _evened([float((stamp - stamps[0]) * unit) for stamp in stamps], rates)
    mean = times[-1] / (len(times) - 1) if len(times) > 1 else 0.0
    last = max(shown, key=lambda packet: packet.stamp)
    keys = [Key(stamp=packet.stamp, place=packet.place) for packet in shown if packet.is_key]
    if has_doubtful_keys and len(keys) == len(shown):
        del keys[1:]  # only the first one is surely a key frame
    return FrameTimes(
        stamps=tuple(stamps),
        times=times,
        seconds=times[-1] + (float(last.duration * unit) or mean),
        keys=tuple(sorted(keys, key=lambda key: key.stamp)),
        aspect=aspect,
        is_counted=is_counted,
    )


class _Packet(NamedTuple):
    """The facts that a packet of a file states about its frame."""

    stamp: int
    """The time at which the frame is shown, in the file's units of time."""
    place: int
    """The time that a seek to it is given, in the file's units of time."""
    duration: int
    """The time for which the frame is shown, in the file's units of time; 0 if unknown."""
    is_key: bool
    is_shown: bool
    """Whether the frame is shown; some frames are only read by other frames, or cut away."""
    has_delay: bool
    """Whether a GIF says for how long the frame is shown; True for other formats."""


def _packet(packet: Any, kind: str, codec: str) -> _Packet:
    """The facts that a packet states about its frame, without the frame's data.

    `kind`: FFmpeg's name of the file's format. `codec`: the name of the decoder.

    Raises:
        ValueError: the packet does not say when its frame is shown.
    """
    stamp = packet.dts if packet.pts is None else packet.pts  # the same order where nothing is decoded early
    if stamp is None:
        raise ValueError("its file does not say when its frames are shown; encode it again, with time stamps")
    is_hidden = codec == "vp8" and not bytes(packet)[0] & _SHOWN
    control = _CONTROL.search(bytes(packet)) if kind == "gif" else None
    return _Packet(
        stamp=stamp,
        place=packet.dts if "mov" in kind and packet.dts is not None else stamp,  # its index has times of decoding
        duration=packet.duration or 0,
        is_key=packet.is_keyframe,
        is_shown=not is_hidden and not packet.is_discard,
        has_delay=kind != "gif" or (control is not None and control[1] != b"\0\0"),
    )


def _decodable(packets: Sequence[_Packet]) -> list[_Packet]:
    """The packets from the first key frame on, without those that are shown before it or not at all.

    Raises:
        ValueError: there are no such packets.
    """
    first = next((number for number, packet in enumerate(packets) if packet.is_key), None)
    if first is None:
        raise ValueError("it has no key frame to begin with, so it cannot be decoded; encode it again")
    begins = packets[first].stamp
    shown = [packet for packet in packets[first:] if packet.is_shown and packet.stamp >= begins]
    if not shown:
        raise ValueError("it has no frames that are shown")
    return shown


def _refuse_no_delay(packets: Sequence[_Packet]) -> None:
    """Refuses a GIF with a frame that is shown for no time; programs replace that time by times of their own.

    Raises:
        ValueError: there is such a frame before the last one, whose delay does not count.
    """
    for number, packet in enumerate(packets[:-1]):
        if not packet.has_delay:
            raise ValueError(
                f"its frame {number} has a delay of 0, so nothing says when the next one is shown; save it with delays"
            )


def _evened(times: Sequence[Seconds], rates: Sequence[Fraction]) -> tuple[Seconds, ...]:
    """The times of frames in seconds, or the times of a constant rate if these seem to be its rounded times.

    `rates`: the rates in frames per second that the file states.
    """
    if len(times) < 2:
        return tuple(times)
    found = Fraction((len(times) - 1) / times[-1])
    whole = Fraction(round(found))
    if _distance(times, found) < EXACT:  # even already
        return tuple(times)
    # Whole rates and the ones of American television are likelier than the mean of rounded times.
    usual = min((whole, whole * _NTSC), key=lambda rate: _distance(times, rate))
    for rate in (usual, *rates, found):
        if _distance(times, rate) < _ROUNDED:
            return tuple(number / float(rate) for number in range(len(times)))
    return tuple(times)


def _distance(times: Sequence[Seconds], rate: Fraction) -> Seconds:
    """The largest difference in seconds between the times and the times of frames at a constant rate."""
    return max(abs(time - number / float(rate)) for number, time in enumerate(times)) if rate > 0 else inf
