"""`dp.layer`: a module with the names of the tensors that it reads and writes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from diffusionpipe.errors import ModelError


@dataclass(frozen=True, slots=True)
class NamedLayer:
    """A module, or a loss, with the names of the tensors that it reads and writes."""

    module: nn.Module | Callable[..., Any]
    """The module, or the function that computes a loss."""
    reads: tuple[str, ...]
    """The names of the tensors that the layer reads; () for the tensors that the layer before it wrote."""
    writes: tuple[str, ...]
    """The names of the tensors that the layer writes; () for names that no other layer uses."""


def layer(
    module: nn.Module | Callable[..., Any], *, reads: str | Sequence[str] = (), writes: str | Sequence[str] = ()
) -> NamedLayer:
    """The module as a layer for `dp.pipeline` that reads and writes tensors by name.

    Args:
        module: the module, or the loss.
        reads: the names of its arguments, in order; () for the tensors that the layer before it writes.
        writes: the names of its results, in order; () for names that no other layer uses.

    Raises:
        ModelError: a name is empty or not a text, or is among `writes` twice.
    """
    given = {"reads": _names(reads), "writes": _names(writes)}
    for key, names in given.items():
        if wrong := [name for name in names if not isinstance(name, str) or not name]:
            raise ModelError(
                f"{key}={wrong[0]!r} of a {type(module).__name__}: give names of tensors, such as 'hidden'"
            )
    if len(set(given["writes"])) < len(given["writes"]):
        raise ModelError(f"writes={given['writes']} of a {type(module).__name__}: give each result a name of its own")
    return NamedLayer(module, given["reads"], given["writes"])


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
