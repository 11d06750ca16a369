"""The factor of clipping beside torch's clip_grad_norm_, on one rank and on parameters that are split over ranks."""

import copy

import pytest
import torch
from torch import nn

from diffusionpipe.runtime.weights.squares import sum_of_squares
from diffusionpipe.trainer.optim.gradient_norm import clip_alone, clip_factor, scale


def gradients_of(parameters):
    return [parameter.grad for parameter in parameters]


def squares_of(parameters):
    return sum_of_squares(gradients_of(parameters), torch.device("cpu"))


def clip(parameters, norm, max_norm):
    scale(gradients_of(parameters), clip_factor(norm, max_norm))


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
    norm = clip_alone(ours, max_norm)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(norm.to(dtype), expected, rtol=tolerance, atol=0)
    for parameter, copied in zip(ours, theirs, strict=True):
        torch.testing.assert_close(parameter.grad, copied.grad, rtol=tolerance, atol=0)


def test_parameters_split_over_ranks_are_clipped_as_on_one():
    whole, split = parameters_with_gradients(torch.float64), parameters_with_gradients(torch.float64)
    expected = squares_of(whole).sqrt()
    parts = (split[:1], split[1:])
    norm = sum(squares_of(part) for part in parts).sqrt()
    torch.testing.assert_close(norm, expected, rtol=1e-15, atol=0)
    clip(whole, expected, 1.0)
    for part in parts:
        clip(part, norm, 1.0)
    for one, other in zip(whole, split, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-15, atol=0)


def test_bfloat16_gradients_are_measured_in_float32():
    parameter = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.01)
    exact = parameter.grad.double().norm()
    norm = squares_of([parameter]).sqrt()
    clip([parameter], norm, 1e-3)
    torch.testing.assert_close(norm, exact, rtol=1e-6, atol=0)
    assert parameter.grad.dtype == torch.bfloat16
    torch.testing.assert_close(parameter.grad.double().norm().item(), 1e-3, rtol=1e-2, atol=0)


def test_without_a_maximum_gradients_keep_their_bits():
    parameters = parameters_with_gradients()
    before = [gradient.clone() for gradient in gradients_of(parameters)]
    assert clip_alone(parameters, None) > 0
    assert all(map(torch.equal, gradients_of(parameters), before))


def test_a_rank_without_gradients_adds_zero():
    assert clip_alone([], 1.0) == 0.0
    assert clip_alone([nn.Parameter(torch.zeros(2))], 1.0) == 0.0


def test_a_norm_that_is_not_finite_is_seen():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, float("nan")])
    assert torch.isnan(clip_alone([parameter], 1.0))
