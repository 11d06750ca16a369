"""One stage of a published model at its real width, and three ways to run its backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from diffusionpipe.costs import ModelGraph, TensorSpec
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.models.graphs.graph import Layer, LayerGraph, layer_parameters
from diffusionpipe.models.opening.configured import configured_graph
from diffusionpipe.models.parameters.weights import materialize
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.runtime.compute.backward import run_backward
from diffusionpipe.runtime.compute.split import Deferred
from diffusionpipe.runtime.compute.stage import LayerStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Which stage of which model."""

    name: str
    resolution: int
    samples: int
    stages: int
    """The model is cut into so many by counted work,"""
    stage: int
    """and this one is measured."""
    checkpointed: bool = False
    """Whether all its layers are recomputed in the backward."""

    def __str__(self) -> str:
        again = ", recomputed" if self.checkpointed else ""
        return f"{self.name}, {self.samples} x {self.resolution} px, stage {self.stage + 1} of {self.stages}{again}"


@dataclass(slots=True)
class Stage:
    """The stage with its inputs and gradients of its outputs. Mutable: gradients come and go."""

    module: LayerStage
    parameters: tuple[nn.Parameter, ...]
    inputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    """Of those outputs that have one."""

    def forward(self, deferred: Deferred | None = None) -> list[Tensor]:
        """The outputs that a backward starts from."""
        outputs = self.module(dict(self.inputs), deferred)
        return [outputs[name] for name in self.gradients]

    def forget(self) -> None:
        """Drop the gradients of the inputs; those of the parameters stay and are added to."""
        for tensor in self.inputs.values():
            tensor.grad = None


Op = Callable[[], object]


def whole(stage: Stage) -> tuple[Op, Sequence[Op]]:
    """Forward; B."""
    outputs: list[Tensor] = []
    return lambda: outputs.extend(stage.forward()), [partial(_walk, stage, outputs)]


def split(stage: Stage) -> tuple[Op, Sequence[Op]]:
    """Forward that defers; I, W."""
    outputs: list[Tensor] = []
    deferred = Deferred()
    return lambda: outputs.extend(stage.forward(deferred)), [partial(_walk, stage, outputs), deferred.run]


def _walk(stage: Stage, outputs: list[Tensor]) -> None:
    """The backward as the executor runs it: the outputs themselves are gone by then."""
    edges = [get_gradient_edge(output) for output in outputs]
    outputs.clear()
    run_backward(edges, stage.gradients.values())


def split_by_torch(stage: Stage) -> tuple[Op, Sequence[Op]]:
    """Forward; I and W of torch.distributed.pipelining, whose first stage leaves everything to W."""
    outputs: list[Tensor] = []
    groups: list[list[dict[str, object]]] = []
    inputs = [tensor for tensor in stage.inputs.values() if tensor.requires_grad]
    if not inputs:
        return lambda: outputs.extend(stage.forward()), [_nothing, partial(_walk, stage, outputs)]

    def input_gradients() -> None:
        given = list(stage.gradients.values())
        groups.append(stage_backward_input(outputs, given, inputs, iter(stage.parameters))[1])
        outputs.clear()

    return lambda: outputs.extend(stage.forward()), [
        input_gradients,
        lambda: stage_backward_weight(iter(stage.parameters), groups.pop()),
    ]


def _nothing() -> None:
    pass


WAYS = {"whole": whole, "split": split, "torch": split_by_torch}


def build(case: Case) -> Stage:
    """Only this stage's weights are made."""
    graph = configured_graph(case.name, resolution=case.resolution)
    model = describe(graph)
    layout = Layout(batch=case.samples, stages=case.stages, microbatches=1)
    plan = build_plan(model, layout)
    names = plan.blocks[case.stage]
    materialize(graph, names, dict.fromkeys(graph.components), device="cpu", dtype=torch.float32, seed=0)
    return stage_in(graph, model, names, samples=case.samples, checkpointed=case.checkpointed)


def stage_in(
    graph: LayerGraph, model: ModelGraph, names: Sequence[str], *, samples: int, checkpointed: bool = False
) -> Stage:
    """These layers of a model, whose weights must be there, as a stage on random inputs."""
    layers = [layer for layer in graph.layers if layer.name in names]
    read = {name for layer in graph.layers if layer.name not in names for name in layer.reads} | {
        backbone.loss for backbone in graph.backbones
    }
    outputs = [name for layer in layers for name in layer.writes if name in read]
    module = LayerStage(layers, graph.components, outputs=outputs, checkpointed=names if checkpointed else ())
    inputs = {name: _random(model.tensor(name), samples) for name in module.reads}
    wanted = [name for name in outputs if model.tensor(name).needs_gradient]
    return _stage(module, tuple(layer_parameters(graph, names).values()), inputs, wanted)


def stage_of(module: nn.Module, shape: tuple[int, ...]) -> Stage:
    """One module as a stage, on an input of that shape."""
    layer = Layer(name="all", component="model", reads=("x",), writes=("y",), modules=("",), run=lambda m, x: (m(x),))
    inputs = {"x": torch.randn(shape, requires_grad=True)}
    stage = LayerStage([layer], {"model": module}, outputs=("y",))
    return _stage(stage, tuple(module.parameters()), inputs, ["y"])


def _stage(
    module: LayerStage, parameters: tuple[nn.Parameter, ...], inputs: dict[str, Tensor], wanted: Sequence[str]
) -> Stage:
    with torch.no_grad():
        found = module(dict(inputs))
    return Stage(
        module=module,
        parameters=tuple(parameter for parameter in parameters if parameter.requires_grad),
        inputs=inputs,
        gradients={name: torch.randn_like(found[name]) for name in wanted},
    )


def _random(spec: TensorSpec, samples: int) -> Tensor:
    shape, dtype = (samples, *spec.shape), getattr(torch, spec.dtype)
    if not dtype.is_floating_point:
        return torch.randint(2, shape, dtype=dtype)
    tensor = torch.randn(shape, dtype=dtype) if spec.shape else torch.rand(shape, dtype=dtype)
    return tensor.requires_grad_(spec.needs_gradient)
