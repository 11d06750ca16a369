"""Recorded orders still open and take the same time, and today's search finds none that is worse."""

import json

import pytest
from golden.orders import FAMILIES, family_figures, recorded_orders, value_of
from kit.oracle import execute

from diffusionpipe.ordering import Goal, Placing, costs_of, schedule_of, search
from diffusionpipe.simulator import simulate
from diffusionpipe.timing.legal import check

TOLERANCE = 1e-9
ORDERS = recorded_orders()
CELLS = json.loads(FAMILIES.read_text(encoding="utf-8"))
SHARE = 10
"""One in so many runs always: of those that take least."""


def is_worse(value, than):
    return value > than * (1 + TOLERANCE)


def judged(instance, schedule, placement):
    """What is to be short, by the machine of tests/kit/oracle.py."""
    run = execute(schedule, costs_of(instance, Placing(placement)))
    windows = [ends[-1] - starts[0] for starts, ends in zip(run.starts, run.ends, strict=True)]
    return max(windows) if instance.objective is Goal.WINDOW else max(ends[-1] for ends in run.ends)


def parameters():
    by_size = sorted(ORDERS, key=lambda one: (one.asked["placement"] != "linear", len(one.schedule_file)))
    quick = {one.name for one in by_size[: len(ORDERS) // SHARE]}
    return [pytest.param(one, id=one.name, marks=() if one.name in quick else pytest.mark.slow) for one in ORDERS]


@pytest.mark.parametrize("order", parameters())
def test_a_recorded_order_is_legal_and_takes_the_recorded_time(order):
    schedule = order.schedule
    check(schedule)
    timeline = simulate(schedule, costs_of(order.instance, Placing(order.placement)))
    ranks = range(order.instance.ranks)
    assert timeline.makespan == pytest.approx(order.makespan, rel=TOLERANCE)
    assert max(timeline.window(rank) for rank in ranks) == pytest.approx(order.window, rel=TOLERANCE)
    limits = order.instance.memory_limit or ()
    assert all(timeline.peak_memory(rank) <= limit for rank, limit in enumerate(limits))


@pytest.mark.parametrize("order", parameters())
def test_the_search_finds_no_worse_order_than_the_recorded_one(order):
    """By the search's own figures and by a machine that shares nothing with it."""
    instance = order.instance
    answer = search(instance)
    found = value_of(instance, answer)
    assert not is_worse(found, than=order.value), f"{found} instead of {order.value}"
    assert judged(instance, schedule_of(answer), answer.placement) == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize(
    "cell",
    [pytest.param(one, id=one["cell"], marks=pytest.mark.slow if at > 1 else ()) for at, one in enumerate(CELLS)],
)
def test_a_family_takes_the_recorded_time_and_memory(cell):
    found = {name: family_figures(name, **cell["sizes"]) for name in cell["makespan_and_peak"]}
    assert found == cell["makespan_and_peak"]


def test_an_order_that_is_worse_by_one_tick_is_noticed():
    assert all(is_worse(order.value + 1, than=order.value) for order in ORDERS)
    assert not any(is_worse(order.value, than=order.value) for order in ORDERS)


def test_sixty_instances_of_the_ordering_benchmark_are_recorded():
    assert sum(order.name.startswith("ordering-") for order in ORDERS) == 60
