"""Opens clip files with PyAV, decodes their frames from a key frame on, and finds files that end too early."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_FORMATS = "mov,matroska,avi,gif,mpegts,mpeg,flv,asf,ogg,nut,ivf,h264,hevc,m4v,mpegvideo"
"""The formats that FFmpeg may read, in a file with any ending; none of them refers to other files."""
_WITH_ALPHA = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
"""The decoder that reads transparency, by the name of the format whose usual decoder does not."""
_MASTER, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
"""The first bytes of the two parts of a Matroska file."""
_UNKNOWN = 2**56 - 1
"""The number for an unknown size of a part: its program could not write the size afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key frame, from which decoding can begin: its time, and the value for a seek."""

    stamp: int
    """The time at which the key frame is shown, in the file's units of time."""
    place: int
    """The time that a seek to the key frame is given, in the file's units of time."""


@contextmanager
def opened_clip(path: Path) -> Iterator[tuple[Any, Any]]:
    """A context with PyAV's container of the file and its first video stream.

    Raises:
        ValueError: the file has no pictures.
        Exception: any error of the reader of the format.
    """
    import av

    with av.open(f"file:{path}", options={"format_whitelist": _FORMATS}) as container:  # a name may have a colon
        if not container.streams.video:
            raise ValueError("it has no pictures")
        stream = container.streams.video[0]
        stream.thread_type = "NONE"  # data workers are processes of their own
        yield container, stream


def decoded_from(path: Path, key: Key | None) -> Iterator[Any]:
    """Yields the frames from a key frame on, in the order of display; with `key` None from the beginning of the file.

    It yields nothing if a seek to the key frame fails.

    Raises:
        ValueError: the file has no pictures.
        Exception: any error of the reader of the format.
    """
    import av

    with opened_clip(path) as (container, stream):
        if key is not None:
            try:
                container.seek(key.place, stream=stream, backward=True)
            except av.FFmpegError:
                return
        name = _WITH_ALPHA.get(stream.codec_context.name) if stream.metadata.get("alpha_mode") == "1" else None
        if name is None:
            yield from container.decode(stream)
        else:
            yield from _decoded_by(name, container, stream)


def _decoded_by(name: str, container: Any, stream: Any) -> Iterator[Any]:
    """Yields the frames of an open clip, decoded by the decoder `name` in place of FFmpeg's first choice."""
    import av

    decoder: Any = av.CodecContext.create(name, "r")
    decoder.thread_count = 1
    for packet in container.demux(stream):
        yield from decoder.decode(packet if packet.size else None)  # None takes the frames that the decoder still holds


def problem_of_end(path: Path) -> str | None:
    """Why the file is cut short, by the sizes that it states, or that it is empty; None if it seems whole.

    A file that states no sizes seems whole.
    """
    size = path.stat().st_size
    if size == 0:
        return "it is empty"
    with path.open("rb") as file:
        start = file.read(12)
        file.seek(0)
        if start[:4] == _MASTER:
            needed = _end_of_matroska(file)
        elif start[:4] == b"RIFF":
            needed = 8 + int.from_bytes(start[4:8], "little")
        elif start[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
            needed = _end_of_boxes(file, size)
        elif start[:3] == b"GIF":
            # A GIF ends with a semicolon; some programs write zeros after it.
            file.seek(max(0, size - 64))
            needed = size if file.read().rstrip(b"\0").endswith(b";") else size + 1
        else:
            return None
    return None if needed <= size else "its file is cut short; copy it again, or repair it"


def _end_of_boxes(file: BinaryIO, size: int) -> int:
    """The byte at which the last box of an MP4 or QuickTime file ends, by the lengths that its boxes state.

    `size`: the length of the file.
    """
    end = 0
    while end + 8 <= size:
        file.seek(end)
        length = int.from_bytes(file.read(4))
        if length == 1:  # the length follows the name, in eight bytes
            file.seek(end + 8)
            length = int.from_bytes(file.read(8))
        if length < 8:  # up to the end of the file, or no box
            return end
        end += length
    return end


def _end_of_matroska(file: BinaryIO) -> int:
    """The byte at which the part with the frames of a Matroska file ends; 0 if the file does not say."""
    for name in (_MASTER, _SEGMENT):
        if file.read(4) != name:
            return 0
        length = _number(file)
        if length == _UNKNOWN:
            return 0
        file.seek(length, 1)
    return file.tell()


def _number(file: BinaryIO) -> int:
    """A whole number in Matroska's form, read from the file; `_UNKNOWN` if all bits are set.

    Its first bits say how many bytes it has.
    """
    first = file.read(1)
    if not first or not first[0]:
        return _UNKNOWN
    count = 9 - first[0].bit_length()  # the number of leading zeros, plus one
    value = int.from_bytes(bytes([first[0] & (1 << 8 - count) - 1]) + file.read(count - 1))
    return _UNKNOWN if value == 2 ** (7 * count) - 1 else value
