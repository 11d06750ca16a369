"""A transformer's forward as calls of its own modules with glue between them, by torch.export.

Modules that hold parameters are called as they are: each block of the model's lists, and each other child of the model.
While torch.export traces the model, every such module is one opaque operator, so the exporter never looks into it. The
rest is the glue: reshapes, concatenations, rotary tables, masks.

    embed ---+                              call 0   embed
             |                              glue     x.flatten(2).transpose(1, 2)
    (glue) --+--- blocks.0 --- blocks.1     call 1   blocks.0
                                            call 2   blocks.1
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from diffusionpipe.errors import ModelError
from diffusionpipe.models.cut.leaves import SeenCall, fake_tensors, kind_of, leaves_of, patched, unchanged
from diffusionpipe.models.cut.module_calls import (
    BATCHES,
    RECORDERS,
    ModuleCall,
    Recorder,
    call_of,
    find_shapes,
    record,
)

_LONG = 200
_REASONS = {
    "DynamicOutputShapeException": "its forward makes tensors whose size depends on values",
    "DataDependentOutputException": "its forward decides by a value in a tensor",
    "GuardOnDataDependentSymNode": "its forward decides by a value in a tensor",
    "Constraints": "its forward is not the same for every batch size",
}
Forward = Callable[..., Tensor]
"""`forward(transformer, **tensors)` -> one tensor; dimension 0 of this tensor and of all arguments is the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A traced forward: its graph of operations, the calls of submodules in it, and its placeholders."""

    graph: fx.Graph
    """Placeholders of inputs, parameters, buffers and constants; glue; calls of `diffusionpipe::call_module`."""
    calls: tuple[ModuleCall, ...]
    """The calls of submodules, in order; a node with the operator has the index of its own."""
    inputs: Mapping[str, str]
    """Placeholder -> argument of the forward."""
    owned: Mapping[str, str]
    """Placeholder -> name of a parameter or buffer below the model."""
    parameters: frozenset[str]
    """The placeholders that are parameters: training changes their values."""
    constants: Mapping[str, Tensor]
    """Placeholder -> a tensor that belongs to no parameter or buffer."""
    graph_module: fx.GraphModule
    """The module that holds the graph, with the objects that its `get_attr` nodes name."""

    def call(self, node: fx.Node) -> ModuleCall:
        """The submodule's call that a node with the operator `diffusionpipe::call_module` represents."""
        return self.calls[node.args[3]]  # type: ignore[index]  # the operator's last argument, the call's number


def export(root: nn.Module, forward: Forward, inputs: Mapping[str, Tensor]) -> Exported:
    """The trace of `forward(root, **inputs)`. The inputs give shapes and dtypes; their dimension 0 is the batch.

    Nothing is computed: weights may be on the meta device, and only glue is traced, so that a model of 20 B parameters
    takes seconds.

    Raises ModelError if the forward cannot be traced for every batch size; the message gives the reason.
    """
    leaves, more = leaves_of(root), leaves_of(root, all_children=True)
    try:
        return _Export(root, forward, inputs, leaves).run()
    except ModelError:
        # A child without parameters may do in Python what cannot be traced. Then it is called as it is, too.
        if leaves == more:
            raise
    return _Export(root, forward, inputs, more).run()


def reason_of(error: Exception) -> str:
    """A sentence for the user that says why torch.export refused a model with this error."""
    text = " ".join(str(error).split())
    for kind, sentence in _REASONS.items():
        if kind in (type(error).__name__, *text.split()):
            return f"{sentence} ({text})" if len(text) < _LONG else sentence
    return f"{type(error).__name__}: {text[:_LONG]}"


@dataclass(frozen=True, slots=True)
class _Export:
    """One attempt to trace a forward, in which the submodules `leaves` are called as they are."""

    root: nn.Module
    """The model."""
    forward: Forward
    """The function to trace."""
    inputs: Mapping[str, Tensor]
    """Its arguments besides the model, by name, which give shapes and dtypes."""
    leaves: tuple[str, ...]
    """The names of the submodules that are called whole."""

    def run(self) -> Exported:
        """The traced forward. Raises ModelError if it cannot be traced."""
        recorder = Recorder()
        RECORDERS[id(recorder)] = recorder
        try:
            with torch.no_grad():
                self._record(recorder)
                return self._trace(recorder)
        except ModelError:
            raise
        except Exception as error:  # the exporter raises whatever a model's code leads to
            raise ModelError(f"{type(self.root).__name__} cannot be cut: {reason_of(error)}") from error
        finally:
            del RECORDERS[id(recorder)]

    def _record(self, recorder: Recorder) -> None:
        """Run the forward on fake tensors for both `BATCHES`, and note the results of the leaves in the recorder."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        kinds = {name: kind_of(self.root.get_submodule(name)) for name in self.leaves}
        for index, batch in enumerate(BATCHES):
            see = partial(record, recorder, index, kinds)
            # Code of a model may hold real tensors of its own, such as tables, hence non-fake inputs.
            with (
                unchanged(self.root),
                FakeTensorMode(allow_non_fake_inputs=True),
                fake_tensors(self.root),
                patched(self.root, self.leaves, see),
            ):
                self.forward(self.root, **dict(zip(self.inputs, self._examples(batch), strict=True)))
        find_shapes(recorder)

    def _examples(self, batch: int) -> tuple[Tensor, ...]:
        return tuple(torch.empty((batch, *t.shape[1:]), dtype=t.dtype) for t in self.inputs.values())

    def _trace(self, recorder: Recorder) -> Exported:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        wrapper = _Root(self)
        calls: list[ModuleCall] = []

        def stub(seen: SeenCall) -> Any:
            call, tensors = call_of(seen, wrapper.batch)
            index = len(calls)
            calls.append(call)
            written = torch.ops.diffusionpipe.call_module(tensors, wrapper.batch, id(recorder), index)
            return recorder.returned[index].of(tensors, written)

        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        with unchanged(self.root), fake_tensors(self.root, mode):
            with mode:
                given = self._examples(BATCHES[0])
            # torch.export makes a constant of a dimension of 0 or 1.
            sizes = (tuple({0: torch.export.Dim("batch", min=2, max=1 << 20)} for _ in given),)
            with patched(self.root, self.leaves, stub):
                program = torch.export.export(wrapper, given, strict=False, dynamic_shapes=sizes)
            # Decompositions replace operations that write in place, which a cut by values would not see.
            if any(_is_mutable(node.target) for node in program.graph.nodes):
                program = program.run_decompositions({})
        return _exported(program, calls, list(self.inputs))


class _Root(nn.Module):
    """The forward as a module for torch.export, which takes its tensors by position, not by name."""

    def __init__(self, export: _Export) -> None:
        super().__init__()
        self.root, self._export = export.root, export
        self.batch: Any = None
        """The size of dimension 0 of the tensors of its last call: the batch."""

    def forward(self, *tensors: Tensor) -> Tensor:
        self.batch = tensors[0].shape[0]
        return self._export.forward(self.root, **dict(zip(self._export.inputs, tensors, strict=True)))


def _is_mutable(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _exported(program: Any, calls: list[ModuleCall], names: list[str]) -> Exported:
    signature = program.graph_signature
    owned = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    constants = {key: program.constants[name] for key, name in signature.inputs_to_lifted_tensor_constants.items()}
    return Exported(
        graph=program.graph,
        calls=tuple(calls),
        inputs=dict(zip(signature.user_inputs, names, strict=True)),
        parameters=frozenset(signature.inputs_to_parameters),
        # The names begin with `_Root`'s attribute for the model.
        owned={key: name.removeprefix("root.") for key, name in owned.items()},
        constants=constants,
        graph_module=program.graph_module,
    )
