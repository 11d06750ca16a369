"""Any nn.Sequential as a layer graph: the smallest adapter.

A child may return several tensors, in whatever tuples and dictionaries: each becomes a tensor of the graph, and the
next child gets them as they were. Where dimension 0 of one is not the samples, as in the states of an LSTM, it travels
with that dimension in front.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import ModelError
from diffusionpipe.models.cut.leaves import fake_tensors
from diffusionpipe.models.graphs.graph import Layer, LayerGraph

_BATCHES = (2, 3)
"""The numbers of samples of two runs, which show the dimension of a tensor that counts samples."""


@dataclass(frozen=True, slots=True)
class _Value:
    """The value that a child returns, or the input, as tensors of the graph."""

    names: tuple[str, ...]
    """The names of its tensors in the graph."""
    dimensions: tuple[int, ...] = (0,)
    """The dimension of each tensor along which its samples lie, by tensor."""
    tree: pytree.TreeSpec | None = None
    """The structure (tuples, dictionaries) in which the tensors are returned; None for a tensor alone."""

    def parts(self, value: Any) -> tuple[Tensor, ...]:
        """The tensors of a value as the graph passes them: in order, with their samples in dimension 0."""
        leaves = pytree.tree_leaves(value)
        return tuple(leaf.movedim(d, 0) if d else leaf for leaf, d in zip(leaves, self.dimensions, strict=True))

    def whole(self, parts: Sequence[Tensor]) -> Any:
        """The value in the child's own structure, from the graph's tensors: the inverse of `parts`."""
        leaves = [part.movedim(0, d) if d else part for part, d in zip(parts, self.dimensions, strict=True)]
        return leaves[0] if self.tree is None else pytree.tree_unflatten(leaves, self.tree)


def sequential_graph(
    module: nn.Sequential,
    *,
    inputs: TensorSpec | tuple[int, ...],
    target: TensorSpec | tuple[int, ...],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> LayerGraph:
    """A graph with the children of `module` as layers, and `loss(prediction, target)`, one loss a sample, shape (B,).

    The raw inputs have the names "input" and "target" (a shape stands for float32), the component is "model", its
    layers "model.0", "model.1", ..., the tensors between them "hidden.0", ..., and the last layer "objective.loss". Of
    a child that returns several tensors the second one is "hidden.0.1", and so on.

    Raises:
        ModelError: a child returns a tensor in which no dimension counts the samples, or another value.
    """
    values = list(_values(module, _spec("input", inputs)))
    layers = [
        Layer(
            name=f"model.{name}",
            component="model",
            reads=read.names,
            writes=write.names,
            modules=(name,),
            run=partial(_run_child, name, read, write),
        )
        for name, read, write in zip(module._modules, values, values[1:], strict=False)
    ]
    objective = Layer(
        name="objective.loss",
        component="objective",
        reads=(*values[-1].names, "target"),
        writes=("loss",),
        run=partial(_run_loss, loss, values[-1]),
    )
    return LayerGraph(
        layers=(*layers, objective),
        components={"model": module, "objective": nn.Identity()},
        inputs=(_spec("input", inputs), _spec("target", target)),
    )


def _spec(name: str, spec: TensorSpec | tuple[int, ...]) -> TensorSpec:
    if isinstance(spec, TensorSpec):
        return TensorSpec(name=name, shape=spec.shape, dtype=spec.dtype)
    return TensorSpec(name=name, shape=spec)


def _values(module: nn.Sequential, inputs: TensorSpec) -> Iterator[_Value]:
    """The input, then the value of each child; a tensor each if a child cannot run, which `describe` then refuses."""
    names = [f"hidden.{index}" for index in range(len(module) - 1)] + ["prediction"]
    yield _Value(("input",))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_tensors(module, mode), mode, torch.no_grad():
        few, many = (torch.zeros((batch, *inputs.shape), dtype=getattr(torch, inputs.dtype)) for batch in _BATCHES)
        for index, (key, child) in enumerate(module._modules.items()):
            assert child is not None
            try:
                few, many = child(few), child(many)
            except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
                yield from (_Value((name,)) for name in names[index:])
                return
            yield _value(f"model.{key}", names[index], few, many)


def _value(layer: str, name: str, few: Any, many: Any) -> _Value:
    leaves, tree = pytree.tree_flatten(few)
    dimensions = []
    for one, other in zip(leaves, pytree.tree_leaves(many), strict=True):
        if not isinstance(one, Tensor):
            raise ModelError(f"{layer} returns a {type(one).__name__} beside its tensors")
        sizes = list(zip(one.shape, other.shape, strict=True))
        if _BATCHES not in sizes:
            raise ModelError(f"{layer} returns a tensor of shape {tuple(one.shape)} for {_BATCHES[0]} samples")
        # Where several dimensions count samples, the first one is taken.
        dimensions.append(sizes.index(_BATCHES))
    return _Value(
        (name, *(f"{name}.{i}" for i in range(1, len(leaves)))), tuple(dimensions), None if tree.is_leaf() else tree
    )


def _run_child(name: str, read: _Value, write: _Value, module: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
    return write.parts(getattr(module, name)(read.whole(tensors)))


def _run_loss(
    loss: Callable[[Any, Tensor], Tensor], value: _Value, _: nn.Module, *tensors: Tensor
) -> tuple[Tensor, ...]:
    return (loss(value.whole(tensors[:-1]), tensors[-1]),)
