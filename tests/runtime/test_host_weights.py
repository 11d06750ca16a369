"""Weights in host memory come to the device as layers run, two at a time, and change no loss and no gradient."""

import copy
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from kit.descriptions import described
from kit.layouts import CPU, assert_same_step, reference_step, rows_of, run_step, step_in_threads, steps_ahead
from kit.tiers import quick_and_slow
from kit.tiny_models import (
    raw_inputs,
    tiny_controlled,
    tiny_dit,
    tiny_flux,
    tiny_sd3,
    tiny_stable_diffusion,
)
from planner import synthetic
from torch import nn

from diffusionpipe.errors import ConfigError
from diffusionpipe.holding import HOST
from diffusionpipe.ir import Op, Range, Sharded
from diffusionpipe.models.graphs.graph import Layer, canonical_names, layer_parameters
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.models.parameters.lora import LoraSettings, add_lora
from diffusionpipe.models.parameters.weights import materialize
from diffusionpipe.passes import PlacedFill
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.planner.filling.frozen_layers import frozen_layers
from diffusionpipe.planner.filling.spreading import spread_fills
from diffusionpipe.planner.pricing.copied import CopyStream
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.storing import stored
from diffusionpipe.planner.search.proposal import pricing_of
from diffusionpipe.profiler.analytic import analytic_profile
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.engine.worker import build_worker
from diffusionpipe.runtime.weights import host_memory
from diffusionpipe.runtime.weights.bringing import brought
from diffusionpipe.runtime.weights.host_weights import HostWeights

BATCH = 8
WIDTHS = (4, 6, 3, 5, 4)


class Chain(nn.Module):
    """Five linear layers of different sizes; the fourth reads the weight of the first too."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((*WIDTHS, 2)))
        self.register_buffer("scale", torch.tensor(2.0))
        self.requires_grad_(False)


def linear(index, component, x):
    extra = component.layers[0].weight.sum() if index == 3 else 0.0
    return (component.layers[index](x) * component.scale + extra,)


def chain():
    """The layers, with one without weights in their middle, and their components."""
    found = []
    for index in range(5):
        modules = (f"layers.{index}",) if index != 3 else ("layers.3", "layers.0.weight")
        found.append(
            Layer(
                name=f"linear {index}",
                component="chain",
                reads=(f"x{index}",),
                writes=(f"x{index + 1}",),
                modules=modules,
                run=partial(linear, index),
            )
        )
    double = Layer(name="double", component="chain", reads=("x5",), writes=("x6",), run=lambda _, x: (2 * x,))
    torch.manual_seed(0)
    return [*found, double], {"chain": Chain()}


@contextmanager
def presented(weights, name):
    """The weights of a layer on the device; nothing where it has none."""
    own = weights.get(name)
    if own is None:
        yield
        return
    own.present()
    try:
        yield
    finally:
        own.release()


def parameters_of(layers, components):
    return {name: p for p, name in canonical_names(components).items()}


def device_layers(host_weights, parameters):
    """Parameters whose data stand in the staging memory."""
    staging = host_weights._staging
    storage = None if staging is None else staging.untyped_storage().data_ptr()
    return {name for name, p in parameters.items() if p.data.untyped_storage().data_ptr() == storage}


def test_parameters_stay_the_same_objects_with_the_same_values():
    layers, components = chain()
    before = copy.deepcopy(components["chain"])
    objects = list(components["chain"].parameters())
    weights = HostWeights(layers, components, CPU)
    for layer in layers:
        with presented(weights, layer.name):
            for found, expected in zip(components["chain"].parameters(), before.parameters(), strict=True):
                assert torch.equal(found, expected)
    assert all(a is b for a, b in zip(components["chain"].parameters(), objects, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(components["chain"].parameters(), before.parameters(), strict=True))


def test_a_layers_parameters_alone_stand_on_the_device_while_it_runs_and_none_otherwise():
    layers, components = chain()
    weights = HostWeights(layers, components, CPU)
    parameters = parameters_of(layers, components)
    for layer in layers:
        own = {name for name in parameters if any(name.startswith(f"chain.{module}") for module in layer.modules)}
        with presented(weights, layer.name):
            assert device_layers(weights, parameters) == own
        assert not device_layers(weights, parameters)


def test_the_device_has_what_was_copied_and_not_what_the_host_has():
    """What is written to host memory is not seen before the layer comes anew."""
    layers, components = chain()
    weights = HostWeights(layers, components, CPU)
    bias = components["chain"].layers[1].bias
    weights.start("linear 1")
    bias.data.fill_(7)
    with presented(weights, "linear 1"):
        assert not torch.equal(bias, torch.full_like(bias, 7))
    for other in ("linear 2", "linear 4"):
        with presented(weights, other):
            pass
    with presented(weights, "linear 1"):
        assert torch.equal(bias, torch.full_like(bias, 7))


def test_two_layers_have_room_and_two_layers_alone_are_present():
    layers, components = chain()
    weights = HostWeights(layers, components, CPU)
    seen = []

    def watched(layer):
        def run(component, *tensors):
            seen.append((layer.name, weights.present_layers))
            return layer.run(component, *tensors)

        return replace(layer, run=run)

    layers = brought([watched(layer) for layer in layers], weights)
    run_layers(layers, components, {"x0": torch.ones(1, 4)})
    pairs = [{f"linear {i}", f"linear {i + 1}"} for i in range(4)]
    assert [present for _, present in seen] == [*pairs, {"linear 3", "linear 4"}, {"linear 3", "linear 4"}]
    assert weights.device_bytes == 512 * (3 + 2)  # the fourth has three parameters, the others two; each is aligned
    assert weights.device_bytes == weights._staging.nbytes
    assert not device_layers(weights, parameters_of(layers, components))


@pytest.mark.parametrize("first", ["linear 0", "linear 3"])
def test_a_layer_that_is_wanted_out_of_turn_comes_and_harms_no_other(first):
    layers, components = chain()
    inputs = {layer.name: torch.ones(1, width) for layer, width in zip(layers[:5], WIDTHS, strict=True)}
    expected = {layer.name: layer.run(components["chain"], inputs[layer.name])[0] for layer in layers[:5]}
    weights = HostWeights(layers, components, CPU)
    one = {layer.name: layer for layer in brought(layers, weights)}
    for name in (first, "linear 4", "linear 1", "linear 1", "linear 2", "linear 0"):
        weights.start("linear 2")
        (found,) = one[name].run(components["chain"], inputs[name])
        assert torch.equal(found, expected[name]), name


def test_a_layer_that_writes_a_view_of_its_weights_keeps_what_it_wrote():
    layers, components = chain()
    view = replace(layers[0], run=lambda component, x: (component.layers[0].weight[None],))
    before = components["chain"].layers[0].weight.clone()
    weights = HostWeights([view, *layers[1:]], components, CPU)
    (written,) = brought([view], weights)[0].run(components["chain"], torch.ones(1, 4))
    for name in ("linear 1", "linear 2"):
        with presented(weights, name):
            pass
    assert torch.equal(written[0], before)


def test_what_other_layers_use_too_stays_on_the_device():
    layers, components = chain()
    kept = components["chain"].layers[0].weight
    weights = HostWeights(layers, components, CPU, kept={kept})
    storage = kept.data_ptr()
    for name in ("linear 0", "linear 3"):
        with presented(weights, name):
            assert kept.data_ptr() == storage
            assert device_layers(weights, parameters_of(layers, components)) == {
                f"chain.layers.{name[-1]}.bias",
                *([f"chain.layers.{name[-1]}.weight"] if name == "linear 3" else []),
            }


def test_too_little_host_memory_is_said_before_any_is_taken(monkeypatch):
    monkeypatch.setattr(host_memory, "free_memory", lambda: 100)
    with pytest.raises(ConfigError, match=r"the frozen part needs .* of which 0\.0 GiB are free"):
        HostWeights(*chain(), CPU)


def test_layers_without_weights_cost_nothing():
    layers, components = chain()
    weights = HostWeights(layers[-1:], components, CPU)
    assert brought(layers[-1:], weights) == (layers[-1],)
    assert weights._staging is None
    assert weights.device_bytes == 0
    assert "double" not in weights


# On streams.


class Timeline:
    """A stream that knows what is over before anything that it is given next."""

    def __init__(self):
        self.over = set()

    def wait_stream(self, other):
        self.over |= other.over


class Event:
    def __init__(self):
        self.over = set()

    def record(self, stream):
        self.over = set(stream.over)

    def wait(self, stream):
        stream.over |= self.over


class Streams:
    """A backend that keeps the order which events guarantee, in place of torch's."""

    Stream, Event = Timeline, Event

    def __init__(self):
        self.computing, self.before = Timeline(), {}
        self.copied = None

    def current_stream(self):
        return self.computing

    def put(self, timeline, work):
        self.before[work] = set(timeline.over)
        timeline.over.add(work)

    @contextmanager
    def stream(self, timeline):
        self.put(timeline, self.copied)
        yield


def test_events_alone_order_copies_and_computation(monkeypatch):
    streams = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    layers, components = chain()
    weights = HostWeights(layers, components, CPU)
    order = [0, 1, 2, 3, 4, 0, 3, 3, 1, 2, 4]
    stands = {}  # layer -> the copy that stands on the device
    runs = []  # (layer, its copy)
    start = weights.start

    def watched(layer):
        present = weights.present_layers
        if layer in present:
            return
        streams.copied = ("copy", layer, len(streams.before))
        start(layer)
        for evicted in present - weights.present_layers:
            readers = {run for run, copy in runs if copy == stands[evicted]}
            assert readers <= streams.before[streams.copied]
            del stands[evicted]
        stands[layer] = streams.copied

    monkeypatch.setattr(weights, "start", watched)
    for one, following in pairwise([*order, 0]):
        with presented(weights, f"linear {one}"):
            weights.start(f"linear {following}")
            run = ("run", one, len(streams.before))
            streams.put(streams.computing, run)
            runs.append((run, stands[f"linear {one}"]))
            assert stands[f"linear {one}"] in streams.before[run]
        if one == 2:
            weights.start("linear 0")  # another than comes next
    assert len(runs) == len(order)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_layers_that_take_turns_compute_what_they_do_with_all_weights_there():
    torch.manual_seed(0)
    chain_of = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).requires_grad_(False)
    x, device = torch.randn(4096, 2048, device="cuda"), torch.device("cuda", torch.cuda.current_device())

    def run(index, component, value):
        return (component[index](value),)

    layers = [
        Layer(
            name=str(i), component="c", reads=(f"x{i}",), writes=(f"x{i + 1}",), modules=(str(i),), run=partial(run, i)
        )
        for i in range(8)
    ]
    expected = copy.deepcopy(chain_of).to(device)(x)
    weights = HostWeights(layers, {"c": chain_of}, device)
    before = torch.cuda.memory_allocated()
    running = brought(layers, weights)
    for _ in range(20):
        found = run_layers(running, {"c": chain_of}, {"x0": x}, targets=["x8"])["x8"]
        weights.start("0")
        assert torch.equal(found, expected)
        assert all(parameter.device.type == "cpu" and parameter.is_pinned() for parameter in chain_of.parameters())
    del found
    assert torch.cuda.memory_allocated() - before <= weights.device_bytes + 2**21  # of a segment, rounded up


# In a pipeline.


def with_adapters(dtype=torch.float64):
    """FLUX.1 of which adapters alone are trained: the first layers of its transformer are frozen."""
    graph = tiny_flux(dtype)
    add_lora(graph.components, "transformer", LoraSettings(rank=2, target_modules=("to_q",)))
    materialize(graph, [layer.name for layer in graph.layers], {}, device="cpu", dtype=dtype, seed=0)
    return graph


def assert_bit_for_bit(found, expected):
    assert found.loss == expected.loss
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


@pytest.mark.parametrize(
    "build",
    quick_and_slow(
        [tiny_stable_diffusion, tiny_dit, tiny_sd3, tiny_controlled, with_adapters],
        quick=[tiny_dit, tiny_controlled, with_adapters],
    ),
)
def test_loss_and_gradients_are_those_with_the_weights_on_the_device_bit_for_bit(build):
    graph = build()
    model, inputs = described(graph), raw_inputs(graph, BATCH)
    layout = Layout(batch=BATCH, stages=2, microbatches=2, encode_chunk=3)
    found = step_in_threads(graph, model, replace(layout, encoders="host"), inputs)
    assert_bit_for_bit(found, step_in_threads(graph, model, layout, inputs))


@pytest.mark.parametrize(
    "sizes",
    [
        {"data_parallel": 2},
        {"stages": 2, "replicas": (2, 1)},
        {"data_parallel": 2, "sharded": Sharded.ALL, "buckets": 3},
    ],
    ids=["data parallel", "replicas", "sharded"],
)
def test_other_layouts_stay_the_same_bit_for_bit(sizes):
    graph = tiny_stable_diffusion()
    model, inputs = described(graph), raw_inputs(graph, BATCH)
    layout = Layout(**{"batch": BATCH, "stages": 1, "microbatches": 2, "encode_chunk": 3} | sizes)
    found = step_in_threads(graph, model, replace(layout, encoders="host"), inputs)
    assert_bit_for_bit(found, step_in_threads(graph, model, layout, inputs))


def pieces(unfilled):
    """The frozen layers in two ranges, each for half of the batch at a time, somewhere in the iteration."""
    num_layers, num_actions = len(unfilled.blocks[-1]), len(unfilled.schedule.orders[0])
    found = []
    for start, stop in pairwise((0, num_layers // 2, num_layers)):
        for first in (0, BATCH // 2):
            position, samples = len(found) * num_actions // 4, Range(first, first + BATCH // 2)
            found.append(PlacedFill(position=position, component="", layers=Range(start, stop), samples=samples))
    return {0: found}


def test_fills_of_some_layers_stay_the_same_and_each_has_the_next_ones_first_layer_started():
    graph = tiny_stable_diffusion()
    model, inputs = described(graph), raw_inputs(graph, BATCH)
    layout = Layout(batch=BATCH, stages=2, microbatches=2)

    def steps(encoders):
        plan = build_plan(model, replace(layout, encoders=encoders), filler=pieces)

        def main(rank, transport):
            worker = build_worker(copy.deepcopy(graph), model, plan, rank, transport, device=CPU)
            copied = watch_copies(worker.frozen_weights)
            if worker.encoded is not None:
                worker.feed(worker.prologue, inputs)
            worker.prologue.run()
            copied.clear()
            found = [run_step(worker, inputs) for _ in range(2)]
            return found, copied

        results = run_threads(2, main)
        return plan, [found for found, _ in results], results[0][1]

    _, expected, _ = steps("device")
    plan, found, copied = steps("host")
    for ranks in zip(found, expected, strict=True):
        for (loss, gradients), (expected_loss, expected_gradients) in zip(*ranks, strict=True):
            assert loss == expected_loss
            assert all(torch.equal(gradient, expected_gradients[name]) for name, gradient in gradients.items())
    heavy = {layer for layer in plan.blocks[-1] if layer_parameters(graph, [layer])}
    wanted = [name for fill in plan.train.fills for name in plan.blocks[-1][fill.layers.start : fill.layers.stop]]
    wanted = [name for name in wanted if name in heavy]
    assert copied == (wanted * 2)[1:] + wanted[:1]  # what comes first was started at the end of the prologue


@pytest.mark.parametrize("sharded", [Sharded.NONE, Sharded.ALL])
def test_fills_spread_over_a_copy_give_the_same_step_and_copy_what_the_planner_counts(sharded):
    """Text encoders layer by layer between backwards, then the VAE: not the order in which a batch is encoded else."""
    graph = tiny_stable_diffusion(torch.float64)
    model = described(graph)
    profile = analytic_profile(graph, model, device="a100-80", batch_sizes=(1, 2, 4))
    heavy = [name for name in model.frozen_layers if layer_parameters(graph, [name])]
    devices = tuple(replace(device, host_bandwidth=1e9) for device in synthetic.cluster(2).devices)
    fast = replace(synthetic.cluster(2), devices=devices)
    setting = stored(Setting(profile=profile, cluster=fast, workload=synthetic.workload(BATCH)), HOST)
    copies = {name: 1e-4 if name.startswith("text") else 1e-9 for name in heavy}
    setting = replace(setting, profile=replace(setting.profile, arriving=copies))
    frozen = frozen_layers(setting.profile)
    layout = Layout(batch=BATCH, stages=1, microbatches=2, data_parallel=2, sharded=sharded, buckets=6, encoders="host")

    def filler(unfilled):
        return {0: spread_fills(setting, unfilled, frozen)}

    plan = build_plan(model, layout, pricing=pricing_of(setting), filler=filler)
    order, fills = plan.train.orders[0], plan.train.fills
    text = [i for i, a in enumerate(order) if a.op is Op.ENCODE and fills[a.slot].component == "text_encoder"]
    backwards = [i for i, action in enumerate(order) if action.op is Op.B]
    assert len(text) > 1
    assert backwards[0] < text[0] < backwards[-1]

    batches = [raw_inputs(graph, BATCH, seed=seed) for seed in (1, 2)]
    (found,) = steps_ahead(graph, model, plan, batches)
    assert_same_step(found, reference_step(graph, batches[0]))

    def main(rank, transport):
        worker = build_worker(copy.deepcopy(graph), model, plan, rank, transport, device=CPU)
        worker.feed(worker.prologue, rows_of(worker, batches[0]))
        worker.prologue.run()
        copied = watch_copies(worker.frozen_weights)
        worker.feed(worker.train, rows_of(worker, batches[1]))
        worker.train.run()
        return copied

    stream = Counted(setting.profile.arriving)
    names = [name for fill in plan.train.fills for name in plan.blocks[-1][fill.layers.start : fill.layers.stop]]
    names = [name for name in names if name in stream.copies]
    for name, following in pairwise([*names, *names, names[0]]):
        stream.run(name, 0.0, 1.0, following)
    for copied in run_threads(2, main):
        assert copied == stream.started[-len(copied) :]
        assert len(stream.started) == 2 * len(copied) + 1  # and the first of all


class Counted(CopyStream):
    """Copies, and which there were."""

    def __init__(self, copies):
        super().__init__(copies)
        self.started = []

    def start(self, layer, now):
        before = self._staging.layers
        super().start(layer, now)
        self.started += self._staging.layers - before


def watch_copies(host_weights):
    """The layers that are copied, in order."""
    copied = []
    if host_weights:
        start = host_weights.start

        def watched(layer):
            before = host_weights.present_layers
            start(layer)
            copied.extend(host_weights.present_layers - before)

        host_weights.start = watched
    return copied


def test_all_frozen_weights_rest_in_host_memory_and_no_trained_ones_do():
    graph = tiny_stable_diffusion()
    model = described(graph)
    plan = build_plan(model, Layout(batch=BATCH, stages=1, microbatches=2, encoders="host"))

    def main(rank, transport):
        own = copy.deepcopy(graph)
        worker = build_worker(own, model, plan, rank, transport, device=CPU)
        run_step(worker, raw_inputs(graph, BATCH))
        memory = worker.frozen_weights._memory.untyped_storage().data_ptr()
        hosted = {
            name for p, name in canonical_names(own.components).items() if p.data.untyped_storage().data_ptr() == memory
        }
        return hosted, set(layer_parameters(own, plan.blocks[-1])), worker.frozen_weights.device_bytes

    ((hosted, frozen, on_device),) = run_threads(1, main)
    assert hosted == frozen
    sizes = [sum(p.nbytes for p in layer_parameters(graph, [name]).values()) for name in plan.blocks[-1]]
    assert sum(sorted(sizes)[-2:]) <= on_device < sum(sizes)
