"""Calls of submodules: their arguments and results, and the operator that torch.export sees in their place."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from diffusionpipe.errors import ModelError
from diffusionpipe.models.cut.leaves import SeenCall
from diffusionpipe.models.graphs.graph import attribute

BATCHES = (3, 5)
"""The batch sizes of two runs, which show the dimensions that grow with the batch."""


class _Mark:
    """A mark in place of a value that differs from call to call: a tensor, or the batch size."""


TENSOR, _BATCH = _Mark(), _Mark()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One call of a submodule: its name and the arguments, with marks in place of tensors and of the batch size."""

    module: str
    """The name of the submodule in the model."""
    tree: pytree.TreeSpec
    """The structure of its positional and named arguments."""
    leaves: tuple[object, ...]
    """The values in `tree`, in order, with marks in place of tensors and of the number of samples."""

    def run(self, root: nn.Module, tensors: Sequence[Tensor], batch: int) -> list[Tensor]:
        """Call the submodule with these tensors; returns the tensors in its result that are not among them, in order.

        `tensors`, `batch`: the values that replace the marks of tensors and of the batch size.
        """
        rest = iter(tensors)
        leaves = [next(rest) if v is TENSOR else batch if v is _BATCH else v for v in self.leaves]
        positional, named = pytree.tree_unflatten(leaves, self.tree)
        found: Any = attribute(root, self.module)
        # A tensor that the call passes on unchanged is not one of its results.
        given = {id(tensor) for tensor in tensors}
        result = pytree.tree_leaves(found(*positional, **named))
        return [leaf for leaf in result if isinstance(leaf, Tensor) and id(leaf) not in given]


@torch.library.custom_op("diffusionpipe::call_module", mutates_args=())
def _call_module(tensors: list[Tensor], batch: int, recorder: int, call: int) -> list[Tensor]:
    """The operator that represents a call of a submodule in a trace; it never runs, and would raise AssertionError."""
    raise AssertionError("a traced call runs through its ModuleCall")


@_call_module.register_fake
def _(tensors: list[Tensor], batch: int, recorder: int, call: int) -> list[Tensor]:
    return [shape.empty(batch) for shape in RECORDERS[recorder].written[call]]


@dataclass(frozen=True, slots=True)
class _Shape:
    """The shape of a tensor as a function of the batch size, and its dtype."""

    dimensions: tuple[tuple[int, int], ...]
    """(size for each sample, constant size) of each dimension; one of the two is zero."""
    dtype: torch.dtype
    """The dtype of the tensor."""

    def empty(self, batch: int) -> Tensor:
        return torch.empty([each * batch if each else rest for each, rest in self.dimensions], dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Passed:
    """A mark in place of a tensor in a module's result that is one of the module's own arguments."""

    index: int
    """The index of this argument among the tensors that the module was called with."""


@dataclass(slots=True)
class Recorder:
    """The submodules that a forward calls, with the shapes and the structure of each call's result. Mutable."""

    modules: list[str] = field(default_factory=list)
    """The name of the submodule of each call, in order."""
    written: list[list[_Shape]] = field(default_factory=list)
    """The shapes of each call's new tensors; `find_shapes` sets them."""
    returned: list["CallResult"] = field(default_factory=list)
    """The result of each call, at the first batch size."""
    results: list[list[tuple[tuple[int, ...], torch.dtype]]] = field(default_factory=list)
    """(shape, dtype) of each call's new tensors: all calls at the first batch size, then all at the second."""
    known: dict[Hashable, "CallResult"] = field(default_factory=dict)
    """Key of a kind of module and its arguments -> the result."""


RECORDERS: dict[int, Recorder] = {}
"""Id of a recorder -> the recorder, for all traces that are under way; the operator's fake implementation reads it."""


def call_of(seen: SeenCall, batch: torch.SymInt) -> tuple[ModuleCall, list[Tensor]]:
    """(the caught call with marks in place of its tensors and of the batch size, its tensors in order).

    Raises ModelError for a number that depends on the batch but is not its size.
    """
    leaves, tree = pytree.tree_flatten((seen.args, seen.named))
    # Under the trace every whole number that depends on the batch is symbolic.
    marked = [TENSOR if isinstance(v, Tensor) else _BATCH if isinstance(v, torch.SymInt) else v for v in leaves]
    if any(isinstance(v, torch.SymInt) and v.node.expr != batch.node.expr for v in leaves):
        raise ModelError(f"{seen.name} is called with a number that depends on the batch")
    return ModuleCall(module=seen.name, tree=tree, leaves=tuple(marked)), [v for v in leaves if isinstance(v, Tensor)]


@dataclass(frozen=True, slots=True)
class CallResult:
    """The structure of a call's result, with shape, strides and dtype of each new tensor in place of it."""

    tree: pytree.TreeSpec
    """The structure of the result's values."""
    template: list[object]
    """The values, in order, with the mark `TENSOR` for a new tensor and `Passed` for one of the arguments."""
    made: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    """Shape, strides and dtype of each new tensor."""

    def of(self, given: Sequence[Tensor], made: Iterable[Tensor]) -> Any:
        """The result of the call, made of the tensors of its arguments, `given`, and its new tensors, `made`."""
        rest = iter(made)
        values = [
            next(rest) if value is TENSOR else given[value.index] if isinstance(value, Passed) else value
            for value in self.template
        ]
        return pytree.tree_unflatten(values, self.tree)


def record(recorder: Recorder, index: int, kinds: Mapping[str, Hashable], seen: SeenCall) -> Any:
    """The result of a caught call, which is only made if it is the first of its kind; notes shapes in the recorder.

    Modules of one kind, such as most blocks of a model, return the same for arguments of the same shapes. So one of
    them is called for all. `index`: 0 for the first batch size, 1 for the second. `kinds`: `leaves.kind_of` of each
    module.
    """
    arguments, tree = pytree.tree_flatten((seen.args, seen.named))
    given = [leaf for leaf in arguments if isinstance(leaf, Tensor)]
    # Reversed, so that among equal tensors the first place stays in the dictionary.
    first = {id(tensor): place for place, tensor in reversed(list(enumerate(given)))}
    key = kinds[seen.name], tree, tuple(_argument(leaf, first) for leaf in arguments)
    found = recorder.known.get(key)
    if found is None:
        result = seen.forward(*seen.args, **seen.named)
        found = recorder.known[key] = _result(result, given)
    else:
        made = [torch.empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in found.made]
        result = found.of(given, made)
    if index == 0:
        recorder.returned.append(found)
        recorder.modules.append(seen.name)
    recorder.results.append([(shape, dtype) for shape, _, dtype in found.made])
    return result


def _argument(leaf: object, first: Mapping[int, int]) -> Hashable:
    """A key of a call's argument: with equal keys, results have the same shapes. An unknown kind gets a unique key.

    `first`: id of a tensor -> its first index among the tensors of the call.
    """
    if isinstance(leaf, Tensor):
        return first[id(leaf)], tuple(leaf.shape), leaf.stride(), leaf.dtype
    return (type(leaf), leaf) if isinstance(leaf, bool | int | float | str | torch.dtype | None) else object()


def _result(result: Any, given: Sequence[Tensor]) -> CallResult:
    places = [id(tensor) for tensor in given]
    leaves, tree = pytree.tree_flatten(result)
    template = [
        leaf if not isinstance(leaf, Tensor) else Passed(places.index(id(leaf))) if id(leaf) in places else TENSOR
        for leaf in leaves
    ]
    made = [leaf for leaf, of in zip(leaves, template, strict=True) if of is TENSOR]
    return CallResult(tree, template, [(tuple(t.shape), t.stride(), t.dtype) for t in made])


def find_shapes(recorder: Recorder) -> None:
    """Set `recorder.written`, shapes as functions of the batch, from the results for both batch sizes.

    Raises ModelError where the calls depend on the batch.
    """
    number = len(recorder.modules)
    if len(recorder.results) != 2 * number:
        raise ModelError("the model calls its blocks once a sample, not once a batch")
    for module, few, many in zip(recorder.modules, recorder.results[:number], recorder.results[number:], strict=True):
        shapes = []
        for (first, dtype), (second, _) in zip(few, many, strict=True):
            dimensions = []
            for a, b in zip(first, second, strict=True):
                if a != b and a * BATCHES[1] != b * BATCHES[0]:
                    raise ModelError(f"{module} writes a tensor whose size does not follow the batch")
                # Equal at both batch sizes: a constant. Else it grows with the batch.
                dimensions.append((0, a) if a == b else (a // BATCHES[0], 0))
            shapes.append(_Shape(tuple(dimensions), dtype))
        recorder.written.append(shapes)
