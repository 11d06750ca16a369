"""Numbers with the noun that they count, large numbers, and amounts of bytes, in words."""

from diffusionpipe.units import Bytes

_OF_ONE = {
    "captions": "caption",
    "clips": "clip",
    "do": "does",
    "end": "ends",
    "files": "file",
    "folders": "folder",
    "have": "has",
    "classes": "class",
    "are": "is",
    "chunks": "chunk",
    "lines": "line",
    "links": "link",
    "pictures": "picture",
    "point": "points",
    "places": "place",
    "prompts": "prompt",
    "samples": "sample",
    "steps": "step",
    "them": "it",
}


def counted(number: int, phrase: str) -> str:
    """The number and its phrase in words: "2 pictures that do not exist", but "1 picture that does not exist".

    `phrase` is in the plural; thousands are separated by commas.
    """
    words = [_OF_ONE.get(word, word) for word in phrase.split(" ")] if number == 1 else [phrase]
    return f"{number:,} {' '.join(words)}"


def short_count(number: float) -> str:
    """The number as text with three significant digits and a letter from 1,000 on.

    >>> [short_count(number) for number in (950, 15_240, 859_520_964, 2.567e9)]
    ['950', '15.2k', '860M', '2.57B']
    """
    for limit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit * 0.9995:  # 999.5 has the three digits 1.00 of the next letter
            return f"{float(f'{number / limit:.3g}'):g}{letter}"
    return f"{number:.0f}"


def bytes_in_words(num_bytes: Bytes) -> str:
    """The amount in words, in GiB from 1 GiB on, in MiB from 1/8 MiB on, else in KiB.

    >>> [bytes_in_words(size) for size in (2**35, 64 * 2**20, 2**19, 3000)]
    ['32.0 GiB', '64 MiB', '0.5 MiB', '2.93 KiB']
    """
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.4g} MiB" if num_bytes >= 2**17 else f"{num_bytes / 2**10:.3g} KiB"
