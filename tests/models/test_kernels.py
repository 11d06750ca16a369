"""Kernels of bitsandbytes widen as we do, and a library that is missing, old, broken or wrong is not used."""

import logging
from types import SimpleNamespace

import pytest
import torch

from diffusionpipe.costs.forms import Form
from diffusionpipe.models.parameters.forms import encode, parts_for_kernels, wide, widened_by_torch
from diffusionpipe.models.parameters.kernels import chosen, kernel_of, kernel_on, operators, suits

SHAPE = (96, 384)


def _stand_in(four_bits, by_blocks):
    return SimpleNamespace(dequantize_4bit=four_bits, dequantize_blockwise=by_blocks)


def _four_bits(numbers, absmax, blocksize, quant_type, shape, dtype):
    """As bitsandbytes documents it, by its own table of values."""
    assert quant_type == "nf4"
    listed = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0]
    listed += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
    flat = numbers.view(-1)
    values = torch.tensor(listed)[torch.stack([flat >> 4, flat & 15], 1).view(-1).int()]
    return (values.view(-1, blocksize) * absmax[:, None]).view(shape).to(dtype)


def _by_blocks(numbers, absmax, code, blocksize, dtype):
    return (code[numbers.view(-1, blocksize).int()] * absmax[:, None]).view(numbers.shape).to(dtype)


def _fails(*_, **__):
    raise RuntimeError("no kernel image\nis available")


def test_a_library_whose_kernels_agree_is_used(caplog):
    caplog.set_level(logging.INFO)
    kernel = chosen("cpu", lambda name: _stand_in(_four_bits, _by_blocks))
    assert kernel is not None
    assert "widening=bitsandbytes" in caplog.text
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    for form in Form:
        codes, scales = encode(form, weight)
        found = kernel(*parts_for_kernels(codes, scales, form, SHAPE), form, SHAPE, torch.float32)
        torch.testing.assert_close(found, widened_by_torch(codes, scales, form, SHAPE, torch.float32))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (_stand_in(_fails, _by_blocks), "cannot widen nf4 here: no kernel image"),
        (_stand_in(_four_bits, lambda numbers, *_: torch.ones(numbers.shape)), "widens float8 to other numbers"),
        (SimpleNamespace(), "has another version than is known"),
    ],
    ids=["fails", "wrong", "old"],
)
def test_a_library_that_fails_the_trial_is_not_used_and_a_warning_says_why(module, reason, caplog):
    assert chosen("cpu", lambda name: module) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert reason in record.getMessage()


def test_without_the_library_torch_widens(caplog):
    caplog.set_level(logging.INFO)

    def missing(name):
        raise ModuleNotFoundError(name)

    assert chosen("cpu", missing) is None
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert "bitsandbytes is not installed" in caplog.text


def test_on_a_cpu_no_library_is_asked_and_matrices_with_cut_blocks_are_left_to_torch():
    assert kernel_on("cpu") is None
    assert [suits(form, 300) for form in Form] == [False, False, True]


@pytest.mark.parametrize("form", Form)
def test_bitsandbytes_itself_widens_within_one_code_of_ours(form):
    """On a CPU, where its kernels run too."""
    pytest.importorskip("bitsandbytes")
    kernel = kernel_of(operators("bitsandbytes"))
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
    codes, scales = encode(form, weight)
    found = kernel(*parts_for_kernels(codes, scales, form, SHAPE), form, SHAPE, torch.float32)
    expected = widened_by_torch(codes, scales, form, SHAPE, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("form", Form)
def test_on_a_gpu_a_layer_widens_to_the_numbers_of_the_cpu(form):
    pytest.importorskip("bitsandbytes")
    assert kernel_on("cuda") is not None
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    codes, scales = encode(form, weight)
    expected = wide(form, codes, scales, SHAPE, torch.bfloat16).float()
    on_gpu, scales_on_gpu = encode(form, weight.cuda())
    assert (on_gpu.cpu() != codes).float().mean() < 1e-3
    found = wide(form, codes.cuda(), scales.cuda(), SHAPE, torch.bfloat16).float().cpu()
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)
    assert scales_on_gpu.shape == scales.shape
