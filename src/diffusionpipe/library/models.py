"""`dp.pipeline`: a list of modules with a loss, as layers that any plan can spread over ranks."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from diffusionpipe.costs import Backbone, ModelGraph, TensorSpec
from diffusionpipe.errors import ModelError
from diffusionpipe.library.layers import NamedLayer
from diffusionpipe.models.cut.cutting import cut
from diffusionpipe.models.cut.leaves import fake_tensors
from diffusionpipe.models.graphs.describe import describe, dtype_name
from diffusionpipe.models.graphs.graph import Layer, LayerGraph, canonical_names
from diffusionpipe.models.graphs.run import run_layers

Layers: TypeAlias = nn.Module | Sequence[nn.Module | NamedLayer]
Example: TypeAlias = Sequence[Tensor] | Mapping[str, Tensor]
_Made: TypeAlias = tuple[LayerGraph, nn.Module]

COMPONENT = "model"
LOSS = "loss"
TARGET = "target"
_MOST_RUN = 2**26
"""The largest number of parameters and buffer values with which the layers run on a sample of the example."""
_BATCHES = (2, 3)
"""The numbers of samples of two runs, which show the dimensions that grow with the batch."""


@dataclass(frozen=True)
class Model:
    """The layers, modules and loss of a model, made by `pipeline`; a plan that runs it never changes its weights."""

    graph: LayerGraph
    """The layers in order, the loss last, with the components that hold their modules."""
    module: nn.Module
    """The module that holds all modules of layers; the names of parameters and of `state_dict` are its own."""

    @cached_property
    def description(self) -> ModelGraph:
        """The model's layers and tensors as plain data, in the dtypes of its parameters."""
        return describe(self.graph)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the tensors of a batch, in order, the target last."""
        return tuple(spec.name for spec in self.graph.inputs)

    @property
    def device(self) -> torch.device:
        """The device of its parameters; the CPU if it has none."""
        return next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of all parameters; one that is used under several names has the first of them."""
        return self.module.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters of the model's layers."""
        return self.module.parameters()

    def state_dict(self) -> dict[str, Any]:
        """Name -> parameter or buffer, the same as torch's `Module.state_dict`."""
        return self.module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy parameters and buffers by name into the model, for example the result of `run.state_dict()`.

        Raises:
            RuntimeError: names or shapes differ from the model's own.
        """
        self.module.load_state_dict(state)

    def loss(self, *batch: Tensor) -> Tensor:
        """The mean loss of a batch in this process, without any pipeline: shape ().

        Raises:
            ModelError: the batch does not have the tensors of the example.
        """
        inputs = self.batch(batch)
        losses = run_layers(self.graph.layers, self.graph.components, inputs, targets=[LOSS])[LOSS]
        return losses.sum() / len(losses)

    def batch(self, batch: Sequence[Tensor], *, has_target: bool = True) -> dict[str, Tensor]:
        """Name -> tensor of a batch; without `has_target` the target, which is last, is left out.

        Raises:
            ModelError: the batch has other tensors than the example.
        """
        specs = self.graph.inputs if has_target else self.graph.inputs[:-1]
        if len(batch) != len(specs):
            names = ", ".join(spec.name for spec in specs)
            raise ModelError(f"a batch of {len(batch)} tensors, but the model takes {len(specs)}: {names}")
        problems = []
        for spec, tensor in zip(specs, batch, strict=True):
            if not isinstance(tensor, Tensor):
                problems.append(f"{spec.name} is a {type(tensor).__name__}; give a tensor")
            elif (tuple(tensor.shape[1:]), dtype_name(tensor.dtype)) != (spec.shape, spec.dtype) or not tensor.ndim:
                problems.append(
                    f"{spec.name} has the shape {tuple(tensor.shape)} and the dtype {dtype_name(tensor.dtype)}; the "
                    f"example had {('samples', *spec.shape)} and {spec.dtype}".replace("'", "")
                )
            elif len(tensor) != len(batch[0]) or not len(tensor):
                problems.append(f"{spec.name} has {len(tensor)} samples and {specs[0].name} has {len(batch[0])}")
        if problems:
            raise ModelError("\n".join(problems))
        return {spec.name: tensor for spec, tensor in zip(specs, batch, strict=True)}


def pipeline(layers: Layers, *, loss: Callable[..., Tensor] | NamedLayer, example: Example) -> Model:
    """A model of these layers and this loss, for which plans can be made.

    Args:
        layers: modules in the order in which they run, each as it is or with names (`dp.layer`); or an nn.Sequential or
            nn.ModuleList of them; or another module, which is traced and cut at its blocks. A module is called with the
            tensors that it reads, and returns a tensor or a tuple of tensors, whose dimension 0 is the batch. Without
            names it reads the tensors that the layer before it wrote, the first one all inputs.
        loss: called with the tensors that the last layer wrote and the target, or with the tensors that `dp.layer`
            names; returns one value a sample, shape (B,).
        example: tensors of a batch of any size, the target last. They are called "input" (or "input0", "input1", ...)
            and "target", or as the keys of a dictionary say. Only shapes and dtypes count.

    Raises:
        ModelError: the layers do not form a model that can be cut into micro-batches; names the layers.
    """
    specs = _specs(example)
    if isinstance(layers, nn.Module) and not isinstance(layers, nn.Sequential | nn.ModuleList):
        graph, module = _traced(layers, loss, specs)
    else:
        graph, module = _listed(layers, loss, specs)
    model = Model(graph, module)
    with _quiet():
        assert model.description  # checks the layers
    _check_run(graph, specs, list(example.values()) if isinstance(example, Mapping) else list(example))
    return model


def _specs(example: Example) -> tuple[TensorSpec, ...]:
    """Name, shape of a sample and dtype of each tensor of the example, the target last.

    Raises:
        ModelError: the example is not a batch.
    """
    if isinstance(example, Mapping):
        named = dict(example)
    else:
        tensors = [example] if isinstance(example, Tensor) else list(example)
        names = ["input"] if len(tensors) == 2 else [f"input{i}" for i in range(len(tensors) - 1)]
        named = dict(zip([*names, TARGET], tensors, strict=False))
    if len(named) < 2 or not all(isinstance(tensor, Tensor) and tensor.ndim for tensor in named.values()):
        raise ModelError("example must be tensors with the samples in dimension 0, at least an input and a target")
    if LOSS in named:
        raise ModelError(f"example: {LOSS!r} is the name of the result; give the tensor another name")
    if len({len(tensor) for tensor in named.values()}) > 1:
        sizes = ", ".join(f"{name} {len(tensor)}" for name, tensor in named.items())
        raise ModelError(f"example: the tensors have different numbers of samples in dimension 0: {sizes}")
    return tuple(
        TensorSpec(name=name, shape=tuple(tensor.shape[1:]), dtype=dtype_name(tensor.dtype))
        for name, tensor in named.items()
    )


def _listed(layers: Layers, loss: Callable[..., Tensor] | NamedLayer, specs: Sequence[TensorSpec]) -> _Made:
    """(layer graph, module that holds all others) of modules that run one after the other, with the loss last."""
    given = dict(layers.named_children()) if isinstance(layers, nn.Module) else _numbered(layers)
    if isinstance(layers, nn.Sequential):  # a module may stand there twice, under two names
        given = dict(layers._modules.items())
    if not given:
        raise ModelError("a pipeline needs at least one layer; the list is empty")
    container = nn.Module()
    parts: dict[str, NamedLayer] = {}
    for key, one in given.items():
        part = one if isinstance(one, NamedLayer) else NamedLayer(one, (), ())
        if not isinstance(part.module, nn.Module):
            raise ModelError(f"layer {key} is a {type(part.module).__name__}; give an nn.Module that calls it")
        container.add_module(key, part.module)
        parts[key] = part
    made = list(_layers(parts, container, specs))
    return _with_loss(made, container, loss, specs)


def _numbered(layers: Sequence[nn.Module | NamedLayer]) -> dict[str, nn.Module | NamedLayer]:
    if isinstance(layers, NamedLayer):
        return {"0": layers}
    return {str(number): one for number, one in enumerate(layers)}


def _layers(parts: Mapping[str, NamedLayer], container: nn.Module, specs: Sequence[TensorSpec]) -> Iterator[Layer]:
    """A `Layer` for each part, in order, with the tensors that it reads and writes, found in runs on fake tensors.

    `container`: the module that holds the parts' modules under the keys of `parts`. `specs`: the raw inputs.

    Raises:
        ModelError: a part cannot run, or its names do not fit the other parts.
    """
    before = tuple(spec.name for spec in specs[:-1])
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_tensors(container, mode), mode, torch.no_grad():
        known = {spec.name: _zeros(spec) for spec in specs}
        writer = dict.fromkeys(known, "")
        for key, part in parts.items():
            name = f"{key}.{type(part.module).__name__}"
            reads = part.reads or before
            if lacking := [read for read in reads if read not in known]:
                raise ModelError(
                    f"{name} reads {lacking[0]!r}, which nothing before it writes; there are {', '.join(known)}"
                )
            # Run with both numbers of samples, so that `describe` finds where the batch is.
            read_here = [_Reads({read: known[read][n] for read in reads}, writer) for n in (0, 1)]
            results = [_call(name, part.module, one) for one in read_here]
            writes = part.writes or tuple(
                f"{name}.output" + (f".{n}" if n else "") for n in range(len(results[0]) or 1)
            )
            if len(writes) != len(results[0]):
                raise ModelError(f"{name} returns {len(results[0])} tensors, but writes={writes} names {len(writes)}")
            if taken := [write for write in writes if write in known or write == LOSS]:
                raise ModelError(
                    f"{name} writes {taken[0]!r}, which is the name of another tensor; give it another name"
                )
            writer.update(dict.fromkeys(writes, name))
            known.update(zip(writes, zip(*results, strict=True), strict=True))
            yield Layer(
                name=name,
                component=COMPONENT,
                reads=reads,
                writes=writes,
                modules=(key,),
                run=partial(_run_child, key),
            )
            before = writes


def _zeros(spec: TensorSpec) -> tuple[Tensor, Tensor]:
    few, many = (torch.zeros((batch, *spec.shape), dtype=getattr(torch, spec.dtype)) for batch in _BATCHES)
    return few, many


@dataclass(frozen=True, slots=True)
class _Reads:
    """The tensors that a layer reads, by name; as a text, it lists them for an error."""

    tensors: Mapping[str, Tensor]
    writer: Mapping[str, str]
    """Name of a tensor -> name of the layer that writes it; "" for an input."""

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {tuple(tensor.shape)} {dtype_name(tensor.dtype)}"
            + (f" of {self.writer[name]}" if self.writer[name] and not name.startswith(self.writer[name]) else "")
            for name, tensor in self.tensors.items()
        )


_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError, KeyError)
"""The errors that modules raise when they are called with unfit arguments."""


def _call(name: str, module: Callable[..., Any], reads: _Reads) -> tuple[Tensor, ...]:
    """The tensors that the layer called `name` returns for these arguments, as a tuple.

    Raises:
        ModelError: it cannot run on them, or returns other things than tensors.
    """
    try:
        with _quiet():
            result = module(*reads.tensors.values())
    except _FAILURES as error:
        raise _cannot_run(name, reads, error) from error
    written = result if isinstance(result, tuple | list) else (result,)
    if not written or not all(isinstance(one, Tensor) for one in written):
        kinds = ", ".join("Tensor" if isinstance(one, Tensor) else type(one).__name__ for one in written)
        returned = f"({kinds})" if isinstance(result, tuple | list) else kinds
        raise ModelError(
            f"{name} returns {returned}, and a layer returns a tensor or a tuple of tensors; put it into a module "
            "whose forward returns what the next layer reads"
        )
    return tuple(written)


def _cannot_run(name: str, reads: _Reads, error: Exception) -> ModelError:
    said = next(iter(str(error).splitlines()), type(error).__name__)
    return ModelError(f"{name} cannot run on {reads}: {said}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Within the block, torch does not log the traceback of an operation whose shapes do not fit."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _run_child(key: str, container: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
    child = container._modules[key]
    assert child is not None
    result = child(*tensors)
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _traced(module: nn.Module, loss: Callable[..., Tensor] | NamedLayer, specs: Sequence[TensorSpec]) -> _Made:
    """(layer graph, the module) of a module with a forward of its own, cut at its blocks, with the loss last."""
    inputs = {
        spec.name: torch.zeros((2, *spec.shape), dtype=getattr(torch, spec.dtype), device="meta") for spec in specs[:-1]
    }

    def forward(root: nn.Module, **tensors: Tensor) -> Tensor:
        result: Tensor = root(*tensors.values())
        return result

    made = cut(module, forward, inputs, component=COMPONENT)
    return _with_loss(list(made), module, loss, specs)


def _with_loss(
    layers: list[Layer], container: nn.Module, loss: Callable[..., Tensor] | NamedLayer, specs: Sequence[TensorSpec]
) -> _Made:
    part = loss if isinstance(loss, NamedLayer) else NamedLayer(loss, (), ())
    if not callable(part.module):
        raise ModelError(f"loss is a {type(part.module).__name__}; give a function of the outputs and the target")
    last = layers[-1].writes
    components = {COMPONENT: container, "objective": nn.Identity()}
    modules: tuple[str, ...] = ()
    if isinstance(part.module, nn.Module):
        components["objective"], modules = part.module, ("",)
    reads = part.reads or (*last, specs[-1].name)
    graph = LayerGraph(
        layers=(
            *layers,
            Layer(
                name=LOSS,
                component="objective",
                reads=reads,
                writes=(LOSS,),
                modules=modules,
                run=partial(_run_loss, part.module),
            ),
        ),
        components=components,
        inputs=tuple(specs),
        backbones=(Backbone(prediction=last[0]),),
    )
    trained = [name for name, p in components["objective"].named_parameters() if p.requires_grad]
    if trained:
        raise ModelError(f"the loss trains {trained[0]}; make it the last layer, and give a loss without parameters")
    _check_run(graph, specs, None)
    return graph, container


def _run_loss(loss: Callable[..., Tensor], module: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
    call = module if isinstance(loss, nn.Module) else loss
    return (call(*tensors),)


def _check_run(graph: LayerGraph, specs: Sequence[TensorSpec], example: Sequence[Tensor] | None) -> None:
    """Run all layers on fake tensors, then on samples of the example where that takes little time.

    Raises:
        ModelError: a layer cannot run, or the loss does not give one value a sample.
    """
    objective = graph.layers[-1]
    known = {name for layer in graph.layers[:-1] for name in layer.writes} | {spec.name for spec in specs}
    if lacking := [name for name in objective.reads if name not in known]:
        raise ModelError(f"the loss reads {lacking[0]!r}, which no layer writes; there are {', '.join(sorted(known))}")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_tensors(graph.components[COMPONENT], mode), mode, torch.no_grad():
        for index, batch in enumerate(_BATCHES):
            _run_all(graph, {spec.name: _zeros(spec)[index] for spec in specs}, batch)
    tensors = [t for module in graph.components.values() for t in (*module.parameters(), *module.buffers())]
    # A large model would take long here; the fake run has checked its shapes.
    if example is None or any(t.is_meta for t in tensors) or sum(t.numel() for t in tensors) > _MOST_RUN:
        return
    device = tensors[0].device if tensors else example[0].device
    few = {spec.name: tensor[:1].to(device) for spec, tensor in zip(specs, example, strict=True)}
    with torch.no_grad():
        _run_all(graph, few, 1)


def _run_all(graph: LayerGraph, tensors: dict[str, Tensor], batch: int) -> None:
    """Run all layers on inputs of `batch` samples by name, and add the tensors that they write to `tensors`.

    Raises:
        ModelError: a layer cannot run, or the loss does not give one value a sample.
    """
    writer = dict.fromkeys(tensors, "")
    for layer in graph.layers:
        is_loss = layer is graph.layers[-1]
        reads = _Reads({name: tensors[name] for name in layer.reads}, writer)
        try:
            with _quiet():
                written = layer.run(graph.components[layer.component], *reads.tensors.values())
        except _FAILURES as error:
            raise _cannot_run("the loss" if is_loss else layer.name, reads, error) from error
        if is_loss:
            (found,) = written
            if not isinstance(found, Tensor) or tuple(found.shape) != (batch,):
                shape = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
                raise ModelError(
                    f"the loss returns {shape} for {batch} samples, but one value a sample is needed, shape (B,); use "
                    'reduction="none", and .mean(1) over what a sample has'
                )
        tensors.update(zip(layer.writes, written, strict=True))
        writer.update(dict.fromkeys(layer.writes, layer.name))


def public(name: str) -> str:
    """A parameter's canonical name without the component, as `Model.named_parameters` has it."""
    return name.removeprefix(f"{COMPONENT}.")


def aliases(model: Model) -> dict[str, str]:
    """Each name of a parameter in the model's state -> the first name of the same parameter."""
    first = {id(parameter): public(name) for parameter, name in canonical_names({COMPONENT: model.module}).items()}
    return {name: first[id(parameter)] for name, parameter in model.module.named_parameters(remove_duplicate=False)}
