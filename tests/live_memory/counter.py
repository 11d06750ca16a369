"""What a rank holds between its actions, counted on the storages that live; imports nothing that predicts it.

Every operation that the rank's thread runs is seen. A storage counts from the operation that made it until nothing
refers to it any more. Weights, gradients and the like are left out by name, everything else counts: activations, what
is put aside for weight gradients, messages and their buffers, raw inputs and frozen outputs. It is counted between two
actions, when what a layer needs while it runs is gone.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


def key_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class LiveStorages(TorchDispatchMode):
    """The storages that operations have made since it was entered, and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_of: dict[int, int] = {}
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs or {})):
            if isinstance(tensor, Tensor):
                self._see(tensor, is_made=False)
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor, is_made=True)
        return result

    def _see(self, tensor: Tensor, *, is_made: bool) -> None:
        storage, key = tensor.untyped_storage(), key_of(tensor)
        if key in self._known:
            return

        def forget(_: object) -> None:
            self._known.pop(key, None)
            self.bytes_of.pop(key, None)

        self._known[key] = weakref.ref(storage, forget)
        if is_made:
            self.bytes_of[key] = storage.nbytes()

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
