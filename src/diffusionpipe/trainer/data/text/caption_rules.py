"""Makes the text that an encoder reads of a sample's captions, each time that the sample is seen.

    texts         one of them                         "{wild|tame} owl, |||night, tree, moon"
    alternatives  one of each pair of braces          "wild owl, |||night, tree, moon"
    trigger       its word, where it is missing       "sks, wild owl, |||night, tree, moon"
    tags          dropped and shuffled, but kept ones "sks, wild owl, moon, night"
    ends          prefix and suffix around it         "photo of sks, wild owl, moon, night"

Each number is keyed by (seed, sample, pass), where pass k is the time that a sample is seen after k others. So a
text is the same on every layout and after a resumed run, and the options do not change each other's numbers.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

TRIGGER = "[trigger]"
"""The mark in a caption in whose place the trigger word is put."""
KEPT = "|||"
"""The mark after tags that keep their place; a second one comes before the last tags that do."""

_BRACES = re.compile(r"\{([^{}]*\|[^{}]*)\}")
_OPEN, _CLOSE = "\0(", "\0)"  # no caption holds a NUL

Pick = Callable[[Sequence[str]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionRules:
    """The rules by which texts are made from captions; by default captions are read as they are."""

    lines: bool = False
    """Whether each line that is not blank is a caption of its own."""
    alternatives: bool = False
    """Whether "{a|b}" means one of its parts, and "{{" and "}}" mean braces."""
    prefix: str = ""
    """The text before each caption."""
    suffix: str = ""
    """The text after each caption."""
    trigger: str | None = None
    """The word in place of `TRIGGER`, which is put before captions that have neither; None for no word."""
    separator: str = ","
    """The text between two tags."""
    shuffle: bool = False
    """Whether tags are read in a random order."""
    tag_dropout: float = 0.0
    """The share of tags that are left out, apart from tags that keep their place."""
    keep_first: int = 0
    """The number of tags at the start that are neither moved nor left out, in captions without `keep_mark`."""
    keep_mark: str = KEPT
    """The mark after tags that keep their place."""
    encoder_dropout: tuple[tuple[str, float], ...] = ()
    """(name of a text encoder, share of captions that it does not read), besides captions that no encoder reads."""

    @property
    def has_tags(self) -> bool:
        """Whether captions are lists of tags."""
        return self.shuffle or self.tag_dropout > 0


AS_THEY_ARE = CaptionRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenSample:
    """A sample at one of the times that it is seen, by which its random numbers are keyed."""

    seed: int
    sample: int
    """The index of the sample in the dataset."""
    number: int
    """The number of times that it was seen before."""

    def draws(self, purpose: str) -> "np.random.Generator":
        """A random generator for one purpose, keyed by the seed, the sample and the number of times it was seen."""
        # Imported only here: it needs torch, and the sections of a recipe must not.
        from diffusionpipe.trainer.data.randomness import generator

        return generator(seed=self.seed, purpose=f"caption.{purpose}", step=self.number, position=self.sample)


def texts_of(captions: Sequence[str], rules: CaptionRules) -> tuple[str, ...]:
    """The captions from which one is drawn, or their lines where the rules say so; ("",) where there are none."""
    if not rules.lines:
        return tuple(captions) or ("",)
    lines = tuple(line.strip() for text in captions for line in text.splitlines() if line.strip())
    return lines or ("",)


def drawn_text(captions: Sequence[str], rules: CaptionRules, seen: SeenSample) -> str:
    """The text that an encoder reads of a sample at one of the times that it is seen, with random choices.

    A caption, alternatives, dropped and shuffled tags are drawn as the rules say; trigger, prefix and suffix are added.
    `captions`: all captions of the sample.
    """
    choices = texts_of(captions, rules)
    text = choices[int(seen.draws("choice").integers(len(choices)))] if len(choices) > 1 else choices[0]
    if rules.alternatives and "|" in text:
        numbers = seen.draws("alternatives")
        text = _spelled(text, lambda parts: parts[int(numbers.integers(len(parts)))])
    text = _with_trigger(text, rules)
    if rules.has_tags:
        text = _tags(text, rules, seen.draws("tags"))
    return f"{rules.prefix}{text}{rules.suffix}"


def plain_text(caption: str, rules: CaptionRules, pick: Pick = lambda parts: parts[0]) -> str:
    """The text that the rules make of one caption without random choices: all tags in their order.

    `pick`: chooses one of the alternatives in braces; by default the first.

    >>> plain_text("{wild|tame} owl, |||night", CaptionRules(alternatives=True, shuffle=True, prefix="a photo of "))
    'a photo of wild owl, night'
    """
    text = _spelled(caption, pick) if rules.alternatives else caption
    text = _with_trigger(text, rules)
    if rules.has_tags:
        text = _joined([tag for part in text.split(rules.keep_mark, 2) for tag in _split(part, rules)], rules)
    return f"{rules.prefix}{text}{rules.suffix}"


def is_dropped_for(encoder: str, rules: CaptionRules, seen: SeenSample) -> bool:
    """Whether the encoder with this name reads no caption this time, drawn with its share in `encoder_dropout`."""
    share = dict(rules.encoder_dropout).get(encoder, 0.0)
    return share > 0 and bool(seen.draws(f"dropout.{encoder}").random() < share)


def _spelled(text: str, pick: Pick) -> str:
    """The text with one part in place of each pair of braces that holds a "|"; `pick` chooses the part."""
    text = text.replace("{{", _OPEN).replace("}}", _CLOSE)  # doubled braces stay out of the way
    text = _BRACES.sub(lambda found: pick(found[1].split("|")), text)
    return text.replace(_OPEN, "{").replace(_CLOSE, "}")


def has_stray_braces(caption: str, rules: CaptionRules) -> bool:
    """Whether the caption has a brace that belongs to no alternatives, so that it is read as it is.

    >>> has_stray_braces("a {wild|{tame|shy} owl", CaptionRules(alternatives=True))
    True
    """
    if not rules.alternatives:
        return False
    rest = _BRACES.sub("", caption.replace("{{", "").replace("}}", ""))
    return "{" in rest or "}" in rest


def _with_trigger(text: str, rules: CaptionRules) -> str:
    if rules.trigger is None:
        return text
    text = text.replace(TRIGGER, rules.trigger)
    if re.search(rf"(?<!\w){re.escape(rules.trigger)}(?!\w)", text):  # a word of its own, not a part of one
        return text
    return f"{rules.trigger}{rules.separator} {text}" if text else rules.trigger


def _tags(text: str, rules: CaptionRules, numbers: "np.random.Generator") -> str:
    """The text with tags dropped and shuffled as the rules say; tags that keep their place stay."""
    parts = [_split(part, rules) for part in text.split(rules.keep_mark, 2)]
    if len(parts) == 1:
        head, tail = parts[0][: rules.keep_first], []
        free = parts[0][rules.keep_first :]
    else:
        head, free, tail = parts[0], parts[1], parts[2] if len(parts) > 2 else []
    free = [tag for tag, number in zip(free, numbers.random(len(free)), strict=True) if number >= rules.tag_dropout]
    if rules.shuffle:
        free = [free[place] for place in numbers.permutation(len(free))]
    return _joined([*head, *free, *tail], rules)


def _split(text: str, rules: CaptionRules) -> list[str]:
    return [tag.strip() for tag in text.split(rules.separator) if tag.strip()]


def _joined(tags: Sequence[str], rules: CaptionRules) -> str:
    return f"{rules.separator} ".join(tags)
