from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner.search.formulas import critical_path, pivot_latency, planning_bound

from diffusionpipe.planner.search.dynamic_program import Question, best_partitions
from diffusionpipe.planner.search.objectives import CriticalPath, PivotLatency, PlanningBound

OBJECTIVES = [(CriticalPath, critical_path), (PlanningBound, planning_bound), (PivotLatency, pivot_latency)]


@st.composite
def questions(draw: st.DrawFn) -> Question:
    """Layers with their own times and parameters, devices with their own speeds and memories, skips over the cuts."""
    num_layers, num_devices = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    small = st.integers(1, 9)
    forward = draw(st.lists(small, min_size=num_layers, max_size=num_layers))
    backward = draw(st.lists(small, min_size=num_layers, max_size=num_layers))
    weights = draw(st.lists(st.integers(0, 20), min_size=num_layers, max_size=num_layers))
    crossing = draw(st.lists(st.integers(0, 12), min_size=num_layers, max_size=num_layers))
    speeds = draw(st.lists(st.integers(1, 3), min_size=num_devices, max_size=num_devices))
    memories = draw(st.lists(st.integers(5, 60), min_size=num_devices, max_size=num_devices))
    crosses_node = draw(st.lists(st.integers(1, 3), min_size=num_devices, max_size=num_devices))

    def stage(first, stop, position, replicas, stages):
        held = sum(weights[first:stop]) + stages * (stop - first)
        if held > min(memories[position : position + replicas]):
            return None
        slow = 12 / (min(speeds[position : position + replicas]) * replicas)
        reduce = sum(weights[first:stop]) * 12 * (replicas - 1) / replicas
        return sum(forward[first:stop]) * slow, sum(backward[first:stop]) * slow, reduce

    def link(cut, position, senders, receivers):
        seconds = 12 * crossing[cut] * crosses_node[position] / min(senders, receivers)
        return seconds, seconds / 2

    replicas = draw(st.sets(st.integers(1, num_devices), min_size=1))
    return Question(
        num_layers=num_layers,
        num_devices=num_devices,
        max_stages=draw(st.integers(1, num_devices)),
        replicas=tuple(sorted(replicas)),
        stage=stage,
        link=link,
    )


def all_values(question: Question, formula, microbatches: int) -> Iterator[float]:
    """The formula's value of every legal partition, one after the other."""
    for stages in range(1, min(question.max_stages, question.num_layers) + 1):
        for replicas in product(question.replicas, repeat=stages):
            if sum(replicas) != question.num_devices:
                continue
            for cuts in combinations(range(1, question.num_layers), stages - 1):
                starts, stops = (0, *cuts), (*cuts, question.num_layers)
                positions = [sum(replicas[:s]) for s in range(stages)]
                times = [
                    question.stage(starts[s], stops[s], positions[s], replicas[s], stages - s) for s in range(stages)
                ]
                links = [question.link(starts[s], positions[s], replicas[s - 1], replicas[s]) for s in range(1, stages)]
                if None not in times:
                    yield formula(microbatches, times, links)


@pytest.mark.parametrize(("objective", "formula"), OBJECTIVES)
@given(question=questions(), microbatches=st.integers(1, 8))
def test_the_best_partition_is_the_best_of_all_partitions(objective, formula, question, microbatches):
    values = list(all_values(question, formula, microbatches))
    found = best_partitions(question, objective(microbatches), width=10_000)
    if not values:
        assert found == ()
    else:
        assert found[0].value == pytest.approx(min(values), rel=1e-12)


@pytest.mark.parametrize(("objective", "formula"), OBJECTIVES)
@given(question=questions(), microbatches=st.integers(1, 8))
def test_every_partition_has_the_value_of_its_formula(objective, formula, question, microbatches):
    for found in best_partitions(question, objective(microbatches)):
        stages = len(found.starts)
        assert sum(found.replicas) == question.num_devices
        assert stages <= question.max_stages
        stops = (*found.starts[1:], question.num_layers)
        positions = [sum(found.replicas[:s]) for s in range(stages)]
        times = [
            question.stage(found.starts[s], stops[s], positions[s], found.replicas[s], stages - s)
            for s in range(stages)
        ]
        links = [
            question.link(found.starts[s], positions[s], found.replicas[s - 1], found.replicas[s])
            for s in range(1, stages)
        ]
        assert formula(microbatches, times, links) == pytest.approx(found.value, rel=1e-12)


@given(question=questions(), microbatches=st.integers(1, 8))
def test_partitions_come_best_first_and_each_once(question, microbatches):
    found = best_partitions(question, CriticalPath(microbatches))
    assert [p.value for p in found] == sorted(p.value for p in found)
    assert len({(p.starts, p.replicas) for p in found}) == len(found)


@given(question=questions(), microbatches=st.integers(1, 8), cap=st.integers(12, 400))
def test_a_cap_with_its_shortcuts_leaves_out_only_partitions_with_a_dearer_stage(question, microbatches, cap):
    def stage(first, stop, position, replicas, stages):
        times = question.stage(first, stop, position, replicas, stages)
        return times if times and times[0] + times[1] <= cap else None

    capped = replace(question, stage=stage)
    values = list(all_values(capped, critical_path, microbatches))
    found = best_partitions(capped, CriticalPath(microbatches), width=10_000)
    assert [p.value for p in found[:1]] == pytest.approx([min(values)] if values else [])


def test_a_narrow_front_keeps_the_best_values():
    def stage(first, stop, position, replicas, stages):
        return float(stop - first), 0.0, float(10 * first)

    question = Question(
        num_layers=6, num_devices=2, max_stages=2, replicas=(1,), stage=stage, link=lambda *_: (0.0, 0.0)
    )
    wide = best_partitions(question, CriticalPath(4), width=100)
    assert best_partitions(question, CriticalPath(4), width=1)[0] == wide[0]


def test_fewer_min_stages_than_found_are_left_out():
    def stage(first, stop, position, replicas, stages):
        return float(stop - first) / replicas, 0.0, 0.0

    question = Question(
        num_layers=4, num_devices=2, max_stages=2, replicas=(1, 2), stage=stage, link=lambda *_: (9.0, 9.0)
    )
    assert best_partitions(question, CriticalPath(4))[0].replicas == (2,)
    assert {len(p.starts) for p in best_partitions(replace(question, min_stages=2), CriticalPath(4))} == {2}


def test_the_critical_path_of_uniform_stages_without_links_counts_every_link_as_a_stage():
    assert critical_path(8, [(1.0, 2.0, 0.0)] * 4, [(1.0, 2.0)] * 3) == (8 + 2 * 4 - 2) * 3


def test_a_gradient_sum_behind_the_first_stage_is_hidden_by_the_backwards_before_it():
    stages = [(1.0, 2.0, 0.0), (1.0, 2.0, 2.5)]
    assert critical_path(1, stages, [(0.0, 0.25)]) == 3 * 3 + 0.25


def test_pivot_latency_of_one_stage_is_all_its_work_and_its_sum():
    assert pivot_latency(5, [(1.0, 2.0, 4.0)], []) == 5 * 3 + 4


def test_pivot_latency_of_uniform_stages_is_that_of_1f1b():
    assert pivot_latency(8, [(1.0, 2.0, 0.0)] * 4, [(0.0, 0.0)] * 3) == (8 + 4 - 1) * 3
