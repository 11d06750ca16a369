from random import Random

import pytest

from diffusionpipe.planner.rivals.copy_times import gathering_time
from diffusionpipe.timing.sequences import Sequences


def test_an_event_waits_for_the_one_before_it_and_for_the_one_that_it_is_behind():
    sequences = Sequences()
    first = sequences.add("compute", 5)
    late = sequences.add("sums", 1, behind=first)
    early = sequences.add("copies", 1)
    last = sequences.add("sums", 2, behind=early)
    ends = sequences.ends()
    assert [ends[event] for event in (first, late, early, last)] == [5, 6, 1, 8]


@pytest.mark.parametrize("seed", range(20))
def test_layers_that_are_gathered_ahead_take_what_a_loop_over_them_says(seed):
    random = Random(seed)
    gathers, computes = ([random.choice((0, random.randint(1, 9))) for _ in range(6)] for _ in range(2))
    now = free = started = 0
    for gather, compute in zip(gathers, computes, strict=True):
        free = max(free, started) + gather
        started = max(now, free) if gather else now
        now = started + compute
    assert gathering_time(gathers, computes) == now
