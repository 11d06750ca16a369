"""Numbers of a page, each with its text, its file and its key, so that what is shown can be compared with the file."""

from __future__ import annotations

from typing import TypeAlias

from diffusionpipe.ir.words import bytes_in_words
from diffusionpipe.units import Bytes, Seconds

Json: TypeAlias = dict[str, object]
"""A part of a page's data: name -> value, of JSON's types."""


def figure(text: str, value: float | str, file: str, key: str) -> Json:
    """A number for the page: its text, its value, and where that is from, a file and a key or formula in it."""
    return {"text": text, "value": value, "file": file, "key": key}


def number(value: float, file: str, key: str, *, digits: int = 4, unit: str = "") -> Json:
    """A number for the page, shown with `digits` significant digits and its unit; see `figure`."""
    return figure(f"{rounded(value, digits)}{unit and f' {unit}'}", value, file, key)


def count(value: int, file: str, key: str) -> Json:
    """A whole number for the page, with separators in its text, and the file and key that it is from; see `figure`."""
    return figure(f"{value:,}", value, file, key)


def seconds(value: Seconds, file: str, key: str) -> Json:
    """A time for the page, shown in the unit that suits it; `value` is in seconds. See `figure`."""
    return figure(time_text(value), value, file, key)


def percent(value: float, file: str, key: str) -> Json:
    """A share from 0 to 1 for the page, shown in percent with one decimal; see `figure`."""
    return figure(f"{value:.1%}", value, file, key)


def size(value: Bytes, file: str, key: str) -> Json:
    """A number of bytes for the page, shown in GiB or MiB; see `figure`."""
    return figure(bytes_in_words(value), value, file, key)


def absent(reason: str) -> Json:
    """The page's data in place of a part that cannot be shown: {"absent": reason}."""
    return {"absent": reason}


def rounded(value: float, digits: int = 4) -> str:
    """The number as text with `digits` significant digits; digits before the point are never cut.

    >>> rounded(0.93215, 3), rounded(12345.6, 3), rounded(0.0000123456, 3)
    ('0.932', '12,346', '1.23e-05')
    """
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def time_text(value: Seconds) -> str:
    """A time as text, in the units that suit it.

    >>> time_text(0.0123), time_text(2.5), time_text(100), time_text(5000)
    ('12.3 ms', '2.5 s', '1 min 40 s', '1 h 23 min')
    """
    if value < 1:
        return f"{rounded(value * 1e3)} ms"
    if value < 100:
        return f"{rounded(value)} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s"
