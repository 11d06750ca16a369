"""The values that an optimizer keeps, as named tensors: numbers and lists have names of their own.

step = 3                      step:int           0-dimensional, int64
d = 1e-6                      d:float            0-dimensional, float64
exp_avg = tensor              exp_avg            the tensor itself
GG = [tensor, []]             GG:list            2, the length
                              GG[0]              the tensor itself
                              GG[1]:list         0

So one checkpoint holds them all, whichever rank keeps them, and a value that is missing is noticed by its name.
"""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from diffusionpipe.errors import RecipeError

_KINDS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_NUMBERS = {kind.__name__: kind for kind in _KINDS}
_ROOT = re.compile(r"[\[:]")


def entries_of(state: Mapping[str, object]) -> dict[str, Tensor]:
    """The state of one parameter, or of one group, as tensors by name; numbers and lists become tensors of their own.

    Tensors are not copied. The names are described at the top of this module.

    Raises:
        RecipeError: the state holds something else than tensors, numbers and lists of them.
    """
    return {name: tensor for key, value in state.items() for name, tensor in _entries(str(key), value)}


def state_of(entries: Mapping[str, Tensor]) -> dict[str, object]:
    """The state from which `entries_of` has made these tensors; its tensors are the same objects.

    Raises:
        KeyError: an entry of a list is missing.
    """
    return {root: _value(root, entries) for root in roots_of(entries)}


def roots_of(entries: Mapping[str, object]) -> list[str]:
    """The keys of the state from which `entries_of` has made these entries, each once and in their order."""
    return list(dict.fromkeys(_ROOT.split(name, maxsplit=1)[0] for name in entries))


def _entries(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    # The exact class: a subclass of Tensor keeps more than its values, and a bool is an int too.
    if type(value) in (Tensor, torch.nn.Parameter):
        assert isinstance(value, Tensor)
        yield name, value.detach()
    elif value is None:
        yield f"{name}:none", torch.zeros((), dtype=torch.bool)
    elif type(value) in _KINDS:
        kind = type(value)
        yield f"{name}:{kind.__name__}", torch.tensor(value, dtype=_KINDS[kind])
    elif isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        yield f"{name}:{type(value).__name__}", torch.tensor(len(value), dtype=torch.int64)
        for index, one in enumerate(value):
            yield from _entries(f"{name}[{index}]", one)
    else:
        what = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        kind_of = "a tensor of the class" if isinstance(value, Tensor) else "an object of the class"
        raise RecipeError(
            f"it keeps {kind_of} {what} under {name!r}, which a checkpoint for other layouts cannot hold; choose one "
            "that keeps plain tensors and numbers"
        )


def _value(name: str, entries: Mapping[str, Tensor]) -> object:
    if name in entries:
        return entries[name]
    if f"{name}:none" in entries:
        return None
    for word, kind in _NUMBERS.items():
        if f"{name}:{word}" in entries:
            return kind(entries[f"{name}:{word}"].item())
    for of in (list, tuple):
        if f"{name}:{of.__name__}" in entries:
            length = int(entries[f"{name}:{of.__name__}"])
            return of(_value(f"{name}[{index}]", entries) for index in range(length))
    raise KeyError(name)
