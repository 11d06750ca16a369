import copy

import pytest
import torch
from torch import nn

from diffusionpipe.trainer.optim.gradient_norm import global_norm_clip


def alone(total):
    return total


def parameters_with_gradients(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((3, 4), (5,), (2, 2, 2))]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return parameters


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_one_rank_clips_as_torch_does(max_norm, dtype, tolerance):
    ours = parameters_with_gradients(dtype)
    theirs = copy.deepcopy(ours)
    for copied, parameter in zip(theirs, ours, strict=True):
        copied.grad = parameter.grad.clone()
    norm = global_norm_clip(ours, max_norm, alone)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(norm.to(dtype), expected, rtol=tolerance, atol=0)
    for parameter, copied in zip(ours, theirs, strict=True):
        torch.testing.assert_close(parameter.grad, copied.grad, rtol=tolerance, atol=0)


def test_parameters_split_over_ranks_are_clipped_as_on_one():
    whole, split = parameters_with_gradients(torch.float64), parameters_with_gradients(torch.float64)
    expected = global_norm_clip(whole, 1.0, alone)
    squares = []
    global_norm_clip(split[:1], None, lambda total: squares.append(total) or total)
    global_norm_clip(split[1:], None, lambda total: squares.append(total) or total)
    for part in (split[:1], split[1:]):
        norm = global_norm_clip(part, 1.0, lambda _: squares[0] + squares[1])
        torch.testing.assert_close(norm, expected, rtol=1e-15, atol=0)
    for one, other in zip(whole, split, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-15, atol=0)


def test_a_replica_that_does_not_own_its_parameters_counts_nothing_but_scales_them():
    owner, replica = parameters_with_gradients(), parameters_with_gradients()
    sums = []
    global_norm_clip(owner, 1.0, lambda total: sums.append(total) or total)
    global_norm_clip(replica, 1.0, lambda total: total + sums[0], owned=[])
    for one, other in zip(owner, replica, strict=True):
        assert torch.equal(one.grad, other.grad)


def test_without_a_maximum_gradients_keep_their_bits():
    parameters = parameters_with_gradients()
    before = [parameter.grad.clone() for parameter in parameters]
    assert global_norm_clip(parameters, None, alone) > 0
    assert all(torch.equal(parameter.grad, kept) for parameter, kept in zip(parameters, before, strict=True))


def test_bfloat16_gradients_are_measured_in_float32():
    parameter = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.01)
    exact = parameter.grad.double().norm()
    torch.testing.assert_close(global_norm_clip([parameter], 1e-3, alone), exact, rtol=1e-6, atol=0)
    assert parameter.grad.dtype == torch.bfloat16
    torch.testing.assert_close(parameter.grad.double().norm().item(), 1e-3, rtol=1e-2, atol=0)


def test_a_rank_without_parameters_adds_zero_and_a_missing_gradient_is_left_out():
    assert global_norm_clip([], 1.0, lambda total: total + 4.0) == 2.0
    assert global_norm_clip([nn.Parameter(torch.zeros(2))], 1.0, alone) == 0.0


def test_a_norm_that_is_not_finite_is_returned():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, float("nan")])
    assert torch.isnan(global_norm_clip([parameter], 1.0, alone))
