import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from ordering.instances import instances, value_of

from diffusionpipe.ordering import Goal, HalfStage, Instance, Placing, search
from diffusionpipe.ordering.bounds import lower_bound
from diffusionpipe.ordering.evaluation import figures_of, fits
from diffusionpipe.ordering.problem import problem_of

STORED = Path(__file__).parent / "optima.json"


def instance_of(table):
    return Instance(
        **{
            **table,
            "placement": Placing(table["placement"]),
            "objective": Goal(table["objective"]),
            "stages": tuple(HalfStage(**stage) for stage in table["stages"]),
            "memory_limit": tuple(table["memory_limit"]),
        }
    )


CASES = [(instance_of(row["instance"]), row["optimum"]) for row in json.loads(STORED.read_text(encoding="utf-8"))]


def distances(cases):
    """How much longer than the optimum the answers are."""
    found = [value_of(instance, search(instance)) / optimum - 1 for instance, optimum in cases]
    assert min(found) >= 0
    return found


def test_stored_optima_are_reached():
    quick = [(replace(instance, seconds=2), optimum) for instance, optimum in CASES[::8]]
    assert distances(quick) == [0] * len(quick)


@pytest.mark.slow
def test_nearly_all_stored_optima_are_reached_and_the_others_nearly():
    found = distances(CASES)
    assert max(found) <= 0.02
    assert found.count(0) >= 0.95 * len(found)


@pytest.mark.parametrize(("instance", "optimum"), CASES)
def test_no_bound_is_above_an_optimum(instance, optimum):
    assert lower_bound(problem_of(instance, instance.placement)) <= optimum


@pytest.mark.slow
@pytest.mark.parametrize(("instance", "optimum"), CASES)
def test_the_stored_optima_are_what_the_solver_proves(instance, optimum):
    pytest.importorskip("ortools")
    from benchmarks.ordering.exact import exact_order

    problem = problem_of(instance, instance.placement)
    found = exact_order(problem, time_limit=60)
    assert (found.value, found.is_proven) == (optimum, True)
    assert fits(problem, found.orders)
    figures = figures_of(problem, found.orders)
    assert (figures.window if problem.is_window else figures.makespan) == optimum


@pytest.mark.slow
@given(instance=instances(max_ranks=2, max_microbatches=3))
@settings(deadline=None, max_examples=40)
def test_the_search_is_never_better_than_the_solver(instance):
    pytest.importorskip("ortools")
    from benchmarks.ordering.exact import exact_order

    problem = problem_of(instance, instance.placement)
    answer = search(instance)
    assert exact_order(problem).value <= value_of(instance, answer) * problem.time_scale
