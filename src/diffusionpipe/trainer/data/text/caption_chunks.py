"""Captions beyond the length of a text encoder, in chunks that it reads one by one.

    begin  75 tokens        end                         the first chunk of 77
    begin  75 tokens        end                         the second one
    begin  tokens  end  padding as the tokenizer pads   the last one with tokens
    begin  end     padding                              further ones, up to the number of the run

A word that does not fit into the rest of a chunk begins the next one. Words of 8 tokens and more are cut, as ComfyUI
does it; sd-scripts cuts anywhere.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from diffusionpipe.models.base.family import Absent

_MARKS = 2
"""The number of tokens that mark the begin and the end of a chunk."""
_LONG_WORD = 8
"""The number of tokens from which on a word is cut where a chunk ends."""


def chunked_rows(
    tokenizer: Callable[..., Mapping[str, Any]], texts: Sequence[str], num_chunks: int, length: int
) -> list[list[list[int]]]:
    """The tokens of the first `num_chunks` chunks of each text, `length` tokens each, by [text][chunk][token]."""

    def rows(parts: Sequence[str]) -> list[list[int]]:
        found: list[list[int]] = tokenizer(list(parts), padding="max_length", max_length=length, truncation=True)[
            "input_ids"
        ]
        return found

    empty, absent = rows(["", Absent()])  # a model may read no caption otherwise than an empty one
    begin, end, padding = empty[0], empty[1], empty[-1]
    found = []
    for text, row, parts in zip(texts, rows(texts), parts_of(tokenizer, texts, length), strict=True):
        blank = absent if isinstance(text, Absent) else empty
        own = [row]
        if len(parts) > 1:  # a shorter text is read as the tokenizer has it
            own = [[begin, *part, end, *[padding] * (length - _MARKS - len(part))] for part in parts[:num_chunks]]
        found.append(own + [blank] * (num_chunks - len(own)))
    return found


def places_taken(tokenizer: Callable[..., Mapping[str, Any]], texts: Sequence[str], length: int) -> list[int]:
    """The number of tokens up to the end of each text in chunks of `length`, with marks and padding between chunks."""
    return [length * (len(parts) - 1) + len(parts[-1]) + _MARKS for parts in parts_of(tokenizer, texts, length)]


def least_places(num_tokens: int, length: int) -> int:
    """The number of tokens, marks included, up to the end of a text of `num_tokens`, if its chunks have no padding.

    `length`: the tokens of a chunk.
    """
    full = max(0, num_tokens - 1) // (length - _MARKS)
    return num_tokens + _MARKS * (full + 1)


def parts_of(tokenizer: Callable[..., Mapping[str, Any]], texts: Sequence[str], length: int) -> list[list[list[int]]]:
    """The tokens of each text in parts of at most `length - 2` tokens, without marks, by [text][part][token].

    Each text has at least one part, which may be empty.
    """
    plain = getattr(tokenizer, "plain", tokenizer)  # without the template that some models put around captions

    def tokens_of(parts: Sequence[str]) -> list[list[int]]:
        if not parts:
            return []
        options = {"add_special_tokens": False, "padding": False, "truncation": False, "verbose": False}
        found: list[list[int]] = plain(list(parts), **options)["input_ids"]
        return found

    room, whole = length - _MARKS, tokens_of(texts)
    # Of long texts only.
    words = {word for text, tokens in zip(texts, whole, strict=True) if len(tokens) > room for word in text.split()}
    tokens_of_word = dict(zip(words, tokens_of(list(words)), strict=True))
    return [
        [tokens]
        if len(tokens) <= room
        else list(_parts(_words(tokens, [tokens_of_word[word] for word in text.split()]), room))
        for text, tokens in zip(texts, whole, strict=True)
    ]


def _words(tokens: list[int], words: list[list[int]]) -> list[list[int]]:
    """The tokens of each word of a text; single tokens if the words by themselves have other tokens than the text.

    `tokens`: the tokens of the text. `words`: the tokens of each word by itself.
    """
    together = [token for word in words for token in word]
    return words if together == tokens else [[token] for token in tokens]


def _parts(words: Sequence[list[int]], room: int) -> Iterator[list[int]]:
    """Yields the tokens of the words in parts of at most `room` tokens."""
    part: list[int] = []
    for word in words:
        # A long word is cut in place of a new chunk.
        if len(part) + len(word) > room and len(word) < min(_LONG_WORD, room + 1):
            yield part
            part = []
        part = part + word
        while len(part) > room:
            yield part[:room]
            part = part[room:]
    yield part
