"""Frozen work without a flush: who encodes how much, and how fast the windows repeat then."""

from dataclasses import replace
from random import Random

import pytest

from diffusionpipe.costs import Costs, StageCosts
from diffusionpipe.ir import Op
from diffusionpipe.ir.unroll import unroll
from diffusionpipe.ir.versions import Versions
from diffusionpipe.passes import insert_fills, reduce_gradients, with_versions, without_flush
from diffusionpipe.planner.assembly.windows import communicate_window, turns_of
from diffusionpipe.planner.filling.fills import FillOptions, FrozenLayers
from diffusionpipe.planner.filling.windows import window_fills
from diffusionpipe.schedules import one_f_one_b
from diffusionpipe.simulator.steady import steady
from diffusionpipe.timing import Streams
from diffusionpipe.timing.legal import check

LAYERS = (0.5, 0.25, 0.25)
"""Seconds of each frozen layer on a sample."""


def frozen_of(fixed=0.0):
    return FrozenLayers(components=("v", "v", "t"), forward=lambda layer, samples: fixed + LAYERS[layer] * samples)


def window_of(p, m, samples=1, is_data_parallel=False):
    flushed = reduce_gradients(one_f_one_b(p, m, samples), is_data_parallel)
    return without_flush(flushed, turns_of("1f1b", p, m).ahead)


def costs_of(times):
    return Costs(stages=tuple(StageCosts(forward=time, backward=2 * time) for time in times))


def filled(window, costs, frozen, options=None):
    fills = window_fills(window, costs, frozen, options)
    outputs = dict.fromkeys(range(window.num_workers), ("latents",))
    explicit = communicate_window(insert_fills(window, fills, block=99, outputs=outputs))
    return with_versions(explicit, Versions.STASHED)


def period_of(window, costs, frozen):
    """Of a filled window, with links that cost nothing."""

    def price(unrolled):
        encoders = len(unrolled.placement.stages) - window.num_workers
        seconds = [
            sum(frozen.forward(layer, len(fill.samples)) for layer in range(fill.layers.start, fill.layers.stop))
            for fill in unrolled.fills
        ]
        stages = costs.stages[: window.num_workers] + (StageCosts(forward=0, backward=0),) * encoders
        return replace(costs, stages=stages, fills=tuple(seconds))

    return float(steady(window, price).period)


@pytest.mark.parametrize("seed", range(20))
def test_no_rank_has_more_than_its_part_of_all_work_and_one_sample(seed):
    random = Random(seed)
    p, m = random.randint(2, 6), random.randint(1, 6)
    times = [random.randint(1, 5) for _ in range(p)]
    frozen, window = frozen_of(), window_of(p, m, random.randint(1, 4))
    fills = window_fills(window, costs_of(times), frozen)
    samples = [sum(len(fill.samples) * len(fill.layers) / 3 for fill in fills.get(worker, ())) for worker in range(p)]
    ends = [3 * m * time + count for time, count in zip(times, samples, strict=True)]
    batch = window.placement.num_samples
    assert sum(samples) == pytest.approx(batch)
    assert max(ends) < max(3 * m * max(times), (3 * m * sum(times) + batch) / p + 1) + 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_filled_windows_pass_the_strictest_machine(seed):
    random = Random(seed)
    p, m = random.randint(2, 5), random.choice((1, 2, 4))
    window = window_of(p, m, random.randint(1, 3), is_data_parallel=bool(seed % 2))
    hosts = tuple(sorted(random.sample(range(p), random.randint(1, p))))
    options = FillOptions(workers=hosts, speeds=tuple(random.choice((0.5, 1, 2)) for _ in range(p)))
    explicit = filled(window, costs_of([random.randint(1, 5) for _ in range(p)]), frozen_of(0.1), options)
    check(explicit)
    check(unroll(explicit, 5), streams=Streams.HOST)


def test_the_last_part_runs_beside_the_gradient_sum():
    """So the update, which waits for the sum, waits less."""
    window = filled(window_of(2, 1, 4, is_data_parallel=True), costs_of([1, 1]), frozen_of())
    for order in window.orders:
        ops = [action.op for action in order if action.op in (Op.B, Op.REDUCE_GRAD, Op.ENCODE, Op.STEP)]
        assert ops == [Op.B, Op.REDUCE_GRAD, *[Op.ENCODE] * (len(ops) - 3), Op.STEP]
        assert len(ops) > 3


@pytest.mark.parametrize(
    ("times", "period", "shared_equally"),
    [((1, 1, 1, 1), 18, 18), ((2, 1, 1, 1), 24, 30), ((1, 1, 3, 1), 36, 42), ((1, 2, 3, 2), 36, 42)],
)
def test_frozen_work_balances_unequal_stages(times, period, shared_equally):
    """4 ranks, 4 micro-batches, 24 samples that cost a second each: all work / ranks, or the slowest rank alone."""
    frozen, costs, window = frozen_of(), costs_of(times), window_of(4, 4, 6)
    assert period == max(12 * max(times), (12 * sum(times) + 24) / 4)
    assert period_of(filled(window, costs, frozen), costs, frozen) == pytest.approx(period)
    equal = filled(window, costs_of((1, 1, 1, 1)), frozen)
    assert period_of(equal, costs, frozen) == pytest.approx(shared_equally)
