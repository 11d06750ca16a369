"""The operations that a layer runs, and the work of each: floating-point operations, and bytes to and from memory."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from diffusionpipe.models.graphs.describe import dtype_name
from diffusionpipe.runtime.machine.buffers import storage_of
from diffusionpipe.units import Bytes

_ATEN = torch.ops.aten


class SpeedLimit(StrEnum):
    """The rate of a device that limits the speed of an operation: of a kind of computation, or of its memory."""

    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    ATTENTION_BACKWARD = "attention_backward"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One kernel of a device: its name, the floating-point operations that it computes and the bytes that it moves."""

    name: str
    """The name of the operation in torch, e.g. "addmm"."""
    kind: SpeedLimit
    """The rate that limits its speed."""
    dtype: str
    """The type of its first floating-point input."""
    flops: float
    """The number of floating-point operations."""
    num_bytes: float
    """The number of bytes that it reads and writes."""
    scores: float = 0.0
    """The number of attention scores, over all queries, keys and heads, which a kernel that is not fused writes and
    reads; 0 for other operations."""


_CONVOLUTIONS = (_ATEN.convolution, _ATEN.convolution_backward)
_ATTENTIONS: dict[Any, tuple[SpeedLimit, Callable[..., int], slice]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: (SpeedLimit.ATTENTION, sdpa_flop_count, slice(0, 3)),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (
        SpeedLimit.ATTENTION_BACKWARD,
        sdpa_backward_flop_count,
        slice(0, 4),
    ),
}
"""Attention kernel -> (its limit, torch's function that counts its operations, the arguments whose shapes it takes).

They are the kernels that fake tensors on a CPU choose, which torch's own counter lacks.
"""
_LOOKUPS = (_ATEN.embedding, _ATEN.index, _ATEN.index_select, _ATEN.gather)
_WITHOUT_KERNEL = (_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided)


class OperationTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no annotations here
    """Notes, while it is entered as a context, every operation that runs a kernel; views run none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.note(func, args, kwargs, result)
        return result

    def note(self, func: Any, args: Any, kwargs: Any, result: object) -> bool:
        """Note an operation that has run with these arguments; returns False and notes nothing if it ran no kernel."""
        packet = func._overloadpacket
        read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        written = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        if packet not in _WITHOUT_KERNEL and written and not _is_view(func, read, written):
            kind, flops = _work(packet, args, kwargs, result)
            # Of a table only the rows that are looked up are read.
            moved = 2 * _bytes(written) if packet in _LOOKUPS else _bytes(read) + _bytes(written)
            dtype = next((t.dtype for t in read if t.is_floating_point()), written[0].dtype)
            operation = Operation(
                name=packet.__name__, kind=kind, dtype=dtype_name(dtype), flops=float(flops), num_bytes=float(moved),
                scores=float(_scores(kind, args)),
            )  # fmt: skip
            self.operations.append(operation)
            return True
        return False


def _is_view(func: Any, read: Sequence[Tensor], written: Sequence[Tensor]) -> bool:
    # Operations in place write to a storage that they read, and still run a kernel.
    if func._schema.is_mutable:
        return False
    storages = set(map(storage_of, read))
    return all(storage_of(tensor) in storages for tensor in written)


def _work(packet: Any, args: Any, kwargs: Any, result: object) -> tuple[SpeedLimit, int]:
    if packet in _ATTENTIONS:
        kind, count, shapes = _ATTENTIONS[packet]
        return kind, count(*(tensor.shape for tensor in args[shapes]))
    if packet not in flop_registry:
        return SpeedLimit.MEMORY, 0
    flops: int = flop_registry[packet](*args, **kwargs, out_val=result)
    name = packet.__name__
    if packet in _CONVOLUTIONS:
        return SpeedLimit.CONVOLUTION, flops
    if "attention" in name:
        return (SpeedLimit.ATTENTION_BACKWARD if name.endswith("backward") else SpeedLimit.ATTENTION), flops
    return SpeedLimit.MATMUL, flops


def _scores(kind: SpeedLimit, args: Any) -> int:
    """The number of scores of an attention kernel: queries times keys, over all heads and samples; 0 for others.

    `args`: the kernel's arguments; in the backward the gradient comes before queries and keys.
    """
    if kind not in (SpeedLimit.ATTENTION, SpeedLimit.ATTENTION_BACKWARD):
        return 0
    first = int(kind is SpeedLimit.ATTENTION_BACKWARD)
    query, key = (tensor.shape for tensor in args[first : first + 2])
    rows: int = math.prod(query[:-1])
    return rows * int(key[-2])


def _bytes(tensors: Sequence[Tensor]) -> Bytes:
    """The bytes of all these tensors; an expanded tensor has the bytes of its memory, which is read once."""
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


class CudaCasts(TorchFunctionMode):
    """Makes operations on fake CPU tensors compute in float32 where autocast on a GPU would; entered as a context."""

    _IN_FLOAT32 = (
        functional.layer_norm,
        functional.group_norm,
        functional.rms_norm,
        functional.softmax,
        functional.mse_loss,
        torch.softmax,
        Tensor.softmax,
        torch.pow,
        Tensor.pow,
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._IN_FLOAT32:
            args = tuple(_to_float32(value) for value in args)
            kwargs = {name: _to_float32(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _to_float32(value: object) -> object:
    is_narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_narrow else value  # type: ignore[attr-defined]  # it is a tensor here
