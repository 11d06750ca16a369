"""The candidates of a search: the units that encode for all where memory lets not all of them do so."""

from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
from planner import synthetic
from searches.settings import with_memory

from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.pool import Pool
from diffusionpipe.planner.search.proposal import propose

ENCODERS = 2 * 10**8
"""Bytes of the frozen weights."""


def case(seed: int) -> tuple[Setting, Candidate]:
    """A chain whose encoders are heavy, and a layout of it on four units."""
    random = Random(seed)
    layers = random.randint(4, 7)
    setting = Setting(
        profile=synthetic.chain(
            [random.randint(1, 30) / 1000 for _ in range(layers)],
            parameters=[random.choice((1, 5, 20)) * 10**6 for _ in range(layers)],
            elements=10**4,
            frozen=10e-3,
            frozen_parameters=ENCODERS // 2,
        ),
        cluster=synthetic.cluster(4),
        workload=synthetic.workload(16),
    )
    candidate = Candidate(
        arrangement=Arrangement(data_parallel=1, units=4),
        schedule="1f1b",
        microbatches=random.choice((2, 4, 8)),
        starts=(0, *sorted(random.sample(range(1, layers), 3))),
        replicas=(1, 1, 1, 1),
    )
    return setting, candidate


@pytest.mark.parametrize("seed", range(8))
def test_a_layout_fits_where_some_units_have_room_for_the_encoders(seed):
    setting, candidate = case(seed)
    held = Judge(setting=setting).footprint.held(candidate)
    # The fullest stage has room, but not for the encoders beside it.
    memory = max(held) - ENCODERS // 2
    pool = Pool(judge=Judge(setting=with_memory(setting, memory)), is_filled=True)
    assert not pool.judge.footprint.fits(candidate)
    one = pool.judged_of(candidate)
    allowed = [
        hosts
        for count in (1, 2, 3)
        for hosts in combinations(range(4), count)
        if pool.judge.footprint.fits(replace(candidate, hosts=hosts))
    ]
    assert one.candidate.hosts == (max(allowed, key=len) if allowed else None)
    assert one.fits == bool(allowed)
    proposal = propose(pool.judge.setting, candidate.layout(setting), filler_of(pool.judge.setting))
    assert (proposal.overflow <= 0) == bool(allowed), "the filler finds the same"
    assert Pool(judge=pool.judge, is_filled=False).judged_of(candidate).candidate == candidate, "encoders come first"


def test_a_layout_with_room_on_all_units_is_not_changed():
    setting, candidate = case(0)
    assert Pool(judge=Judge(setting=setting), is_filled=True).judged_of(candidate).candidate == candidate
