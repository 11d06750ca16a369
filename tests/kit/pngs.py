"""PNG files of kinds that Pillow does not write."""

import zlib
from pathlib import Path

import numpy as np

_START = b"\x89PNG\r\n\x1a\n"
_HEADER = len(_START) + 25


def chunk(name: bytes, data: bytes) -> bytes:
    """A chunk with its length and checksum."""
    return len(data).to_bytes(4) + name + data + zlib.crc32(name + data).to_bytes(4)


def numbers(*values: int) -> bytes:
    """Numbers of four bytes each."""
    return b"".join(value.to_bytes(4) for value in values)


def png(width: int, height: int, *, bits: int, kind: int, rows: bytes, chunks: bytes = b"") -> bytes:
    """A file of rows of packed pixels, each after its filter's byte; `kind` is the type of its colours."""
    header = chunk(b"IHDR", numbers(width, height) + bytes((bits, kind, 0, 0, 0)))
    return _START + header + chunks + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def packed(levels: np.ndarray, bits: int) -> bytes:
    """Rows of levels (H, W) or (H, W, C), each after a 0 for "no filter"."""
    if bits == 16:
        return b"".join(b"\0" + row.astype(">u2").tobytes() for row in levels)
    apart = (levels.reshape(len(levels), -1)[..., None] >> np.arange(bits)[::-1]) & 1
    return b"".join(b"\0" + np.packbits(row).tobytes() for row in apart)


def grey_16_with_alpha(grey: np.ndarray, profile: bytes) -> bytes:
    """Opaque levels (H, W) of 0 to 255 as a file of 16 bits, with a colour profile."""
    levels = np.stack([grey.astype(int) * 257, np.full(grey.shape, 65535)], axis=-1)
    iccp = chunk(b"iCCP", b"x\0\0" + zlib.compress(profile))
    return png(grey.shape[1], grey.shape[0], bits=16, kind=4, rows=packed(levels, 16), chunks=iccp)


def insert(path: Path, chunks: bytes) -> None:
    """Put chunks behind the header of a file."""
    data = path.read_bytes()
    path.write_bytes(data[:_HEADER] + chunks + data[_HEADER:])
