import logging
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.descriptions import described
from kit.tiny_models import tiny_dit, tiny_stable_diffusion
from torch import nn

from diffusionpipe.costs.files import profile_from_text, profile_to_text
from diffusionpipe.errors import ConfigError
from diffusionpipe.models.graphs.graph import layer_parameters
from diffusionpipe.profiler import inputs, measured
from diffusionpipe.profiler.analytic import analytic_profile
from diffusionpipe.profiler.clock import spread
from diffusionpipe.profiler.layer_run import split_backward
from diffusionpipe.profiler.measured import device_name, profile_model

times = st.floats(1e-6, 1.0)


def to_meta(graph):
    """The graph with its parameters on the meta device, as a folder is opened."""
    for component in graph.components.values():
        for module in component.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                    module._parameters[name] = meta
    return graph


@pytest.fixture(scope="module", params=[tiny_stable_diffusion, tiny_dit], ids=["stable diffusion", "dit"])
def profiled(request):
    graph = to_meta(request.param(torch.float32))
    model = described(graph)
    return graph, profile_model(graph, model, batch_sizes=(3, 1), repeats=1)


def test_a_measured_profile_passes_the_checks_of_reading(profiled):
    _, profile = profiled
    assert profile.batch_sizes == (1, 3)
    assert profile_from_text(profile_to_text(profile)) == profile


def test_frozen_layers_have_a_forward_only(profiled):
    graph, profile = profiled
    for name in described(graph).frozen_layers:
        layer = profile.layer(name)
        assert min(layer.forward) > 0
        assert {*layer.input_grad, *layer.weight_grad, *layer.activation} == {0}


def test_only_layers_that_training_probes_are_measured_without_gradients(profiled):
    """The same model, as if it were conditioned on its own estimates."""
    graph, plain = profiled
    model = replace(plain.graph, backbones=(replace(plain.graph.backbones[0], self_conditioning=0.5),))
    profile = profile_model(graph, model, batch_sizes=(1, 2), repeats=1)
    probed = set(model.backbone_layers)
    assert {len(layer.forward_only) for layer in profile.layers if layer.name in probed} == {2}
    assert {layer.forward_only for layer in profile.layers if layer.name not in probed} == {()}
    assert {layer.forward_only for layer in plain.layers} == {()}
    assert profile_from_text(profile_to_text(profile)) == profile


def test_trained_layers_keep_bytes_in_proportion_to_the_batch(profiled):
    graph, profile = profiled
    kept = [profile.layer(name).activation for name in described(graph).backbone_layers]
    assert all(three == 3 * one > 0 for one, three in kept)


def test_the_file_says_where_and_with_what_it_was_measured(profiled):
    _, profile = profiled
    assert (profile.device, profile.device_type) == (device_name(torch.device("cpu")), "cpu")
    assert (profile.source, profile.precision) == ("measured", "float32")
    assert dict(profile.versions)["torch"] == torch.__version__


def test_profiling_leaves_the_model_as_it_was(profiled):
    graph, _ = profiled
    parameters = layer_parameters(graph, [layer.name for layer in graph.layers])
    assert all(parameter.is_meta and parameter.grad is None for parameter in parameters.values())


def test_frozen_parameters_inside_the_backbone_have_no_weight_gradient():
    graph = tiny_dit(torch.float32)
    for parameter in graph.components["transformer"].transformer_blocks[1].parameters():
        parameter.requires_grad_(False)
    layer = profile_model(graph, described(graph), batch_sizes=(1,), repeats=1).layer(
        "transformer.transformer_blocks.1"
    )
    assert layer.weight_grad == (0.0,)
    assert layer.input_grad[0] > 0


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float64, "float64"), (torch.float32, "bfloat16")])
def test_other_precisions_are_measured_in_their_own_bytes(dtype, precision):
    graph = tiny_dit(dtype)
    model = described(graph, autocast=torch.bfloat16 if precision == "bfloat16" else None)
    profile = profile_model(graph, model, batch_sizes=(2,), precision=precision, repeats=1)
    single = tiny_dit(torch.float32)
    plain = profile_model(single, described(single), batch_sizes=(2,), repeats=1)
    name = "transformer.transformer_blocks.1"
    assert profile.precision == precision
    if precision == "float64":
        assert profile.layer(name).activation[0] > 1.9 * plain.layer(name).activation[0]
    else:
        assert profile.layer(name).activation != plain.layer(name).activation


def test_casts_are_measured_and_their_copies_are_those_that_are_counted():
    graph = tiny_dit(torch.float32)
    model = described(graph, autocast=torch.bfloat16)
    profile = profile_model(graph, model, batch_sizes=(1, 2), precision="bfloat16", repeats=1)
    counted = analytic_profile(graph, model, device="cpu-1-thread", precision="bfloat16", batch_sizes=(1, 2))
    for layer, other in zip(profile.layers, counted.layers, strict=True):
        assert (layer.cast > 0) == (layer.copies > 0) == (other.cast > 0), layer.name
        assert (layer.copies, layer.activation) == (other.copies, other.activation)
    assert profile.layer("transformer.transformer_blocks.1").copies > 0


def test_sizes_beyond_the_memory_are_left_out_before_they_fill_it(caplog, monkeypatch):
    """Linux hands out more memory than there is, and then ends the process that uses it."""
    graph = tiny_dit(torch.float32)
    model = described(graph)
    largest = max(sum(model.tensor(name).num_bytes for name in {*one.reads, *one.writes}) for one in model.layers)
    monkeypatch.setattr(inputs, "free_memory", lambda: largest)
    with caplog.at_level(logging.WARNING):
        profile = profile_model(graph, model, batch_sizes=(1, 2, 9_999_999), repeats=1)
    assert profile.batch_sizes == (1,)
    assert "batch sizes 2, 9999999 are not profiled: they do not fit in the device's memory" in caplog.text
    with pytest.raises(ConfigError, match=r"not even 9999999 sample.* fit into the memory of .*smaller batch size"):
        profile_model(graph, model, batch_sizes=(9_999_999,), repeats=1)


def test_memory_that_the_system_refuses_is_no_bug(monkeypatch):
    graph = tiny_dit(torch.float32)
    monkeypatch.setattr(measured, "random_inputs", lambda *_: torch.empty(2**60))
    with pytest.raises(ConfigError, match="not even 1 sample"):
        profile_model(graph, described(graph), batch_sizes=(1,), repeats=1)


def test_sizes_beyond_the_time_budget_are_left_out_with_a_warning(caplog):
    graph = tiny_dit(torch.float32)
    seen = []
    with caplog.at_level(logging.WARNING):
        profile = profile_model(
            graph,
            described(graph),
            batch_sizes=(1, 2, 4),
            repeats=1,
            time_budget=0.0,
            progress=lambda done, total: seen.append(done / total),
        )
    assert profile.batch_sizes == (1,)
    assert "batch sizes 2, 4 are not profiled" in caplog.text
    assert seen == sorted(seen)
    assert seen[-1] == 1


@pytest.mark.parametrize("sizes", [(), (0, 1), (-1,)])
def test_batch_sizes_must_be_positive(sizes):
    graph = tiny_dit(torch.float32)
    with pytest.raises(ConfigError, match="positive"):
        profile_model(graph, described(graph), batch_sizes=sizes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured_by_its_own_clock_and_allocator():
    graph = to_meta(tiny_dit(torch.float32))
    model = described(graph, autocast=torch.bfloat16, device="cuda")
    profile = profile_model(graph, model, batch_sizes=(1, 2), device="cuda", precision="bfloat16", repeats=1)
    assert profile_from_text(profile_to_text(profile)) == profile
    assert profile.device == torch.cuda.get_device_name()


@given(times, times, st.booleans(), st.booleans())
def test_input_and_weight_gradients_add_up_to_the_backward(whole, input_grad, has_inputs, is_trained):
    split = split_backward(whole, input_grad, has_inputs=has_inputs, is_trained=is_trained)
    assert sum(split) == pytest.approx(whole if has_inputs or is_trained else 0.0)
    assert [part > 0 for part in split] == [has_inputs, is_trained]


def test_the_spread_is_half_the_distance_of_the_quartiles():
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == 1.0
    assert spread([7.0]) == 0.0
