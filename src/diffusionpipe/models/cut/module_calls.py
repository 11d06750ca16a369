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
"""Two batch sizes tell a dimension that grows with the batch from one that does not."""


class _Mark:
    """Stands for a value that differs from call to call."""


TENSOR, _BATCH = _Mark(), _Mark()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One call of a submodule: its name and the arguments, with marks in place of tensors and of the batch size."""

    module: str
    tree: pytree.TreeSpec
    """The structure of its positional and named arguments."""
    leaves: tuple[object, ...]
    """The leaves of `tree`; places of tensors and of the number of samples are marked."""

    def run(self, root: nn.Module, tensors: Sequence[Tensor], batch: int) -> list[Tensor]:
        """Call the submodule as the model does; returns the new tensors in its result.

        `tensors`: in place of the marks for tensors. `batch`: in place of the batch size.
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
    """A call of a submodule while a model is traced; it never runs."""
    raise AssertionError("a traced call runs through its ModuleCall")


@_call_module.register_fake
def _(tensors: list[Tensor], batch: int, recorder: int, call: int) -> list[Tensor]:
    return [shape.empty(batch) for shape in RECORDERS[recorder].written[call]]


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tensor's shape; (per sample, constant) of each dimension, one of which is zero."""

    dimensions: tuple[tuple[int, int], ...]
    dtype: torch.dtype

    def empty(self, batch: int) -> Tensor:
        return torch.empty([each * batch if each else rest for each, rest in self.dimensions], dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Passed:
    """The mark of a tensor that a module was given and returns as it is; `index`: its place among those given."""

    index: int


@dataclass(slots=True)
class Recorder:
    """The submodules that a forward calls, with the shapes and the structure of each call's result. Mutable."""

    modules: list[str] = field(default_factory=list)
    written: list[list[_Shape]] = field(default_factory=list)
    returned: list["CallResult"] = field(default_factory=list)
    results: list[list[tuple[tuple[int, ...], torch.dtype]]] = field(default_factory=list)
    known: dict[Hashable, "CallResult"] = field(default_factory=dict)
    """The results of modules of a kind for arguments of a kind."""


RECORDERS: dict[int, Recorder] = {}
"""Recorders of the traces that are under way: an operator's fake implementation has no other way to find its own."""


def call_of(seen: SeenCall, batch: torch.SymInt) -> tuple[ModuleCall, list[Tensor]]:
    """A caught call with marks in place of its tensors, and these tensors in order.

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
    template: list[object]
    made: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    """Shape, strides and dtype of each new tensor."""

    def of(self, given: Sequence[Tensor], made: Iterable[Tensor]) -> Any:
        """The result with other tensors: `given` were the call's arguments, `made` are the new ones."""
        rest = iter(made)
        values = [
            next(rest) if value is TENSOR else given[value.index] if isinstance(value, Passed) else value
            for value in self.template
        ]
        return pytree.tree_unflatten(values, self.tree)


def record(recorder: Recorder, index: int, kinds: Mapping[str, Hashable], seen: SeenCall) -> Any:
    """The result of a caught call, which is made if it is the first of its kind; notes shapes in the recorder.

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
    """A key of an argument that decides the result of a module; equal to no other key for one that is not understood.

    `first`: id of a tensor -> its first place among all.
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
