"""What fills hold, counted, is what they hold when they run."""

from functools import cache
from itertools import pairwise
from random import Random

import pytest
import torch
from kit.descriptions import described
from kit.layouts import CPU
from kit.tiny_models import raw_inputs, tiny_stable_diffusion

from diffusionpipe.holding.memory import forward_bytes
from diffusionpipe.ir import Fill, Range
from diffusionpipe.profiler import analytic_profile
from diffusionpipe.profiler.memory import LiveBytes
from diffusionpipe.runtime.compute.frozen import Encoder
from diffusionpipe.runtime.compute.store import RowStore
from diffusionpipe.timing.encoding import held_by_fills

BATCH = 8


@cache
def profiled():
    graph = tiny_stable_diffusion(torch.float32, resolution=16)
    model = described(graph)
    return graph, analytic_profile(graph, model, device="cpu-1-thread", batch_sizes=(2, 8))


def random_fills(random, num_layers):
    """Layers cut at random, and samples of each piece; pieces of two halves of the batch in turn."""
    halves = []
    for first in (0, BATCH // 2):
        cuts = sorted({0, num_layers, *(random.randrange(1, num_layers) for _ in range(3))})
        halves.append([])
        for start, stop in pairwise(cuts):
            chunk = random.choice((1, 3, 4))
            for sample in range(first, first + BATCH // 2, chunk):
                samples = Range(sample, min(sample + chunk, first + BATCH // 2))
                halves[-1].append(Fill(stage=0, component="", layers=Range(start, stop), samples=samples))
    found = []
    while any(halves):
        found.append(random.choice([half for half in halves if half]).pop(0))
    return found


def held(graph, profile, fills):
    """While each fill runs, and after it."""
    frozen = profile.graph.frozen_layers
    read = set(profile.graph.reads_of(profile.graph.backbone_layers))
    outputs = {name for name in profile.graph.writes_of(frozen) if name in read}
    specs = {spec.name: spec for spec in profile.graph.tensors}
    store = RowStore(dict.fromkeys({*profile.graph.inputs, *outputs}, Range(0, BATCH)), specs, CPU)
    store.feed(Range(0, BATCH), raw_inputs(graph, BATCH), {})
    layers = [layer for layer in graph.layers if layer.name in frozen]
    encoder = Encoder(layers, graph.components, outputs=outputs, fills=fills)
    live, found = LiveBytes(), []
    for fill in fills:
        live.restart_peak()
        with live:
            encoder.run(fill, store)
        found.append((live.peak, live.live))
    return found


def test_a_pass_through_all_frozen_layers_holds_what_is_counted():
    graph, profile = profiled()
    frozen = profile.graph.frozen_layers
    (whole,) = held(
        graph, profile, [Fill(stage=0, component="", layers=Range(0, len(frozen)), samples=Range(0, BATCH))]
    )
    assert forward_bytes(profile, frozen, BATCH) == pytest.approx(whole[0], rel=0.05)


@pytest.mark.parametrize("seed", range(4))
def test_fills_of_some_layers_hold_what_is_counted(seed):
    graph, profile = profiled()
    frozen = profile.graph.frozen_layers
    fills = random_fills(Random(seed), len(frozen))
    counted, found = held_by_fills(profile, frozen, fills), held(graph, profile, fills)
    assert max(running for running, _ in counted) == pytest.approx(max(running for running, _ in found), rel=0.05)
    assert [left for _, left in counted] == [left for _, left in found]
    assert all(expected >= 0.95 * running for (expected, _), (running, _) in zip(counted, found, strict=True))
