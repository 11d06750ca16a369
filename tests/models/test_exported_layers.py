"""Layers of narrow exports compute what their codes and scales say."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from diffusionpipe.models.parameters.exported_layers import ExportedLayer, Width, encoded, input_scale, width_of

LAYERS = {
    "linear": (nn.Linear(200, 7), (3, 5, 200)),
    "without bias": (nn.Linear(130, 5, bias=False), (4, 130)),
    "convolution": (nn.Conv2d(20, 6, 3, stride=2, padding=1), (2, 20, 7, 9)),
    "dilated": (nn.Conv2d(3, 4, (1, 3), padding=(0, 2), dilation=(1, 2), bias=False), (2, 3, 5, 6)),
    "in groups": (nn.Conv2d(8, 8, 3, padding=1, groups=4), (2, 8, 5, 5)),
    "of one dimension": (nn.Conv1d(5, 4, 3), (2, 5, 9)),
    "of three": (nn.Conv3d(3, 4, (1, 2, 2), stride=(1, 2, 2)), (2, 3, 2, 4, 4)),
}


def rows_in_blocks(weight, largest):
    """(whole numbers, scales) of a matrix by hand: the nearest multiple of a block's 127th part."""
    matrix = weight.detach().flatten(1).double().numpy()
    codes, scales = np.zeros_like(matrix), []
    for start in range(0, matrix.shape[1], 128):
        block = matrix[:, start : start + 128]
        scale = np.abs(block).max(1, keepdims=True).astype(np.float32).astype(np.float64) / largest
        scales.append(np.repeat(scale, block.shape[1], 1))
        codes[:, start : start + 128] = np.rint(block / scales[-1])
    return codes, np.concatenate(scales, 1)


def by_torch(layer, x, weight):
    """The layer's result with another weight, by torch's own function."""
    bias = None if layer.bias is None else layer.bias.detach().to(weight.dtype)
    if isinstance(layer, nn.Linear):
        return functional.linear(x, weight, bias)
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[weight.ndim - 3]
    return function(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)


def exported(layer, width, largest=None):
    found = ExportedLayer(layer, width)
    for name, value in encoded(layer.weight, width).items():
        getattr(found, name).data = value
    if width.rounds_inputs:
        found.input_scale.data = input_scale(largest)
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_8_bits_multiplies_the_nearest_of_255_steps_of_each_block(name):
    layer, shape = LAYERS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    codes, scales = rows_in_blocks(layer.weight, 127)
    weight = torch.from_numpy(codes * scales).view(layer.weight.shape)
    with torch.no_grad():
        torch.testing.assert_close(exported(layer, Width.W8)(x), by_torch(layer, x, weight), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", LAYERS)
def test_rounded_inputs_are_whole_multiples_of_the_layers_own_scale(name):
    layer, shape = LAYERS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 2
    codes, scales = rows_in_blocks(layer.weight, 127)
    scale = float(np.float32(3.0) / np.float32(127))
    rounded = torch.from_numpy(np.clip(np.rint((x / np.float32(scale)).numpy()), -127, 127)).double() * scale
    weight = torch.from_numpy(codes * scales).view(layer.weight.shape)
    with torch.no_grad():
        found, expected = exported(layer, Width.W8A8, 3.0)(x), by_torch(layer, rounded, weight)
    assert float((x.abs() > 3).sum()) > 0  # some inputs lie beyond what was seen
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-5)


def test_a_result_does_not_depend_on_the_other_samples():
    layer, shape = LAYERS["convolution"]
    x = torch.randn(4, *shape[1:])
    with torch.no_grad():
        narrow = exported(layer, Width.W8A8, 2.0)
        assert torch.equal(narrow(x)[1:3], narrow(x[1:3]))


def test_a_layer_that_was_never_fed_gives_its_bias():
    layer, shape = LAYERS["linear"]
    with torch.no_grad():
        found = exported(layer, Width.W8A8, 0.0)(torch.zeros(shape))
    torch.testing.assert_close(found, layer.bias.expand_as(found))


def test_bfloat16_is_the_dtype_of_autocast():
    layer, shape = LAYERS["convolution"]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for width in Width:
            assert exported(layer, width, 2.0)(torch.randn(shape)).dtype is torch.bfloat16


def test_a_width_of_a_later_version_is_refused_by_name(tmp_path):
    from diffusionpipe.errors import ModelError

    config = {"quantization_config": {"quant_method": "diffusionpipe", "width": "w2"}}
    with pytest.raises(ModelError, match="of the width 'w2'; known: w8, w8a8, w4"):
        width_of(config, tmp_path / "config.json")
    assert width_of({"quantization_config": {"quant_method": "bitsandbytes"}}, tmp_path) is None
