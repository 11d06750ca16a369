import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner import synthetic
from planner.filling.fill_cases import random_case
from planner.filling.paper_fill import bubbles, needs_of, paper_fill

from diffusionpipe.costs import Costs, StageCosts
from diffusionpipe.planner.filling.compute_graph import compute_graph
from diffusionpipe.planner.filling.fills import FillOptions, FrozenLayers, fill_bound, frozen_layers
from diffusionpipe.planner.filling.shares import Case
from diffusionpipe.schedules import REGISTRY


def even(num_stages):
    return Costs(stages=(StageCosts(forward=1, backward=2),) * num_stages)


def layers(*seconds, components=None):
    return FrozenLayers(
        components=components or ("vae",) * len(seconds), forward=lambda layer, samples: seconds[layer] * samples
    )


def case_of(schedule, costs, frozen):
    return Case(graph=compute_graph(schedule, costs), frozen=frozen, options=FillOptions(), batch=4)


def test_bubbles_are_times_in_which_the_same_workers_wait():
    found = bubbles(case_of(REGISTRY["gpipe"](2, 2), even(2), layers(1)), 0.0)
    assert [(b.start, b.end, *b.workers) for b in found] == [(0, 1, 1), (2, 5, 0), (7, 9, 1)]


def test_short_bubbles_are_dropped():
    found = bubbles(case_of(REGISTRY["gpipe"](2, 2), even(2), layers(1)), 2.0)
    assert [(b.start, b.end) for b in found] == [(2, 5), (7, 9)]


def test_what_fits_is_filled_and_the_rest_runs_on_all_devices():
    schedule = REGISTRY["gpipe"](2, 2, 2)
    free = paper_fill(schedule, even(2), layers(0.5), threshold=0.0)
    assert (free.left_over, free.filled, free.iteration) == (0, 2, 9)
    late = paper_fill(schedule, even(2), layers(10), threshold=0.0)
    assert (late.left_over, late.filled, late.iteration) == (20, 0, 29)
    assert late.bubble_after == pytest.approx(1 - (12 + 40) / (2 * 29))


def test_a_partial_batch_is_used_where_the_whole_does_not_fit():
    schedule = REGISTRY["gpipe"](2, 2, 8)
    result = paper_fill(schedule, even(2), layers(0.25), threshold=0.0, partial_batches=(4, 8, 12))
    assert result.filled == 4.0
    whole_only = paper_fill(schedule, even(2), layers(0.25), threshold=0.0, partial_batches=())
    assert whole_only.left_over > result.left_over


def test_a_component_waits_for_those_it_reads():
    schedule = REGISTRY["gpipe"](2, 2, 1)
    frozen = layers(4, 0.5, components=("a", "b"))
    free, bound = (
        paper_fill(schedule, even(2), frozen, needs=needs, threshold=0.0) for needs in (((), ()), ((), (0,)))
    )
    assert (free.filled, bound.filled) == (1.0, 0.0)


@given(st.integers(0, 10_000))
@settings(max_examples=30)
def test_it_is_never_below_the_bound_of_any_filling(seed):
    case = random_case(seed, max_workers=5, max_samples=64)
    result = paper_fill(case.schedule, case.costs, case.frozen, threshold=0.0)
    least = fill_bound(case.graph.makespan, case.graph.busy, case.batch, case.frozen)
    assert result.iteration >= least * (1 - 1e-9)
    assert result.bubble_after >= -1e-9


def test_a_profiled_model_with_independent_encoders_is_filled():
    profile = synthetic.unet()
    stages = tuple(StageCosts(forward=0.02, backward=0.04) for _ in range(4))
    costs = Costs(stages=stages)
    result = paper_fill(REGISTRY["1f1b"](4, 8, 8), costs, frozen_layers(profile), needs=needs_of(profile))
    assert result.filled > 0
    assert result.iteration >= result.unfilled
