from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.strategies import costs_of, schedules, trainers
from planner import synthetic
from planner.filling.exact_fill import exact_fill
from planner.filling.fill_cases import random_case, random_layers, small_case

from diffusionpipe.costs import Costs, Link, StageCosts
from diffusionpipe.errors import ConfigError, ScheduleError
from diffusionpipe.ir import Edge, Op, Range
from diffusionpipe.passes import PlacedFill, communicate, connect, insert_encoding, insert_fills, reduce_gradients
from diffusionpipe.planner.filling.compute_graph import compute_graph
from diffusionpipe.planner.filling.fills import (
    FillOptions,
    FrozenLayers,
    fill_bound,
    fill_costs,
    frozen_layers,
    plan_fills,
)
from diffusionpipe.schedules import REGISTRY, one_f_one_b
from diffusionpipe.simulator import simulate
from diffusionpipe.timing.legal import check

seeds = st.integers(0, 10_000)
QUICK = FillOptions(is_thorough=False)


def filled(case, plan):
    return insert_fills(case.schedule, plan.fills, block=99, outputs={0: ("latents",)})


def planned(case, options=None):
    return plan_fills(case.schedule, case.costs, case.frozen, options)


def starts_of(timeline):
    return {(s.worker, s.action): s.start for s in timeline.spans if s.action.op not in (Op.ENCODE, Op.REDUCE_GRAD)}


def test_iterations_of_200_random_cases_stay_within_two_percent_and_a_sample_of_the_bound():
    for seed in range(200):
        case = random_case(seed, fixed=(0, 0.1))
        plan = planned(case)
        assert plan.iteration <= 1.02 * plan.bound + case.sample_seconds, seed


@pytest.mark.parametrize("seed", [540, 753, 804, 858, 1551, 1831])
def test_cases_whose_samples_are_longer_than_most_waits_stay_within_it_too(seed):
    case = random_case(seed, fixed=(0, 0.1))
    plan = planned(case)
    assert plan.iteration <= 1.02 * plan.bound + case.sample_seconds
    assert_sound(case, plan)


def assert_sound(case, plan):
    schedule = filled(case, plan)
    check(schedule)
    assert sum(plan.shares) == case.batch
    assert max(len(fill.samples) for fills in plan.fills.values() for fill in fills) <= plan.chunk
    timeline = simulate(schedule, fill_costs(case.costs, plan))
    assert timeline.makespan == pytest.approx(plan.iteration, rel=1e-9)


@given(seeds, st.booleans())
@settings(max_examples=15, deadline=None)
def test_every_layer_runs_once_on_every_sample_and_the_simulator_agrees_with_the_plan(seed, is_thorough):
    case = random_case(seed, max_workers=5, max_samples=64)
    plan = planned(case, FillOptions(is_thorough=is_thorough, overhead=0.01))
    schedule = filled(case, plan)
    check(schedule)
    assert sum(plan.shares) == case.batch
    for fill in (fill for fills in plan.fills.values() for fill in fills):
        assert {case.frozen.components[layer] for layer in range(fill.layers.start, fill.layers.stop)} == {
            fill.component
        }
        assert 0 < len(fill.samples) <= plan.chunk
    timeline = simulate(schedule, fill_costs(case.costs, plan))
    assert timeline.makespan == pytest.approx(plan.iteration, rel=1e-9)
    assert timeline.bubble == pytest.approx(plan.bubble_after, abs=1e-9)


@given(seeds)
@settings(max_examples=15, deadline=None)
def test_compute_starts_later_only_where_something_would_be_exposed_else(seed):
    case = random_case(seed, max_workers=5, max_samples=64)
    plan, unshifted = planned(case), planned(case, QUICK)
    before = starts_of(simulate(case.schedule, case.costs))
    after = starts_of(simulate(filled(case, unshifted), fill_costs(case.costs, unshifted)))
    assert not unshifted.is_shifted
    assert after == pytest.approx(before, rel=1e-9)
    assert unshifted.exposed > 0 or not plan.is_shifted
    assert plan.iteration <= unshifted.iteration


@given(schedules(families=trainers), st.data())
@settings(max_examples=60, deadline=None)
def test_any_schedule_with_replicas_skips_and_reductions_can_be_filled(schedule, data):
    if schedule.fills:
        return
    costs = data.draw(costs_of(schedule))
    frozen = random_layers(Random(data.draw(seeds)), data.draw(st.integers(1, 5)), 1.0, (0, 1))
    graph = compute_graph(schedule, costs)
    plain = simulate(schedule, costs)
    assert graph.makespan == plain.makespan
    assert graph.busy == tuple(plain.busy(worker) for worker in range(schedule.num_workers))
    plan = plan_fills(schedule, costs, frozen)
    schedule = insert_fills(schedule, plan.fills, block=99, outputs={0: ("text",)})
    check(schedule)
    timeline = simulate(schedule, fill_costs(costs, plan))
    assert timeline.makespan == pytest.approx(plan.iteration, rel=1e-9)
    check(communicate(schedule, timeline))


@given(schedules(families=trainers), st.data())
@settings(max_examples=15, deadline=None)
def test_fills_count_the_waits_of_messages_for_each_other_where_these_are_explicit(schedule, data):
    if schedule.fills:
        return
    costs = data.draw(costs_of(schedule))
    explicit = communicate(schedule, simulate(schedule, costs))
    graph, queued = compute_graph(explicit, costs), simulate(explicit, costs)
    assert graph.makespan == queued.makespan
    assert graph.busy == tuple(queued.busy(worker) for worker in range(schedule.num_workers))
    assert graph.places == compute_graph(schedule, costs).places


@pytest.mark.parametrize("worker", [0, 1])
def test_fills_that_take_no_time_delay_no_message(worker):
    """A message once counted a short fill as compute during which it could travel."""
    chain = connect(one_f_one_b(2, 8), [Edge(producer=0, consumer=1, tensors=("x",), gradients=("x",))])
    schedule, costs = chain, Costs(stages=(StageCosts(forward=4, backward=8),) * 2, link=Link(3))
    batch, places = Range(0, schedule.placement.num_samples), range(len(schedule.orders[worker]))
    fills = [PlacedFill(position=i, component="v", layers=Range(i, i + 1), samples=batch) for i in places]
    filled = insert_fills(schedule, {worker: fills}, block=99, outputs={})
    free = replace(costs, stages=(*costs.stages, StageCosts(forward=0, backward=0)), fills=(0,) * len(fills))
    ways = (schedule, costs), (filled, free)
    plain, same = (simulate(communicate(one, simulate(one, own)), own).makespan for one, own in ways)
    assert same == plain


@given(seeds)
@settings(max_examples=15, deadline=None)
def test_no_plan_is_below_the_bounds(seed):
    case = random_case(seed, max_workers=5, max_samples=64, fixed=(0, 2))
    plan = planned(case)
    least = fill_bound(case.graph.makespan, case.graph.busy, case.batch, case.frozen)
    assert plan.iteration >= max(plan.bound, least, plan.unfilled) * (1 - 1e-9)
    assert plan.exposed >= 0
    assert plan.bubble_after + 1e-12 >= 0


@given(seeds, st.floats(0.05, 0.95))
@settings(max_examples=15, deadline=None)
def test_less_frozen_work_takes_no_longer(seed, part):
    case = random_case(seed, max_workers=5, max_samples=64, fixed=(0, 0.1))
    forward = case.frozen.forward
    less = replace(
        case, frozen=FrozenLayers(components=case.frozen.components, forward=lambda i, n: part * forward(i, n))
    )
    assert planned(less).iteration <= planned(case).iteration * 1.02


def test_small_cases_are_within_a_percent_of_the_exact_solver_in_the_mean():
    pytest.importorskip("scipy")
    ratios = []
    for seed in range(25):
        case = small_case(seed)
        best = exact_fill(case.schedule, case.costs, case.frozen)
        check(filled(case, best))
        timeline = simulate(filled(case, best), fill_costs(case.costs, best))
        assert timeline.makespan == pytest.approx(best.iteration, rel=1e-6)
        ratios.append(planned(case).iteration / best.iteration)
    assert min(ratios) >= 1 - 1e-6
    assert sum(ratios) / len(ratios) <= 1.01
    assert any(ratio < 1 + 1e-6 for ratio in ratios)


def one_layer(seconds):
    return FrozenLayers(components=("vae",), forward=lambda layer, samples: seconds * samples)


def even(schedule, **costs):
    stages = tuple(StageCosts(forward=1, backward=2) for _ in schedule.placement.stages)
    return Costs(stages=stages, **costs)


def test_work_that_fits_costs_nothing():
    schedule = REGISTRY["1f1b"](4, 8, 2)
    plan = plan_fills(schedule, even(schedule), one_layer(0.5))
    assert plan.exposed == 0
    assert not plan.is_shifted
    assert plan.bubble_after == pytest.approx(1 - (8 * 3 * 4 + 8) / (4 * plan.unfilled))


def test_the_wait_for_reductions_is_filled():
    schedule = reduce_gradients(REGISTRY["gpipe"](2, 2), is_data_parallel=True)
    plan = plan_fills(schedule, even(schedule, reduces=(10, 10)), one_layer(5))
    assert plan.unfilled == 19
    assert plan.iteration == 19
    assert {fill.position for fills in plan.fills.values() for fill in fills} == {5}


def test_workers_without_the_frozen_layers_encode_nothing():
    schedule = REGISTRY["1f1b"](4, 8, 2)
    plan = plan_fills(schedule, even(schedule), one_layer(1), FillOptions(workers=(1, 3)))
    assert set(plan.fills) == {1, 3}
    assert plan.iteration >= fill_bound(plan.unfilled, (24.0,) * 4, 16, one_layer(1), FillOptions(workers=(1, 3)))


def test_faster_workers_get_more_samples():
    schedule = REGISTRY["gpipe"](2, 4, 8)
    plan = plan_fills(schedule, even(schedule), one_layer(3), FillOptions(speeds=(1.0, 3.0)))
    assert 2.5 < plan.shares[1] / plan.shares[0] < 3.5
    seconds = dict(zip([w for w in plan.fills for _ in plan.fills[w]], plan.seconds, strict=True))
    assert set(seconds) == {0, 1}


def test_no_chunk_exceeds_what_memory_allows():
    schedule = REGISTRY["gpipe"](2, 4, 16)
    plan = plan_fills(schedule, even(schedule), one_layer(0.1), FillOptions(max_chunk=3))
    assert max(len(fill.samples) for fills in plan.fills.values() for fill in fills) <= 3


def test_a_layer_longer_than_every_wait_is_split_by_samples():
    schedule = REGISTRY["1f1b"](2, 4, 4)
    plan = plan_fills(schedule, even(schedule), one_layer(0.25))
    assert plan.exposed == 0
    for fills in plan.fills.values():
        for one, other in pairwise(fills):
            assert one.samples.stop == other.samples.start


def test_large_chunks_are_used_where_calls_are_expensive():
    schedule = REGISTRY["gpipe"](4, 4, 16)
    frozen = FrozenLayers(components=("text",) * 3, forward=lambda layer, samples: 0.5 + 0.01 * samples)
    plan = plan_fills(schedule, even(schedule), frozen)
    assert plan.chunk >= 16
    assert plan.frozen < 12 * (0.5 + 0.16) + 4


def test_a_profiled_model_is_filled_by_its_frozen_layers_in_order():
    frozen = frozen_layers(synthetic.unet())
    assert {*frozen.components} == {"vae", "text_encoder", "objective"}
    schedule = REGISTRY["1f1b"](4, 8, 8)
    stages = tuple(StageCosts(forward=0.02, backward=0.04) for _ in range(4))
    plan = plan_fills(schedule, Costs(stages=stages), frozen)
    assert plan.iteration <= 1.02 * plan.bound + frozen.running(1)[-1]
    check(insert_fills(schedule, plan.fills, block=99, outputs={}))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (FillOptions(chunks=()), "at least 1 sample"),
        (FillOptions(max_chunk=0), "at least 1 sample"),
        (FillOptions(workers=(7,)), r"workers \(7,\)"),
        (FillOptions(workers=()), "hold the frozen layers"),
        (FillOptions(speeds=(1.0,)), "for 2 workers"),
        (FillOptions(speeds=(1.0, 0.0)), "positive"),
        (FillOptions(overhead=-1.0), "overhead=-1.0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, problem):
    schedule = REGISTRY["gpipe"](2, 2)
    with pytest.raises(ConfigError, match=problem):
        plan_fills(schedule, even(schedule), one_layer(1), options)


def test_no_frozen_layers_and_schedules_with_frozen_work_are_refused():
    schedule = REGISTRY["gpipe"](2, 2)
    with pytest.raises(ConfigError, match="no frozen layers"):
        plan_fills(schedule, even(schedule), FrozenLayers(components=(), forward=lambda layer, samples: 1.0))
    encoded = insert_encoding(schedule, block=9, outputs={}, num_layers=1, max_chunk=1)
    with pytest.raises(ScheduleError, match="before fills are inserted"):
        plan_fills(encoded, even(schedule), one_layer(1))
