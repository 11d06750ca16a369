"""What a rank holds between its actions, counted on the storages that live; imports nothing that predicts it.

Every operation that the rank's thread runs is seen. A storage counts from the operation that made it until nothing
refers to it any more. Weights, gradients and the like are left out by name, everything else counts: activations, what
is put aside for weight gradients, messages and their buffers, raw inputs and frozen outputs. It is counted between two
actions, when what a layer needs while it runs is gone.

Values bear on no byte, and attention and products take most of the time. `FORMS_ALONE` are the operations that are
computed once for each form of their arguments (shapes, strides, types); after that their results are zeros of the form
that was seen. All other operations, and everything that the runtime does, run as they always do.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
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


_ATEN = torch.ops.aten
FORMS_ALONE = frozenset(
    {
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
        _ATEN.convolution.default,
        _ATEN.convolution_backward.default,
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
    }
)


def form_of(value: Any) -> Any:
    """What the form of a result depends on: of a tensor its shape, strides and type, of anything else itself."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(form_of(one) for one in value)
    return value


def zeros_of(form: Any) -> Any:
    """New zeros where `form_of` saw a tensor; anything else as it was."""
    if not isinstance(form, tuple):
        return form
    if len(form) == 3 and isinstance(form[2], torch.dtype):
        shape, strides, dtype = form
        return torch.empty_strided(shape, strides, dtype=dtype).zero_()
    return tuple(zeros_of(one) for one in form)


_RESULTS: dict[Any, Any] = {}
"""The forms of results by operation and forms of its arguments, for all cases of a process."""


def of_this_form(operation: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operation's result the first time that it has arguments of these forms, then zeros like it."""
    key = operation, form_of(args), tuple((name, form_of(kwargs[name])) for name in sorted(kwargs))
    if key in _RESULTS:
        return zeros_of(_RESULTS[key])
    result = operation(*args, **kwargs)
    _RESULTS[key] = form_of(result)
    return result


class _Known(weakref.ref[Any]):
    """A reference to a storage that says which one it was when the storage is gone."""

    __slots__ = ("key",)
    key: int


class LiveStorages(TorchDispatchMode):
    """The storages that operations have made since it was entered, and that still live.

    `computes_all`: the operations of `FORMS_ALONE` are computed each time too.
    """

    def __init__(self, *, computes_all: bool = False) -> None:
        super().__init__()
        self._forms_alone = frozenset() if computes_all else FORMS_ALONE
        self.bytes_of: dict[int, int] = {}
        self._known: dict[int, _Known] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and the guard against it takes as long as the counting."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = of_this_form(func, args, kwargs) if func in self._forms_alone else func(*args, **kwargs)
        given = None
        for tensor in (result,) if isinstance(result, Tensor) else tensors_in((result,)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._known:
                continue
            if given is None:
                given = {key_of(one) for one in tensors_in(args)}
                given.update(key_of(one) for one in tensors_in(kwargs.values()))
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
