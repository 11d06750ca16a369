"""Any nn.Sequential as a layer graph: the smallest adapter."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from diffusionpipe.costs import TensorSpec
from diffusionpipe.models.graph import Layer, LayerGraph


def sequential_graph(
    module: nn.Sequential,
    *,
    inputs: TensorSpec | tuple[int, ...],
    target: TensorSpec | tuple[int, ...],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> LayerGraph:
    """The children of `module` as layers, and `loss(prediction, target)`, which gives one loss a sample, shape (B,).

    The raw inputs have the names "input" and "target" (a shape stands for float32), the component is "model", its
    layers "model.0", "model.1", ..., the tensors between them "hidden.0", ..., and the last layer "objective.loss".
    """
    writes = [f"hidden.{index}" for index in range(len(module) - 1)] + ["prediction"]
    layers = [
        Layer(
            name=f"model.{name}",
            component="model",
            reads=(read,),
            writes=(write,),
            modules=(name,),
            run=partial(_run_child, name),
        )
        for name, read, write in zip(module._modules, ["input", *writes], writes, strict=False)
    ]
    objective = Layer(
        name="objective.loss",
        component="objective",
        reads=("prediction", "target"),
        writes=("loss",),
        run=partial(_run_loss, loss),
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


def _run_child(name: str, module: nn.Module, hidden: Tensor) -> tuple[Tensor, ...]:
    return (getattr(module, name)(hidden),)


def _run_loss(
    loss: Callable[[Tensor, Tensor], Tensor], _: nn.Module, prediction: Tensor, target: Tensor
) -> tuple[Tensor, ...]:
    return (loss(prediction, target),)
