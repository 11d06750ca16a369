"""Random weights in the place of weights that are elsewhere, of every type that a layer can have."""

import pytest
import torch
from torch import nn

from diffusionpipe.models.graphs.graph import Layer, LayerGraph
from diffusionpipe.profiler.substitution import weights_on

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int8)


@pytest.mark.parametrize("shape", [(6, 4), (8,)])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_weights_of_each_type_that_are_not_on_the_device_are_there_meanwhile(dtype, shape):
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
    component = nn.ModuleDict({"0": module})
    layer = Layer(
        name="0", component="encoder", reads=("x",), writes=("y",), modules=("0",), run=lambda component, x: (x,)
    )
    graph = LayerGraph(components={"encoder": component}, layers=(layer,), inputs=())
    with weights_on(graph, layer, torch.device("cpu")):
        within = module.weight
        assert (within.dtype, within.shape, within.device.type) == (dtype, torch.Size(shape), "cpu")
        assert within.float().isfinite().all()
        assert len(shape) == 1 or within.float().unique().numel() > 1
    assert module.weight.device.type == "meta"
