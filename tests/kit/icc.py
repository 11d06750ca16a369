"""Colour profiles of ICC's version 2 as bytes, and the sRGB colours that follow from their numbers."""

from collections.abc import Sequence

import numpy as np

D50 = np.array([0.9642, 1.0, 0.8249])
SRGB = ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06))
"""x and y of red, green and blue."""
P3 = ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060))
ADOBE = ((0.64, 0.33), (0.21, 0.71), (0.15, 0.06))
_D65 = (0.3127, 0.3290)
_BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])


def to_d50(primaries: Sequence[tuple[float, float]]) -> np.ndarray:
    """From linear light in these primaries, with the white of D65, to XYZ with the white of D50, (3, 3)."""
    xyz = np.array([[x / y, 1, (1 - x - y) / y] for x, y in primaries]).T
    white = np.array([_D65[0] / _D65[1], 1, (1 - _D65[0] - _D65[1]) / _D65[1]])
    light = xyz * np.linalg.solve(xyz, white)
    cones = (_BRADFORD @ D50) / (_BRADFORD @ white)
    return np.linalg.inv(_BRADFORD) @ np.diag(cones) @ _BRADFORD @ light


def encoded(linear: np.ndarray) -> np.ndarray:
    """Levels of 0 to 255 of linear light in sRGB."""
    light = np.clip(linear, 0, 1)
    return 255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


def srgb_of_xyz(xyz: np.ndarray) -> np.ndarray:
    """Levels of 0 to 255 of colours (N, 3) in XYZ with the white of D50."""
    return encoded(xyz @ np.linalg.inv(to_d50(SRGB)).T)


def srgb_of(levels: np.ndarray, primaries: Sequence[tuple[float, float]], gamma: float) -> np.ndarray:
    """What the levels (N, 3) of a picture with these primaries and gamma are in sRGB, 0 to 255, (N, 3)."""
    return srgb_of_xyz((levels / 255) ** gamma @ to_d50(primaries).T)


def _fixed(*numbers: float) -> bytes:
    return b"".join(round(number * 65536).to_bytes(4, signed=True) for number in numbers)


def _xyz(numbers: Sequence[float]) -> bytes:
    return b"XYZ \0\0\0\0" + _fixed(*numbers)


def _curve(gamma: float) -> bytes:
    return b"curv\0\0\0\0" + (1).to_bytes(4) + round(gamma * 256).to_bytes(2) + b"\0\0"


def profile(space: bytes, tags: dict[bytes, bytes], kind: bytes = b"mntr", between: bytes = b"XYZ ") -> bytes:
    """A profile of a colour space with these tags; `between` is the space of its other side."""
    table, body, place = b"", b"", 132 + 12 * len(tags)
    for name, data in tags.items():
        padded = data + b"\0" * (-len(data) % 4)
        table += name + place.to_bytes(4) + len(data).to_bytes(4)
        body, place = body + padded, place + len(padded)
    header = place.to_bytes(4) + b"none" + bytes.fromhex("02400000") + kind + space + between
    header += bytes(12) + b"acsp" + bytes(28) + _fixed(*D50) + bytes(48)
    return header + len(tags).to_bytes(4) + table + body


def matrix_profile(primaries: Sequence[tuple[float, float]], gamma: float, kind: bytes = b"mntr") -> bytes:
    """The profile of RGB pictures with these primaries and gamma."""
    columns = to_d50(primaries).T
    curves = {name: _curve(gamma) for name in (b"rTRC", b"gTRC", b"bTRC")}
    points = {name: _xyz(column) for name, column in zip((b"rXYZ", b"gXYZ", b"bXYZ"), columns, strict=True)}
    return profile(b"RGB ", {b"wtpt": _xyz(D50), **points, **curves}, kind)


def grey_profile(gamma: float) -> bytes:
    """The profile of grey pictures with this gamma."""
    return profile(b"GRAY", {b"wtpt": _xyz(D50), b"kTRC": _curve(gamma)})


def ink_profile() -> bytes:
    """A profile of CMYK with a table of its corners: the more ink, the less of its light. See `srgb_of_inks`."""
    corners = np.array(np.meshgrid(*[(0.0, 1.0)] * 4, indexing="ij")).reshape(4, -1).T
    table = b"".join(
        round(65280 * part).to_bytes(2) for ink in corners for part in (_lightness(ink) / 100, 128 / 255, 128 / 255)
    )
    line = b"\x00\x00\xff\xff"
    head = b"mft2\0\0\0\0" + bytes((4, 3, 2, 0)) + _fixed(1, 0, 0, 0, 1, 0, 0, 0, 1)
    data = head + (2).to_bytes(2) * 2 + line * 4 + table + line * 3
    return profile(b"CMYK", {b"wtpt": _xyz(D50), b"A2B0": data}, b"prtr", b"Lab ")


def _lightness(inks: np.ndarray) -> np.ndarray:
    """L* of shares of ink (..., 4), which is linear in each of them: black takes all, the others a fifth together."""
    c, m, y, k = np.moveaxis(np.asarray(inks), -1, 0)
    return 100 * (1 - k) * (1 - 0.1 * c) * (1 - 0.05 * m) * (1 - 0.05 * y)


def srgb_of_inks(levels: np.ndarray) -> np.ndarray:
    """What the levels (N, 4) of a picture with `ink_profile` are in sRGB, 0 to 255, (N, 3): greys."""
    lightness = _lightness(levels / 255)
    relative = np.where(lightness > 8, ((lightness + 16) / 116) ** 3, lightness / 903.3)
    return np.repeat(encoded(relative)[:, None], 3, axis=1)
