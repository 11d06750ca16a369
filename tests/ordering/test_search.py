from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ordering.instances import (
    PLACINGS,
    instances,
    least_memory,
    ranks_of_halves,
    recounted_peaks,
    value_of,
)

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Op
from diffusionpipe.ordering import Goal, HalfStage, Instance, Placing, costs_of, schedule_of, search
from diffusionpipe.ordering.bounds import lower_bound
from diffusionpipe.ordering.evaluation import figures_of, fits
from diffusionpipe.ordering.families import family_orders
from diffusionpipe.ordering.problem import problem_of
from diffusionpipe.simulator import simulate
from diffusionpipe.timing.legal import check

settings.register_profile("ordering", deadline=None, max_examples=10)
UNIT = HalfStage(forward=1, input_grad=1, weight_grad=1, activation=1, kept_after_input_grad=1)


def unit_instance(ranks, microbatches, placing, halves, objective=Goal.MAKESPAN, seconds=1):
    return Instance(
        ranks=ranks, microbatches=microbatches, placement=placing, stages=(UNIT,) * (2 * ranks), comm=0,
        memory_limit=None if halves is None else (halves,) * ranks, objective=objective, seconds=seconds,
    )  # fmt: skip


@given(instance=instances())
@settings(settings.get_profile("ordering"))
def test_answers_are_legal_and_the_simulator_agrees_with_their_figures(instance):
    answer = search(instance)
    schedule = schedule_of(answer)
    check(schedule)
    timeline = simulate(schedule, costs_of(instance, answer.placement))
    assert timeline.makespan == answer.makespan
    spans = [[span for span in timeline.spans if span.worker == rank] for rank in range(instance.ranks)]
    assert max(max(s.end for s in own) - min(s.start for s in own) for own in spans) == answer.window
    busy = sum(timeline.busy(rank) for rank in range(instance.ranks))
    assert answer.bubble == pytest.approx(1 - busy / (instance.ranks * value_of(instance, answer)))


@given(instance=instances())
@settings(settings.get_profile("ordering"))
def test_answers_fit_into_memory_and_keep_to_the_bound(instance):
    answer = search(instance)
    assert recounted_peaks(instance, answer) == list(answer.peak_memory)
    if instance.memory_limit is not None:
        assert all(peak <= limit for peak, limit in zip(answer.peak_memory, instance.memory_limit, strict=True))
    assert answer.lower_bound <= value_of(instance, answer)
    assert answer.optimal == (answer.lower_bound == value_of(instance, answer))


@given(instance=instances())
@settings(settings.get_profile("ordering"))
def test_no_family_that_fits_is_better_and_none_beats_the_bound(instance):
    value = value_of(instance, search(instance))
    problem = problem_of(instance, instance.placement)
    for _, orders in family_orders(problem):
        figures = figures_of(problem, orders)
        reached = figures.window if problem.is_window else figures.makespan
        assert lower_bound(replace(problem, limits=figures.peaks)) <= reached
        if fits(problem, orders):
            assert value <= reached


@given(instance=instances(), factor=st.integers(2, 3))
@settings(settings.get_profile("ordering"))
def test_more_memory_in_proportion_never_makes_it_longer(instance, factor):
    needs = least_memory(instance.stages, instance.placement, instance.ranks)
    limits = [tuple(step * need for need in needs) for step in (1, factor, 2 * factor)]
    values = [value_of(instance, search(replace(instance, memory_limit=limit))) for limit in [*limits, None]]
    assert all(more <= less for less, more in pairwise(values))


@given(instance=instances())
@settings(settings.get_profile("ordering"))
def test_more_seconds_never_make_it_longer(instance):
    values = [value_of(instance, search(replace(instance, seconds=seconds))) for seconds in (0, 0.004, 0.012)]
    assert all(more <= less for less, more in pairwise(values))


@given(instance=instances(max_ranks=2, max_microbatches=4))
@settings(settings.get_profile("ordering"), max_examples=10)
def test_any_is_the_best_of_the_placements(instance):
    values = []
    for placing in PLACINGS:
        try:
            values.append(value_of(instance, search(replace(instance, placement=placing))))
        except ConfigError:
            continue
    assert value_of(instance, search(replace(instance, placement=Placing.ANY))) == min(values)


@given(instance=instances())
@settings(settings.get_profile("ordering"), max_examples=10)
def test_the_same_question_has_the_same_answer(instance):
    assert search(instance) == search(instance)


@pytest.mark.parametrize("placing", PLACINGS)
def test_the_least_memory_works_and_less_is_refused_by_rank(placing):
    stages = tuple(replace(UNIT, activation=1 + half, kept_after_input_grad=1) for half in range(6))
    instance = replace(unit_instance(3, 4, placing, None), stages=stages)
    needs = least_memory(stages, placing, 3)
    answer = search(replace(instance, memory_limit=tuple(needs)))
    assert list(answer.peak_memory) == needs
    with pytest.raises(ConfigError, match=rf"rank 1 has {needs[1] - 1}; .* needs at least {needs[1]}"):
        search(replace(instance, memory_limit=(needs[0], needs[1] - 1, needs[2])))


@pytest.mark.parametrize(
    ("p", "m", "placing", "objective", "halves", "expected"),
    [
        (4, 8, Placing.LINEAR, Goal.MAKESPAN, 8, 27),  # ZB-1p
        (4, 8, Placing.LINEAR, Goal.WINDOW, 16, 24),  # ZB-2p
        (8, 16, Placing.LINEAR, Goal.MAKESPAN, 16, 55),
        (8, 16, Placing.V, Goal.WINDOW, 16, 48),  # ZB-V: 3 m in the memory of 1F1B
        (8, 16, Placing.V, Goal.MAKESPAN, 16, 51.5),
        (8, 16, Placing.V, Goal.MAKESPAN, 12, 53.5),  # a building block between V-Half and ZB-V
    ],
)
def test_the_published_times_are_reached(p, m, placing, objective, halves, expected):
    instance = unit_instance(p, m, placing, halves, objective)
    assert 2 * expected == value_of(instance, search(instance))


def test_the_window_of_an_answer_is_not_its_makespan():
    answer = search(unit_instance(4, 8, Placing.LINEAR, 16, Goal.WINDOW))
    assert (answer.window, answer.optimal, answer.bubble) == (48, True, 0)
    assert answer.makespan > answer.window


def test_the_published_window_of_zb_v_at_unequal_times_is_reached():
    """F = 10, I = 12, W = 8, latency 1: published is a window bubble of .059, 1530 of which 1440 are busy."""
    half = replace(UNIT, forward=10, input_grad=12, weight_grad=8)
    instance = replace(unit_instance(8, 24, Placing.V, 16, Goal.WINDOW), stages=(half,) * 16, comm=1)
    answer = search(instance)
    assert answer.window <= 1530
    assert max(answer.peak_memory) <= 16
    assert answer.makespan > search(replace(instance, objective=Goal.MAKESPAN)).makespan


def test_decimals_are_exact():
    tenth = replace(UNIT, forward=0.1, input_grad=0.2, weight_grad=0.1, activation=0.1, kept_after_input_grad=0.1)
    instance = replace(unit_instance(1, 3, Placing.LINEAR, None), stages=(tenth, tenth), memory_limit=(0.2,))
    answer = search(instance)
    assert (answer.makespan, answer.peak_memory, answer.optimal) == (2.4, (0.2,), True)


def test_the_schedule_has_the_workers_of_the_placement_and_split_backwards():
    answer = search(unit_instance(3, 3, Placing.V, None))
    schedule = schedule_of(answer, microbatch_size=2)
    assert [stage.worker for stage in schedule.placement.stages] == ranks_of_halves(Placing.V, 3)
    (pipeline,) = schedule.placement.pipelines
    assert pipeline.ops == {Op.F, Op.I, Op.W}
    assert pipeline.microbatches == (2, 2, 2)


def test_many_microbatches_are_not_worse_than_the_families():
    instance = unit_instance(4, 40, Placing.V, 6)
    answer = search(instance)
    assert all(peak <= 6 for peak in answer.peak_memory)
    problem = problem_of(instance, Placing.V)
    fitting = [figures_of(problem, orders).makespan for _, orders in family_orders(problem) if fits(problem, orders)]
    assert answer.makespan <= min(fitting)
