"""The lengths of captions in the tokens of a text encoder, and the captions that it does not read to their end.

Many captions are counted by their words, because that takes a tenth of the time:

    words    tokens of each different word, summed over a caption and the marks around it
    trial    200 captions are counted by their own tokens too
    caption  its own tokens, where the sum is near the limit: within 3 %, or 25 % where a trial has differed

Tokenizers hardly ever join letters of two words. For some the space before a word counts, for others it does not.

Of captions in chunks the places up to the end of the last chunk with tokens count (see `caption_chunks`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from diffusionpipe.costs import TensorSpec
from diffusionpipe.trainer.data.randomness import generator
from diffusionpipe.trainer.data.text.caption_chunks import least_places, places_taken
from diffusionpipe.trainer.data.text.tokens import Tokenizer, num_tokens

MOST = 20_000
"""The largest number of captions that are counted; of more captions, this number is drawn."""
_TRIALS = 200
_NEAR, _FAR = 0.03, 0.25
"""Parts of the limit: where a sum of words' tokens is this near to the limit, the caption's own tokens are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderReading:
    """A text encoder's name and tokenizer, and the number of tokens that it reads of a caption."""

    encoder: str
    """The name of the encoder, e.g. "text_encoder_2", or "text_encoder_2 of base" among several models."""
    tokenizer: Tokenizer
    length: int
    """The number of tokens that the encoder reads at once."""
    chunks: int = 1
    """The number of chunks of `length` tokens that it reads of one caption."""

    @property
    def limit(self) -> int:
        """The number of tokens that the encoder reads of a caption, the marks of each chunk included."""
        return self.chunks * self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The captions whose end one text encoder does not read: their number, and the longest one."""

    encoder: str
    limit: int
    """The number of tokens of a caption that the encoder reads, its marks included."""
    number: int
    """The number of captions that are longer."""
    looked_at: int
    """The number of captions whose tokens were counted."""
    longest: int
    """The index of the longest caption among the texts."""
    tokens: int
    """The number of tokens of the longest caption."""


class Lengths(NamedTuple):
    """The least, median and largest number of tokens of captions, marks included."""

    least: int
    median: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedCaptions:
    """The lengths of captions in the tokens of one text encoder, and those it does not read in full."""

    encoder: str
    limit: int
    """The number of tokens of a caption that the encoder reads, its marks included."""
    looked_at: int
    """The number of captions whose tokens were counted."""
    lengths: Lengths | None
    """The lengths of the captions that are not empty; None where all are empty."""
    cut: Cut | None
    """The captions that it does not read in full; None where it reads all in full."""


def readings_of(inputs: Sequence[TensorSpec], tokenizers: Mapping[str, Tokenizer]) -> list[EncoderReading]:
    """The text encoders of a model with their tokenizers and limits.

    `inputs`: the model's raw inputs. `tokenizers`: the tokenizers of such inputs, by the input's name.
    """
    return [
        EncoderReading(
            encoder=encoder_of(spec.name),
            tokenizer=tokenizers[spec.name],
            length=spec.shape[-1],
            chunks=spec.shape[0] if len(spec.shape) > 1 else 1,
        )
        for spec in inputs
        if spec.name in tokenizers
    ]


def encoder_of(name: str) -> str:
    """The name of the text encoder that reads a raw input, e.g. "text_encoder_2 of base" for "base/input_ids_2"."""
    model, _, kind = name.rpartition("/")
    encoder = kind.replace("input_ids", "text_encoder")
    return f"{encoder} of {model}" if model else encoder


def cut_captions(texts: Sequence[str], readings: Sequence[EncoderReading]) -> list[Cut]:
    """For each text encoder that does not read some text in full, the texts that it cuts."""
    return [one.cut for one in counted_captions(texts, readings) if one.cut is not None]


def counted_captions(texts: Sequence[str], readings: Sequence[EncoderReading]) -> list[CountedCaptions]:
    """For each text encoder, the lengths of the texts in its tokens, and the texts that it cuts.

    Of more than 20,000 texts, 20,000 are drawn. The least and the largest length of these are exact; the median of many
    is estimated by words.
    """
    chosen: Sequence[int] = range(len(texts))
    if len(texts) > MOST:
        # The same captions are counted with any seed of the run.
        random = generator(seed=0, purpose="counted captions", step=0, position=0)
        chosen = sorted(random.choice(len(texts), MOST, replace=False).tolist())
    return [_counted_by(texts, chosen, reading) for reading in readings]


def chunks_in_use(texts: Sequence[str], readings: Sequence[EncoderReading]) -> int:
    """The smallest number of chunks with which no encoder cuts a text; at most the largest number that one reads."""
    most = max((reading.chunks for reading in readings), default=1)
    while most > 1 and not cut_captions(texts, [replace(one, chunks=min(one.chunks, most - 1)) for one in readings]):
        most -= 1
    return most


def _counted_by(texts: Sequence[str], chosen: Sequence[int], reading: EncoderReading) -> CountedCaptions:
    tokens = _counted(list(dict.fromkeys(texts[place] for place in chosen)), reading)
    # The template, which the shown numbers leave out.
    around = num_tokens(reading.tokenizer, [""])[0] if getattr(reading.tokenizer, "has_template", False) else 0
    return CountedCaptions(
        encoder=reading.encoder,
        limit=reading.limit - around,
        looked_at=len(chosen),
        lengths=_lengths([texts[place] for place in chosen if texts[place].strip()], tokens, reading, around),
        cut=_cut(texts, chosen, tokens, reading, around),
    )


def _lengths(texts: Sequence[str], tokens: Mapping[str, int], reading: EncoderReading, around: int) -> Lengths | None:
    if not texts:
        return None
    ranked = sorted(texts, key=tokens.__getitem__)
    least, most = _exactly([ranked[0], ranked[-1]], reading)
    return Lengths(least - around, tokens[ranked[(len(ranked) - 1) // 2]] - around, most - around)


def _cut(
    texts: Sequence[str], chosen: Sequence[int], tokens: Mapping[str, int], reading: EncoderReading, around: int
) -> Cut | None:
    long = {place: tokens[texts[place]] for place in chosen if tokens[texts[place]] > reading.limit}
    if not long:
        return None
    longest = max(long, key=lambda place: long[place])
    own = _exactly([texts[longest]], reading)[0]
    return Cut(
        encoder=reading.encoder,
        limit=reading.limit - around,
        number=len(long),
        looked_at=len(chosen),
        longest=longest,
        tokens=own - around,
    )


def _counted(texts: list[str], reading: EncoderReading) -> dict[str, int]:
    """The number of tokens of each text, by text; it is exact where it decides whether the text is cut."""
    found = dict(zip(texts, _sums(texts, reading), strict=True))
    trials = texts[:: max(1, len(texts) // _TRIALS)]
    own = dict(zip(trials, _exactly(trials, reading), strict=True))
    is_sure = reading.chunks == 1 and all(found[text] == own[text] for text in trials)  # chunks may have padding
    width = (_NEAR if is_sure else _FAR) * reading.limit
    near = [
        text
        for text in texts
        if text not in own and (abs(found[text] - reading.limit) <= width or " ".join(text.split()) != text.strip())
    ]  # also where other spaces than one between two words may be tokens of their own
    return found | own | dict(zip(near, _exactly(near, reading), strict=True))


def _exactly(texts: Sequence[str], reading: EncoderReading) -> list[int]:
    """The exact number of tokens of each text, with marks and padding as the encoder's limit counts them."""
    if reading.chunks == 1:
        return num_tokens(reading.tokenizer, texts)
    return places_taken(reading.tokenizer, texts, reading.length)


def _sums(texts: Sequence[str], reading: EncoderReading) -> list[int]:
    """An estimate of the number of tokens of each text: its words' tokens, and the marks and template around it."""
    words_of = [text.split() for text in texts]
    words = list(dict.fromkeys(word for words in words_of for word in words))
    plain = getattr(reading.tokenizer, "plain", reading.tokenizer)

    def count(parts: list[str]) -> list[int]:
        if not parts:
            return []
        rows = plain(parts, add_special_tokens=False, padding=False, truncation=False, verbose=False)["input_ids"]
        return [len(row) for row in rows]

    alone, behind, three = count(["a", " a", "a a a"])
    # Three words of one letter show whether the tokens of words count with or without the space before them.
    space = " " if abs(3 * behind - three) < abs(3 * alone - three) else ""
    tokens = dict(zip(words, count([space + word for word in words]), strict=True))
    sums = [sum(map(tokens.__getitem__, words)) for words in words_of]
    if reading.chunks > 1:
        return [least_places(number, reading.length) for number in sums]
    around = num_tokens(reading.tokenizer, [""])[0]
    return [number + around for number in sums]
