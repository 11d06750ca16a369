"""BaPipe's steps on chains written out by hand, and its balance against all cuts."""

import random
from itertools import combinations, pairwise

import pytest
from planner import synthetic

from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.rivals.bapipe import bapipe
from diffusionpipe.planner.rivals.planners import PLANNERS, times_of
from diffusionpipe.planner.rivals.simulated import simulated
from diffusionpipe.planner.search.judge import Judge

TIMES = (4, 4, 2, 2, 6, 6)
FREE = (0,) * 6


def roomy(first, stop, stage):
    return -1


def test_stages_are_balanced_by_time_first():
    assert bapipe(TIMES, FREE, (1, 1), roomy) == (0, 4)  # 12 + 12
    assert bapipe(TIMES, FREE, (1, 1, 1), roomy) == (0, 3, 5)  # 10 + 8 + 6


def test_a_cut_that_takes_longer_than_the_longest_stage_moves_to_small_tensors():
    # The longest stage takes 12. Layers 3 and 4 stay together, and so do 1 and 2: 4, 6, 8, 6.
    assert bapipe(TIMES, (0, 1, 13, 1, 13, 1), (1, 1), roomy) == (0, 3)  # 10 + 14
    # Cuts of 12 are as slow as the stage, not slower.
    assert bapipe(TIMES, (0, 1, 12, 1, 12, 1), (1, 1), roomy) == (0, 4)


def test_where_too_few_cuts_are_cheap_the_cheapest_are_taken():
    assert bapipe(TIMES, (0, 90, 70, 80, 99, 95), (1, 1, 1), roomy) == (0, 2, 3)


def test_a_stage_without_room_gives_its_outermost_layer_to_the_neighbour_with_more_room():
    def lacking(first, stop, stage):
        return (stop - first) - (2, 3, 4)[stage]  # each layer needs one unit

    # (0, 2, 4) fits. With speeds (4, 1, 1) the first stage would hold 4 layers: 4 -> 3 -> 2, each to the second,
    # which then has 3.
    assert bapipe((1, 1, 1, 1, 1, 1), FREE, (4, 1, 1), lacking) == (0, 2, 5)


def test_a_last_stage_without_room_gives_its_first_layers_to_the_stage_before_it():
    def lacking(first, stop, stage):
        return (stop - first) - (4, 2)[stage]

    assert bapipe((1,) * 6, FREE, (1, 2), roomy) == (0, 2)
    assert bapipe((1,) * 6, FREE, (1, 2), lacking) == (0, 4)


def test_what_fits_nowhere_lacks_as_little_as_the_moves_can_reach():
    def lacking(first, stop, stage):
        return 10 * (stop - first) - (10, 20)[stage]  # 6 layers need 60, there are 30

    starts = bapipe((1,) * 6, FREE, (1, 1), lacking)
    assert sum(max(0, lacking(a, b, s)) for s, (a, b) in enumerate(pairwise((*starts, 6)))) == 30


@pytest.mark.parametrize("seed", range(40))
def test_no_other_cuts_that_are_allowed_have_a_shorter_longest_stage(seed):
    rng = random.Random(seed)
    num_layers, num_stages = rng.randint(3, 8), rng.randint(2, 3)
    times = [rng.randint(1, 9) for _ in range(num_layers)]
    transfers = [0, *(rng.choice([1, 5, 40]) for _ in range(num_layers - 1))]
    speeds = [rng.choice([1, 2]) for _ in range(num_stages)]

    def longest(starts):
        spans = pairwise((*starts, num_layers))
        return max(sum(times[a:b]) / speed for (a, b), speed in zip(spans, speeds, strict=True))

    every = [(0, *cuts) for cuts in combinations(range(1, num_layers), num_stages - 1)]
    shortest = min(map(longest, every))
    free, found = bapipe(times, [0] * num_layers, speeds, roomy), bapipe(times, transfers, speeds, roomy)
    assert longest(free) == shortest
    if all(transfers[cut] <= shortest for cut in free[1:]):
        assert found == free
        return
    allowed = [cut for cut in range(1, num_layers) if transfers[cut] <= shortest]
    if len(allowed) < num_stages - 1:
        assert sorted(transfers[cut] for cut in found[1:]) == sorted(transfers[1:])[: num_stages - 1]
    else:
        assert set(found[1:]) <= set(allowed)
        assert longest(found) == min(longest((0, *cuts)) for cuts in combinations(allowed, num_stages - 1))


def test_the_row_has_the_time_of_its_formula_over_all_devices():
    profile = synthetic.chain([0.01] * 8, parameters=[100] * 8, elements=10**5, frozen=0.001)
    setting = Setting(profile=profile, cluster=synthetic.cluster(4, intra_gb=0.5), workload=synthetic.workload(8))
    (rival,) = simulated(["bapipe"], setting)
    assert (rival.candidate.starts, rival.candidate.microbatches) == ((0, 2, 4, 6), 8)
    stages, links = times_of(Judge(setting=setting), rival.candidate)
    clock = (8 + 3) * max(forward + backward for forward, backward, _ in stages)
    assert rival.formula == pytest.approx(clock + 3 * max(map(sum, links)))


def test_more_devices_than_layers_have_no_layout():
    profile = synthetic.chain([0.01] * 3, parameters=[100] * 3, frozen=0.001)
    setting = Setting(profile=profile, cluster=synthetic.cluster(4), workload=synthetic.workload(8))
    assert simulated(["bapipe"], setting) == ()
    assert PLANNERS["bapipe"].needs == "a layer for each device"
