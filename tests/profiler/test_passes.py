from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
import torch
from kit.descriptions import described
from kit.tiny_models import raw_inputs, tiny_dit

from diffusionpipe.profiler.clock import Clock
from diffusionpipe.profiler.layer_run import layer_run
from diffusionpipe.profiler.measured import profile_model
from diffusionpipe.profiler.passes import MAX_REPEATS, time_passes
from diffusionpipe.profiler.together import combined
from diffusionpipe.profiler.update import time_update


class Ticks(Clock):
    """Runs everything and counts it as one second."""

    def time(self, function):
        return function(), 1.0


@pytest.fixture(scope="module")
def dit():
    graph = tiny_dit(torch.float32)
    return graph, described(graph)


def runs_of(graph, model):
    tensors, runs = raw_inputs(graph, 2), []
    for layer in graph.layers:
        run = layer_run(graph, model, layer, tensors, nullcontext)
        tensors.update(zip(layer.writes, (output.detach() for output in run.forward()), strict=True))
        runs.append(run)
    return runs


def test_every_layer_is_timed_and_only_what_has_a_gradient_has_a_backward(dit):
    graph, model = dit
    times = time_passes(runs_of(graph, model), Ticks(torch.device("cpu")), repeats=2)
    assert list(times) == [layer.name for layer in graph.layers]
    assert {one.forward for one in times.values()} == {1.0}
    for name in model.frozen_layers:
        assert (times[name].input_grad, times[name].weight_grad) == (0.0, 0.0)
    block = times["transformer.transformer_blocks.1"]
    assert block.input_grad + block.weight_grad == 1.0
    assert block.input_grad == 0.98  # as long as the whole backward, less the least share of W


def test_probed_layers_are_timed_without_gradients_too(dit):
    """Each reads what the one before it has just written, but for the first, whose inputs are those from before."""
    graph, model = dit
    seen = []

    class Probing(Ticks):
        def time(self, function):
            outputs, _ = super().time(function)
            is_probe = isinstance(function, partial) and function.keywords == {"keeps": False}
            if is_probe:
                seen.append((function.func.__self__, outputs))
            return outputs, 0.5 if is_probe else 1.0

    runs = runs_of(graph, model)[-3:]
    names = [run.layer.name for run in runs]
    times = time_passes(runs, Probing(torch.device("cpu")), 2, probed=names[1:])
    assert [times[name].forward_only for name in names] == [None, 0.5, 0.5]
    assert [times[name].forward for name in names] == [1.0] * 3
    assert [run.layer.name for run, _ in seen] == names[1:] * (len(seen) // 2)
    assert not any(output.requires_grad for _, outputs in seen for output in outputs)
    (first, written), (second, _) = seen[:2]
    name = first.layer.writes[0]
    assert second.reads[name].data_ptr() == written[first.layer.writes.index(name)].data_ptr()
    assert all(first.reads[name].data_ptr() == runs[1].reads[name].data_ptr() for name in first.layer.reads)


def test_layers_add_up_to_the_median_pass_though_each_is_slow_in_another(dit):
    """Three layers and four passes: every layer is late in some pass, every pass has one late layer."""
    graph, model = dit
    runs = [run for run in runs_of(graph, model) if run.layer.name in model.frozen_layers][:3]
    assert len(runs) == 3
    seconds = iter([4.0, 1, 1, 1, 4.0, 1, 1, 1, 4.0, 4.0, 1, 1])  # forwards: two passes a repetition

    class Late(Clock):
        def time(self, function):
            return function(), next(seconds)

    times = time_passes(runs, Late(torch.device("cpu")), repeats=2, agree=lambda value: 1e9)
    assert sum(one.forward for one in times.values()) == pytest.approx(6.0)
    assert times[runs[1].layer.name].forward == pytest.approx(6.0 * 1 / 4.5)


def test_a_layer_reads_what_the_pass_has_written(dit):
    graph, model = dit
    runs, seen = runs_of(graph, model)[-2:], []

    def run(component, *tensors):
        seen.append(tensors[0])
        return runs[1].layer.run(component, *tensors)

    last = replace(runs[1].layer, run=run)
    time_passes([runs[0], replace(runs[1], layer=last)], Ticks(torch.device("cpu")), repeats=1)
    name = last.reads[0]
    assert name in runs[0].layer.writes
    assert all(tensor is not runs[1].reads[name] for tensor in seen)
    assert all(torch.equal(tensor, runs[1].reads[name]) for tensor in seen)


def test_ranks_make_as_many_passes_as_the_slowest_wants(dit):
    """`agree` decides; a rank whose own clock says enough goes on as long as another has not measured enough."""
    graph, model = dit
    asked = count()
    times = time_passes(runs_of(graph, model)[:2], Ticks(torch.device("cpu")), 1, lambda value: next(asked) * 0.0)
    assert times
    assert next(asked) == 3 * MAX_REPEATS - 2


def test_profiles_of_several_ranks_become_their_mean(dit):
    graph, model = dit
    one = profile_model(graph, model, batch_sizes=(2,), repeats=1)
    double = replace(
        one, layers=tuple(replace(layer, forward=tuple(3 * t for t in layer.forward)) for layer in one.layers)
    )
    both = combined([one, double])
    assert {layer.forward_only for layer in both.layers} == {()}
    probed = (
        replace(one, layers=tuple(replace(layer, forward_only=(seconds,)) for layer in one.layers))
        for seconds in (1.0, 2.0)
    )
    assert {layer.forward_only for layer in combined(list(probed)).layers} == {(1.5,)}
    assert [layer.forward[0] for layer in both.layers] == pytest.approx([2 * layer.forward[0] for layer in one.layers])
    assert [layer.input_grad for layer in both.layers] == [layer.input_grad for layer in one.layers]
    assert [layer.activation for layer in both.layers] == [layer.activation for layer in one.layers]


def test_an_update_is_timed_with_gradients_and_per_parameter(dit):
    _, model = dit
    updated = []

    def make(parameters):
        updated.append(sum(parameter.numel() for parameter in parameters.values()))
        assert all(parameter.grad is not None for parameter in parameters.values())
        return lambda: updated.append(0)

    assert time_update(model, make, torch.device("cpu"), repeats=3) > 0
    assert len(updated) == 1 + 1 + 3
    assert updated[0] == sum(torch.Size(spec.shape).numel() for spec in model.parameters if spec.is_trainable)
