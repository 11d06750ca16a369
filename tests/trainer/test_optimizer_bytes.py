"""The bytes of an optimizer that a plan counts are those that torch holds."""

import pytest
import torch
from kit.held_states import held_by
from torch import nn

from diffusionpipe.costs import ModelGraph, ParameterSpec
from diffusionpipe.errors import RecipeError
from diffusionpipe.holding import Ledger, Workload
from diffusionpipe.trainer.model.optimizer_states import stated_states, with_optimizer
from diffusionpipe.trainer.optim.optimizer import build_optimizer
from diffusionpipe.trainer.optim.trial import kept_bytes

SHAPES = {"a": (10,), "b": (4095,), "c": (64, 64), "d": (1000, 1000), "e": (64, 64)}
CLASSES = (
    "bitsandbytes.optim.AdamW8bit",
    "bitsandbytes.optim.Lion8bit",
    "bitsandbytes.optim.PagedAdamW8bit",
    "pytorch_optimizer.Lion",
    "pytorch_optimizer.CAME",
    "pytorch_optimizer.Adan",
    "pytorch_optimizer.SOAP",
    "pytorch_optimizer.AdaFactor",
    "Adafactor",
    "prodigyopt.Prodigy",
    "schedulefree.AdamWScheduleFree",
)
QUICK = ("Adafactor", "pytorch_optimizer.SOAP")
ALL = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CLASSES]


def step_thrice(name, shapes):
    generator = torch.Generator().manual_seed(0)
    parameters = {key: nn.Parameter(torch.randn(shape, generator=generator)) for key, shape in shapes.items()}
    optimizer = build_optimizer(name, parameters, 1e-3, {})
    for _ in range(3):
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", ALL)
def test_the_ledger_has_the_bytes_that_torch_holds_after_three_steps(name):
    shapes = {key: shape for key, shape in SHAPES.items() if not (name.endswith("SOAP") and key == "d")}
    specs = (ParameterSpec(name=key, shape=shape, dtype="float32", is_trainable=True) for key, shape in shapes.items())
    graph = ModelGraph(layers=(), parameters=tuple(specs), tensors=(), inputs=())
    state, once = stated_states(name, {}, graph, is_wide=False)
    workload = Workload(batch=1, states=with_optimizer(state, Workload(batch=1).states), once=once)
    assert Ledger(graph=graph, workload=workload).held(shapes.keys()).optimizer == held_by(step_thrice(name, shapes))


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("shape", [(50_000,), (1600, 320, 3, 3), (2560, 2048)])
def test_large_parameters_are_counted_by_the_rule_of_smaller_ones(name, shape):
    if name.endswith("SOAP") and len(shape) > 1:
        pytest.skip("its steps take minutes there")
    kept = kept_bytes(name, {}, [shape])
    assert kept.by_shape[shape] + kept.shared == held_by(step_thrice(name, {"own": shape}))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "pytorch_optimizer.Shampoo",
            (4095,),
            "would keep 134,168,580 bytes for one parameter of shape",
        ),
        ("pytorch_optimizer.SOAP", (9000, 9000), "matrices over the sides of a parameter; one of 9,000 is too long"),
        ("pytorch_optimizer.ScalableShampoo", (8, 8), "keeps an object of the class"),
        ("pytorch_optimizer.SAM", (8, 8), "evaluates the loss of the batch twice"),
    ],
)
def test_states_that_cannot_be_counted_or_held_are_refused(name, shape, message):
    with pytest.raises(RecipeError, match=message):
        kept_bytes(name, {}, [shape])
