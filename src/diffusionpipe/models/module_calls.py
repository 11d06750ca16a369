"""Calls of submodules: what they are given and return, and the operator that torch.export sees in their place."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from diffusionpipe.errors import ModelError
from diffusionpipe.models.graph import attribute
from diffusionpipe.models.leaves import Seen

BATCHES = (3, 5)
"""Two batch sizes tell a dimension that grows with the batch from one that does not."""


class _Mark:
    """Stands for a value that differs from call to call."""


TENSOR, _BATCH = _Mark(), _Mark()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One call of a submodule."""

    module: str
    tree: pytree.TreeSpec
    """Of its positional and named arguments."""
    leaves: tuple[object, ...]
    """The leaves of `tree`; places of tensors and of the number of samples are marked."""

    def run(self, root: nn.Module, tensors: Sequence[Tensor], batch: int) -> list[Tensor]:
        """Calls the submodule as the model does, and returns the tensors that it returned."""
        rest = iter(tensors)
        leaves = [next(rest) if v is TENSOR else batch if v is _BATCH else v for v in self.leaves]
        positional, named = pytree.tree_unflatten(leaves, self.tree)
        found: Any = attribute(root, self.module)
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
    """A tensor that a module was given and returns as it is; `index` among those that it was given."""

    index: int


@dataclass(slots=True)
class Recorder:
    """What the submodules were called with and returned."""

    modules: list[str] = field(default_factory=list)
    written: list[list[_Shape]] = field(default_factory=list)
    trees: list[pytree.TreeSpec] = field(default_factory=list)
    templates: list[list[object]] = field(default_factory=list)
    results: list[list[tuple[tuple[int, ...], torch.dtype]]] = field(default_factory=list)


RECORDERS: dict[int, Recorder] = {}
"""Of the traces that are under way: an operator's fake implementation has no other way to find its own."""


def call_of(seen: Seen, batch: torch.SymInt) -> tuple[ModuleCall, list[Tensor]]:
    """The call without its tensors, and these.

    Raises ModelError for a number that depends on the batch but is not its size.
    """
    leaves, tree = pytree.tree_flatten((seen.args, seen.named))
    marked = [TENSOR if isinstance(v, Tensor) else _BATCH if isinstance(v, torch.SymInt) else v for v in leaves]
    if any(isinstance(v, torch.SymInt) and v.node.expr != batch.node.expr for v in leaves):
        raise ModelError(f"{seen.name} is called with a number that depends on the batch")
    return ModuleCall(module=seen.name, tree=tree, leaves=tuple(marked)), [v for v in leaves if isinstance(v, Tensor)]


def record(recorder: Recorder, index: int, seen: Seen) -> Any:
    """Makes the call, and notes what it returns; `index` is that of the batch size."""
    result = seen.forward(*seen.args, **seen.named)
    given = [id(leaf) for leaf in pytree.tree_leaves((seen.args, seen.named)) if isinstance(leaf, Tensor)]
    leaves, tree = pytree.tree_flatten(result)
    template = [
        leaf if not isinstance(leaf, Tensor) else Passed(given.index(id(leaf))) if id(leaf) in given else TENSOR
        for leaf in leaves
    ]
    if index == 0:
        recorder.trees.append(tree)
        recorder.templates.append(template)
        recorder.modules.append(seen.name)
    made = [leaf for leaf, of in zip(leaves, template, strict=True) if of is TENSOR]
    recorder.results.append([(tuple(t.shape), t.dtype) for t in made])
    return result


def find_shapes(recorder: Recorder) -> None:
    """From results for both batch sizes. Raises ModelError where the calls depend on the batch."""
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
                dimensions.append((0, a) if a == b else (a // BATCHES[0], 0))
            shapes.append(_Shape(tuple(dimensions), dtype))
        recorder.written.append(shapes)
