"""Mean steps of plans whose micro-batches have several sizes."""

from collections import Counter
from dataclasses import replace

import pytest
from holding.test_sizes import over

from diffusionpipe.holding.sizes import at_size
from diffusionpipe.planner import Layout, plan_from_profile, predicted_timeline
from diffusionpipe.planner.mixed import drawn_rows, mean_step

LAYOUTS = [
    Layout(batch=16, stages=2, microbatches=4),
    Layout(batch=16, stages=2, microbatches=8, schedule="zb-h1"),
    Layout(batch=16, stages=2, microbatches=2, data_parallel=2),
]


def test_sizes_are_drawn_within_one_run_of_their_shares():
    shares = (0.6, 0.3, 0.1)
    rows = [row for step in drawn_rows(shares, run=2, batch=8, steps=50) for row in step]
    for stop in range(2, len(rows) + 1, 2):
        counts = Counter(rows[:stop])
        assert all(abs(counts[number] - share * stop) <= 2 for number, share in enumerate(shares))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_of_one_size_take_the_time_of_that_size(layout):
    _, joined = over((30, 10), (0.5, 0.5))
    plan = plan_from_profile(joined, layout)
    for number in range(2):
        alone = at_size(joined, number)
        alone = replace(alone, sizes=(replace(alone.sizes[0], share=1.0),))
        assert mean_step(alone, plan, 16) == pytest.approx(predicted_timeline(alone, plan).makespan)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_that_each_have_one_size_take_the_mean_of_their_times(layout):
    _, joined = over((30, 10), (0.5, 0.5))
    plan = plan_from_profile(joined, replace(layout, encode_chunk=4))
    times = [predicted_timeline(at_size(joined, number), plan).makespan for number in range(2)]
    assert mean_step(joined, plan, 16) == pytest.approx(sum(times) / 2, rel=0.05)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_that_mixes_sizes_takes_no_less_than_its_slowest_stage_and_no_more_than_the_largest_size(layout):
    _, joined = over((30, 10), (0.5, 0.5))
    plan = plan_from_profile(joined, layout)
    own = mean_step(joined, plan, plan.train.placement.pipelines[0].microbatches[0])
    assert predicted_timeline(at_size(joined, 1), plan).makespan < own
    assert own < predicted_timeline(at_size(joined, 0), plan).makespan
