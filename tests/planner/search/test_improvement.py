"""Cuts that are moved until nothing near them is better."""

from collections import Counter
from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
from planner import synthetic

from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.improvement import move_cuts
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.placed import placed
from diffusionpipe.planner.search.pool import Pool
from diffusionpipe.schedules import REGISTRY

NUM_LAYERS = 12
SEEDS = range(12)


def pool_of(seed):
    """Layers of random times on two ranks; a batch of two micro-batches."""
    random = Random(seed)
    times = [random.choice([0.002, 0.01, 0.012, 0.02]) for _ in range(NUM_LAYERS)]
    setting = Setting(
        profile=synthetic.chain(times, parameters=[10**7] * NUM_LAYERS, elements=10**5, frozen=1e-4),
        cluster=synthetic.cluster(2, intra_gb=20.0),
        workload=synthetic.workload(8),
    )
    return Pool(judge=Judge(setting=setting), is_filled=random.random() < 0.5)


def layers_of_workers(name, starts):
    """Worker -> the layers that it holds."""
    found = Counter()
    stops = (*starts[1:], NUM_LAYERS)
    placement = REGISTRY[name](2, 2).placement
    for worker, block in {(stage.worker, stage.weights) for stage in placement.stages}:
        found[worker] += stops[block] - starts[block]
    return found


@pytest.mark.parametrize("name", ["hanayo", "interleaved-zb", "zb-v"])
def test_no_other_cuts_a_layer_away_that_leave_workers_as_many_layers_are_better(name):
    num_stuck = 0
    for seed in SEEDS:
        pool = pool_of(seed)
        first = next(
            one for one in placed(pool.judge, Arrangement(data_parallel=1, units=2), 2) if one.schedule == name
        )
        found = move_cuts(pool, pool.judged_of(first))
        own = found.candidate.starts
        for cuts in combinations(range(1, NUM_LAYERS), len(own) - 1):
            starts = (0, *cuts)
            moves = [abs(a - b) for a, b in zip(starts, own, strict=True)]
            if max(moves) == 1 and (sum(moves) == 1 or _is_exchange(name, starts, own, moves)):
                other = pool.judged_of(replace(found.candidate, starts=starts))
                assert found.score <= other.score * (1 + 1e-9)
        num_stuck += found.score < _by_single_moves(pool, pool.judged_of(first)).score
    assert num_stuck > 0  # else this would hold without exchanges


def _is_exchange(name, starts, own, moves):
    return sum(moves) == 2 and layers_of_workers(name, starts) == layers_of_workers(name, own)


def _by_single_moves(pool, one):
    """The nearest cuts that no single cut makes better."""
    while True:
        near = []
        for cut in range(1, len(one.candidate.starts)):
            for step in (-1, 1):
                starts = list(one.candidate.starts)
                starts[cut] += step
                if sorted({*starts}) == starts and starts[-1] < NUM_LAYERS:
                    near.append(pool.judged_of(replace(one.candidate, starts=tuple(starts))))
        best = min(near, key=lambda other: other.score)
        if best.score >= one.score * (1 - 1e-9):
            return one
        one = best
