"""Makes tokens of captions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.trainer.data.text.caption_chunks import chunked_rows

TOKENS = ("input_ids", "input_ids_2", "input_ids_3")
"""The raw inputs that hold the caption in the tokens of a text encoder, one for each encoder."""
MASKS = {"input_mask": "input_ids"}
"""The raw inputs that are masks of tokens (1 where tokens count, 0 for padding), with the input of their tokens."""
Tokenizer = Callable[..., Mapping[str, Any]]
"""A tokenizer of transformers: called with texts, padding, max_length and truncation, it returns "input_ids"."""


def token_ids(tokenizer: Tokenizer, texts: Sequence[str], *shape: int) -> Tensor:
    """The texts as int64 tokens, cut or padded, (len(texts), *shape).

    `shape`: the number of tokens, or the number of chunks and the number of tokens in each.
    """
    if len(shape) == 1:
        return _tokens(tokenizer, texts, shape[0], "input_ids")
    if not texts:
        return torch.empty(0, *shape, dtype=torch.int64)
    return torch.tensor(chunked_rows(tokenizer, texts, *shape), dtype=torch.int64)  # (B, N, T)


def token_mask(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> Tensor:
    """The int64 mask of tokens, (len(texts), length): 1 where `token_ids` has a token of the text, 0 for padding."""
    return _tokens(tokenizer, texts, length, "attention_mask")


def num_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
    """The number of tokens of each text before it is cut, with the marks and the template of the tokenizer."""
    if not texts:
        return []
    found = tokenizer(list(texts), padding=False, truncation=False, verbose=False)["input_ids"]
    return [len(row) for row in found]


def _tokens(tokenizer: Tokenizer, texts: Sequence[str], length: int, name: str) -> Tensor:
    if not texts:
        return torch.empty(0, length, dtype=torch.int64)
    tokens = tokenizer(list(texts), padding="max_length", max_length=length, truncation=True)[name]
    return torch.tensor(tokens, dtype=torch.int64)  # (B, T)
