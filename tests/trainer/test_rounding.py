"""Weights in bfloat16: updates are rounded without a bias, alike wherever a number of a step is rounded."""

import numpy as np
import pytest
import torch
from torch import nn

from diffusionpipe.trainer.optim.optimizer import Group, build_optimizer
from diffusionpipe.trainer.optim.rounding import NARROW, Rounding, key_of, rounded

STOCHASTIC, KAHAN = Rounding(seed=3), Rounding(seed=3, is_kahan=True)
TIMES = 10_000


def neighbours(value):
    """The two bfloat16 numbers around a float32 one, by its bits."""
    below = np.float32(value).view(np.uint32) & np.uint32(0xFFFF0000)
    return float(below.view(np.float32)), float((below + np.uint32(0x10000)).view(np.float32))


@pytest.mark.parametrize(
    ("value", "varied"),
    [(value, "element") for value in (1.0 + 2**-10, -0.7071068, 1e-30, 12345.678, 1.0 + 2**-7 - 2**-20)]
    + [(3.14159274, "step")],
)
def test_the_mean_of_ten_thousand_roundings_is_the_number(value, varied):
    number = torch.tensor([value], dtype=torch.float32)
    if varied == "element":
        found = rounded(number.expand(TIMES).contiguous(), key_of(0, "unet.weight", 5))
    else:
        found = torch.cat([rounded(number, key_of(0, "unet.weight", step)) for step in range(TIMES)])
    low, high = neighbours(value)
    assert set(found.tolist()) == {low, high}
    share = (float(number) - low) / (high - low)
    sigma = abs(high - low) * (share * (1 - share) / TIMES) ** 0.5
    assert abs(found.double().mean().item() - float(number)) < 3 * sigma


def test_numbers_of_bfloat16_and_those_that_are_not_finite_stay():
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**127, float("inf"), -float("inf")])
    assert rounded(exact, (1, 2)).equal(exact.to(NARROW))
    worst = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert rounded(worst, (1, 2)).isnan().all()


def test_a_number_is_rounded_by_its_place_seed_name_and_step_and_by_nothing_else():
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    key = key_of(1, "a", 2)
    whole = rounded(values, key)
    assert whole.equal(torch.cat([rounded(values[:1234], key), rounded(values[1234:], key, 1234)]))
    for other in (key_of(2, "a", 2), key_of(1, "b", 2), key_of(1, "a", 3)):
        assert not whole.equal(rounded(values, other))


def stepped(how, steps, *, size=TIMES, name="SGD", **arguments):
    """Ones in bfloat16 after steps with a gradient of 1, and their optimizer."""
    parameter = nn.Parameter(torch.ones(size, dtype=NARROW))
    optimizer = build_optimizer(name, {"own": parameter}, 1e-4, arguments, rounding=how)
    for step in range(steps):
        parameter.grad = torch.ones(size, dtype=NARROW)
        optimizer.step(step)
    return parameter.detach(), optimizer, parameter


def test_updates_that_are_smaller_than_a_last_digit_add_up():
    steps = 40
    away = 1 - steps * 1e-4
    below = 2**-8  # to the next number
    stochastic, _, _ = stepped(STOCHASTIC, steps)
    sigma = below * (away * steps * 1e-4 / below / TIMES) ** 0.5  # of a walk with that many steps down
    assert abs(stochastic.double().mean().item() - away) < 3 * sigma
    _, optimizer, parameter = stepped(KAHAN, steps, size=8)
    both = parameter.detach().double() + optimizer.state_of(parameter)["rounding_error"].double()
    assert torch.allclose(both, torch.full_like(both, away), rtol=0, atol=steps * 2**-18)
    assert torch.ones(8, dtype=NARROW).sub_(1e-4).equal(torch.ones(8, dtype=NARROW))  # which is why


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_an_update_is_the_optimizers_own_in_float32_before_it_is_rounded(name):
    torch.manual_seed(0)
    start, gradients = torch.randn(6, 4, 3, 3).to(NARROW), [torch.randn(6, 4, 3, 3) for _ in range(3)]
    narrow = nn.Parameter(start.clone())
    narrow.grad_dtype = torch.float32
    group = Group("", is_flat=name == "Muon")
    optimizer = build_optimizer(name, {"own": narrow}, 1e-2, {}, lambda _: group, KAHAN)
    wide = nn.Parameter(start.float().flatten(1) if name == "Muon" else start.float())
    own = {"Muon": torch.optim.Muon, "AdamW": torch.optim.AdamW}[name]([wide], lr=1e-2)
    for step, gradient in enumerate(gradients):
        narrow.grad, wide.grad = gradient.clone(), gradient.reshape(wide.shape).clone()
        optimizer.step(step)
        own.step()
    found = narrow.detach().float() + optimizer.state_of(narrow)["rounding_error"].float()
    assert torch.allclose(found.view_as(wide), wide.detach(), rtol=2**-15, atol=1e-6)
    assert all(p.nbytes == p.numel() * 4 and p.untyped_storage().nbytes() == 4 for p in optimizer.parts[0].state)
