"""What a rank holds between its actions, counted on the storages that live; imports nothing that predicts it.

Every operation that the rank's thread runs is seen. A storage counts from the operation that made it until nothing
refers to it any more. Weights, gradients and the like are left out by name, everything else counts: activations, what
is put aside for weight gradients, messages and their buffers, raw inputs and frozen outputs. It is counted between two
actions, when what a layer needs while it runs is gone.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


def key_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operation's arguments or results, where at most lists and tuples hold them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


class _Known(weakref.ref[Any]):
    """A reference to a storage that says which one it was when the storage is gone."""

    __slots__ = ("key",)
    key: int


class LiveStorages(TorchDispatchMode):
    """The storages that operations have made since it was entered, and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_of: dict[int, int] = {}
        self._known: dict[int, _Known] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and the guard against it takes as long as the counting."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs) if kwargs else func(*args)
        given = None
        for tensor in tensors_in((result,)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._known:
                continue
            if given is None:
                given = {key_of(one) for one in tensors_in(args)}
                given.update(key_of(one) for one in tensors_in(kwargs.values() if kwargs else ()))
            self._known[key] = known = _Known(storage, self._forget)
            known.key = key
            if key not in given:  # else it was there before, as weights were, and this is a view of it
                self.bytes_of[key] = storage.nbytes()
        return result

    def _forget(self, known: _Known) -> None:
        self._known.pop(known.key, None)
        self.bytes_of.pop(known.key, None)

    def without(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of all but these."""
        others = {key_of(tensor) for tensor in tensors}
        return sum(num_bytes for key, num_bytes in self.bytes_of.items() if key not in others)


def sampled_between(
    program: Sequence[tuple[Callable[[], None] | None, Callable[[], None]]], sample: Callable[[], None]
) -> list[tuple[Callable[[], None] | None, Callable[[], None]]]:
    """An executor's program that samples before and after each of its actions."""

    def watched(run: Callable[[], None]) -> Callable[[], None]:
        def both() -> None:
            sample()
            run()
            sample()

        return both

    return [(wait, watched(run)) for wait, run in program]


class UnseenCopies:
    """A transport between threads whose own copies do not count: between processes there are none."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._transport, name)

        def unseen(*args: Any) -> Any:
            with _disable_current_modes():
                return call(*args)

        return unseen
