"""Captions that have more tokens than their text encoder reads: the rest of them is cut off.

Many captions are counted by their words first, because that takes a tenth of the time:

    word     tokens of each different word, summed over a caption and its marks
    caption  its own tokens, where the words have three quarters of the limit or more

Tokenizers never join letters of two words, and each word is counted with the space before it. So the sum is exact for
CLIP and for tokenizers of bytes; for T5 it may be one too large for each word.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from diffusionpipe.costs import TensorSpec
from diffusionpipe.trainer.data.randomness import generator
from diffusionpipe.trainer.data.tokens import Tokenizer, num_tokens

MOST = 20_000
"""Captions that are looked at; of more, these are drawn."""
_NEAR = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a text encoder reads captions."""

    encoder: str
    tokenizer: Tokenizer
    length: int
    """Tokens that it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Captions of which a text encoder does not read the end."""

    encoder: str
    limit: int
    """Tokens of a caption that it reads, its marks included."""
    number: int
    looked_at: int
    """Captions that were counted."""
    longest: int
    """The place of the longest one among the texts."""
    tokens: int
    """Of the longest one."""


def readings_of(inputs: Sequence[TensorSpec], tokenizers: Mapping[str, Tokenizer]) -> list[Reading]:
    """How each text encoder reads captions, by a model's raw inputs and the tokenizers of them."""
    return [
        Reading(encoder=_encoder_of(spec.name), tokenizer=tokenizers[spec.name], length=spec.shape[0])
        for spec in inputs
        if spec.name in tokenizers
    ]


def _encoder_of(name: str) -> str:
    """The text encoder that reads a raw input, e.g. "text_encoder_2 of base" for "base/input_ids_2"."""
    model, _, kind = name.rpartition("/")
    encoder = kind.replace("input_ids", "text_encoder")
    return f"{encoder} of {model}" if model else encoder


def cut_captions(texts: Sequence[str], readings: Sequence[Reading]) -> list[Cut]:
    """What each text encoder does not read of the texts; nothing of those that read all."""
    chosen: Sequence[int] = range(len(texts))
    if len(texts) > MOST:
        random = generator(seed=0, purpose="counted captions", step=0, position=0)
        chosen = sorted(random.choice(len(texts), MOST, replace=False).tolist())
    found = (_cut(texts, chosen, reading) for reading in readings)
    return [one for one in found if one is not None]


def _cut(texts: Sequence[str], chosen: Sequence[int], reading: Reading) -> Cut | None:
    different = dict.fromkeys(texts[place] for place in chosen)
    near = _near_limit(list(different), reading)
    tokens = dict(zip(near, num_tokens(reading.tokenizer, near), strict=True))
    long = {place: tokens[texts[place]] for place in chosen if tokens.get(texts[place], 0) > reading.length}
    if not long:
        return None
    longest = max(long, key=lambda place: long[place])
    around = num_tokens(reading.tokenizer, [""])[0] if getattr(reading.tokenizer, "has_template", False) else 0
    return Cut(
        encoder=reading.encoder,
        limit=reading.length - around,
        number=len(long),
        looked_at=len(chosen),
        longest=longest,
        tokens=long[longest] - around,
    )


def _near_limit(texts: Sequence[str], reading: Reading) -> list[str]:
    """The texts that may have more tokens than are read, by their words."""
    words_of = [text.split() for text in texts]
    words = list(dict.fromkeys(word for words in words_of for word in words))
    if not words:
        return []
    plain = getattr(reading.tokenizer, "plain", reading.tokenizer)
    rows = plain(
        [f" {word}" for word in words], add_special_tokens=False, padding=False, truncation=False, verbose=False
    )["input_ids"]
    tokens = dict(zip(words, map(len, rows), strict=True))
    around = num_tokens(reading.tokenizer, [""])[0]
    sums = np.array([sum(tokens[word] for word in words) for words in words_of]) + around
    return [texts[place] for place in np.flatnonzero(sums >= _NEAR * reading.length).tolist()]
