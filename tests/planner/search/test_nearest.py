"""The nearest layout holds least on its fullest device, wherever the memory of a model is."""

from itertools import combinations

import pytest
from planner import synthetic

from diffusionpipe.planner.pricing.given import NOTHING, Given
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.nearest import least_estimated_overflow, least_overflow


def setting_of(parameters, *, ranks=2, memory=1.0, given=NOTHING):
    """Layers that take equally long, with memory in some of them."""
    return Setting(
        profile=synthetic.chain([0.01] * len(parameters), parameters=[int(n * 10**8) for n in parameters]),
        cluster=synthetic.cluster(ranks, memory=memory),
        workload=synthetic.workload(4),
        given=given,
    )


@pytest.mark.parametrize("parameters", [[4, 1, 1, 1], [1, 1, 1, 1, 6], [1, 5, 1, 1, 1, 4]])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "sequential"])
def test_no_cut_of_the_model_misses_the_memory_by_less(parameters, ranks, schedule):
    setting = setting_of(parameters, ranks=ranks, given=Given(schedule=schedule, stages=ranks))
    nearest = least_estimated_overflow(setting)
    judge = Judge(setting=setting)
    cuts = [(0, *cut) for cut in combinations(range(1, len(parameters)), ranks - 1)]
    others = [
        Candidate(
            arrangement=nearest.candidate.arrangement,
            schedule=schedule,
            microbatches=microbatches,
            starts=starts,
            replicas=(1,) * ranks,
        )
        for starts in cuts
        for microbatches in (1, 2, 4)
    ]
    least = min(judge.footprint.overflow(one, judge.footprint.held(one)) for one in others)
    assert nearest.estimate.overflow == least


def test_a_model_whose_memory_is_at_one_end_is_cut_there():
    candidate, proposal = least_overflow(setting_of([4, 1, 1, 1]))
    assert candidate.starts == (0, 1)
    assert proposal.overflow < least_overflow(setting_of([4, 1, 1, 1], given=Given(stages=1)))[1].overflow
