import re

import pytest
import torch
from torch import nn

from diffusionpipe.errors import CheckpointError, RecipeError
from diffusionpipe.holding.rest import RESTS
from diffusionpipe.runtime.machine.buffers import num_in_memory_of
from diffusionpipe.trainer.optim.optimizer import (
    Group,
    build_optimizer,
    empty_optimizer_tensors,
    optimizer_tensors,
    problem_of_shapes,
    problem_of_step,
    restore_optimizer,
    set_learning_rates,
    state_per_parameter,
)


def named(dtype=torch.float32):
    torch.manual_seed(0)
    return {
        "unet.conv.weight": nn.Parameter(torch.randn(4, 3, 2, 2, dtype=dtype)),
        "unet.linear.weight": nn.Parameter(torch.randn(5, 4, dtype=dtype)),
        "unet.linear.bias": nn.Parameter(torch.randn(5, dtype=dtype)),
        "unet.scale": nn.Parameter(torch.randn((), dtype=dtype)),
    }


def step(optimizer, parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


def meta(tensors):
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("AdamW", {}),
        ("AdamW", {"foreach": True, "betas": [0.8, 0.99]}),
        ("Adam", {"amsgrad": True}),
        ("SGD", {"momentum": 0.9, "dampening": 0.5}),
        ("SGD", {}),
        ("Adafactor", {}),
        ("Adagrad", {}),
        ("Adadelta", {}),
        ("Adamax", {}),
        ("ASGD", {}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("Rprop", {}),
        ("Muon", {}),
    ],
)
def test_a_restored_optimizer_goes_on_bit_for_bit(name, arguments):
    parameters = {key: p for key, p in named().items() if name != "Muon" or p.ndim == 2}
    optimizer = build_optimizer(name, parameters, 1e-2, arguments)
    for seed in range(3):
        step(optimizer, parameters, seed)

    resumed_parameters = {key: nn.Parameter(parameter.detach().clone()) for key, parameter in parameters.items()}
    resumed = build_optimizer(name, resumed_parameters, 1e-2, arguments)
    saved = {key: tensor.clone() for key, tensor in optimizer_tensors(optimizer, parameters).items()}
    empty = empty_optimizer_tensors(resumed, resumed_parameters, meta(saved))
    assert empty.keys() == saved.keys()
    assert all(torch.equal(resumed_parameters[key], parameters[key]) for key in parameters)
    for key, tensor in empty.items():
        tensor.copy_(saved[key])
    restore_optimizer(resumed, resumed_parameters, empty)

    for seed in range(3, 6):
        step(optimizer, parameters, seed)
        step(resumed, resumed_parameters, seed)
    assert all(torch.equal(resumed_parameters[key], parameters[key]) for key in parameters)


@pytest.mark.parametrize("rest", [RESTS["device"], RESTS["host"]], ids=["plain", "host"])
def test_after_a_step_gradients_are_held_by_their_parameters_alone(rest):
    parameters = {key: p for key, p in named().items() if p.ndim > 1}
    optimizer = build_optimizer("Muon", parameters, 1e-2, {}, lambda _: Group(is_flat=True))
    optimizer.rest(rest)
    step(optimizer, parameters, 0)
    assert {key: num_in_memory_of(p.grad) for key, p in parameters.items()} == dict.fromkeys(parameters, 1)


def test_the_state_has_the_parameters_names_and_its_step_counter():
    parameters = named()
    optimizer = build_optimizer("AdamW", parameters, 1e-3, {})
    assert optimizer_tensors(optimizer, parameters) == {}
    step(optimizer, parameters, 0)
    tensors = optimizer_tensors(optimizer, parameters)
    assert {"unet.scale.step", "unet.scale.exp_avg", "unet.scale.exp_avg_sq"} <= tensors.keys()
    assert len(tensors) == 12
    assert tensors["unet.scale.step"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_adamw_is_fused_where_the_device_can_unless_the_recipe_decides(dtype):
    assert build_optimizer("AdamW", named(dtype), 1e-3, {}).defaults["fused"] is True
    assert build_optimizer("AdamW", named(dtype), 1e-3, {"fused": False}).defaults["fused"] is False
    assert not build_optimizer("AdamW", named(dtype), 1e-3, {"foreach": True}).defaults["fused"]


def test_a_device_without_the_fused_kernel_gets_the_plain_one():
    parameters = {"w": nn.Parameter(torch.zeros(2, device="meta"))}
    assert not build_optimizer("AdamW", parameters, 1e-3, {}).defaults["fused"]


def test_the_state_of_another_optimizer_is_refused():
    parameters = named()
    sgd = build_optimizer("SGD", parameters, 1e-3, {"momentum": 0.9})
    step(sgd, parameters, 0)
    adam = build_optimizer("AdamW", parameters, 1e-3, {})
    stored = meta(optimizer_tensors(sgd, parameters))
    with pytest.raises(CheckpointError, match=r"found \['momentum_buffer'\], expected \['exp_avg', 'exp_avg_sq'"):
        empty_optimizer_tensors(adam, parameters, stored)


def test_a_rank_without_parameters_has_no_optimizer_but_still_refuses_wrong_arguments():
    assert build_optimizer("AdamW", {}, 1e-3, {}) is None
    assert optimizer_tensors(None, {}) == {}
    assert empty_optimizer_tensors(None, {}, {}) == {}
    restore_optimizer(None, {}, {})
    set_learning_rates(None, {"": 1.0})
    with pytest.raises(RecipeError, match="betas"):
        build_optimizer("AdamW", {}, 1e-3, {"betas": [0.9, 1.5]})


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("adamw", {}, "did you mean AdamW"),
        ("AdamX", {}, "did you mean Adam"),
        ("zzz", {}, "no optimizer 'zzz'; a class of another package .*SGD"),
        ("LBFGS", {}, "several times"),
        ("SparseAdam", {}, "sparse"),
        ("AdamW", {"weight_decya": 0.1}, "weight_decya is unknown; did you mean weight_decay"),
        ("AdamW", {"lr": 0.1}, "learning rate"),
        ("AdamW", {"betas": [2.0, 0.9]}, "Invalid beta"),
        ("AdamW", {"betas": [0.9]}, r"betas=\[0\.9\]"),
        ("AdamW", {"eps": "small"}, "eps='small'"),
        ("SGD", {"nesterov": True}, "Nesterov"),
        ("Muon", {}, "2D"),
    ],
)
def test_wrong_names_and_arguments_are_named(name, arguments, message):
    with pytest.raises(RecipeError, match=message):
        build_optimizer(name, named(), 1e-3, arguments)


def test_the_learning_rate_of_the_next_update_can_be_set():
    parameters = named()
    optimizer = build_optimizer("SGD", parameters, 1.0, {})
    before = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    set_learning_rates(optimizer, {"": 0.0})
    step(optimizer, parameters, 0)
    assert all(torch.equal(parameters[key], before[key]) for key in parameters)


SHAPES = {"unet.conv.weight": (8, 4, 3, 3), "unet.conv.bias": (8,), "unet.proj.weight": (4, 8)}


def test_an_optimizer_that_cannot_train_some_parameters_names_one_of_them():
    problem = problem_of_shapes("Muon", SHAPES, 1e-3, {})
    assert problem is not None
    assert problem.startswith("Muon cannot train 2 of the 3 trained parameters, e.g. unet.conv.weight of shape (8, 4,")
    assert "AdamW" in problem


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("AdamW", {}, None),
        ("Muon", {}, None),
        (
            "AdamW",
            {"capturable": True},
            r"AdamW cannot step on cpu with these \(capturable=True\), so change them: .*supported devices",
        ),
        (
            "SGD",
            {"differentiable": True},
            r"SGD cannot step on cpu with these \(differentiable=True\), so change them: a leaf",
        ),
    ],
)
def test_arguments_that_the_device_cannot_have_are_found_by_a_step(name, arguments, problem):
    found = problem_of_step(name, 2, arguments, "cpu")
    assert (found is None) if problem is None else re.match(problem, found)


def test_what_only_another_device_can_do_does_not_hide_the_size_of_the_state():
    assert state_per_parameter("AdamW", {"capturable": True}) == state_per_parameter("AdamW", {}) == 2


def test_an_optimizer_that_takes_all_shapes_has_no_problem():
    assert problem_of_shapes("AdamW", SHAPES, 1e-3, {"betas": [0.9, 0.99]}) is None
    assert problem_of_shapes("Muon", {"unet.proj.weight": (4, 8)}, 1e-3, {}) is None
