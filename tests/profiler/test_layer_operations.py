"""Operations of layers: computed ones add up to the profile, measured ones name a planted slow one."""

import time
from dataclasses import replace

import pytest
from kit.descriptions import described
from kit.tiny_models import tiny_dit, tiny_stable_diffusion

from diffusionpipe.costs.operations import OUTSIDE, holding
from diffusionpipe.profiler import analytic_profile
from diffusionpipe.profiler.layer_operations import computed_operations, measured_operations

GRAPHS = {"dit": tiny_dit, "stable diffusion": tiny_stable_diffusion}


@pytest.mark.parametrize(
    ("name", "device"),
    [("dit", "a100-80"), pytest.param("stable diffusion", "rtx4090", marks=pytest.mark.slow)],
)
def test_computed_operations_add_up_to_the_layers_of_the_computed_profile(name, device):
    graph = GRAPHS[name]()
    model = described(graph)
    profile = analytic_profile(graph, model, device=device, batch_sizes=(4,))
    report = computed_operations(graph, model, device=device, precision="float32", samples=4)
    for layer in profile.layers:
        whole = layer.forward[0] + layer.input_grad[0] + layer.weight_grad[0]
        assert report.of_layer(layer.name) == pytest.approx(whole, rel=1e-9)
    assert report.seconds == pytest.approx(sum(report.of_layer(layer.name) for layer in profile.layers))
    assert all(use.share <= 1 for use in report.uses)


@pytest.fixture
def slow():
    """A DiT of which one layer sleeps in its forward, and the name of that layer."""
    graph = tiny_dit()
    number = next(i for i, layer in enumerate(graph.layers) if layer.name.endswith("blocks.1"))
    layer = graph.layers[number]

    def sleeping(*arguments):
        time.sleep(0.2)
        return layer.run(*arguments)

    return replace(graph, layers=(*graph.layers[:number], replace(layer, run=sleeping), *graph.layers[number + 1 :]))


@pytest.mark.usefixtures("one_thread")
def test_a_planted_sleep_is_named_first(slow):
    model = described(tiny_dit())
    report = measured_operations(slow, model, device="cpu", precision="float64", samples=2, repeats=2)
    first = holding(report.uses)[0]
    assert (first.layer, first.name, first.is_backward) == ("transformer.transformer_blocks.1", OUTSIDE, False)
    assert {use.layer for use in report.uses} == {layer.name for layer in slow.layers}
    assert any(use.is_backward and use.name == "mm" for use in report.uses)
    assert not any(use.is_backward for use in report.uses if use.layer.startswith("vae."))
