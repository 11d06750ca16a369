"""A march gives the times of the clock, and is stuck where no numbering of the events exists."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusionpipe.costs import Costs, Link, StageCosts
from diffusionpipe.errors import ScheduleError
from diffusionpipe.ir import Op, compute_action
from diffusionpipe.schedules.building.shapes import SPLIT, Pipe, schedule_of
from diffusionpipe.schedules.building.split_work import OPS, inputs_of
from diffusionpipe.timing import ends_of, graph_of, prices_of
from diffusionpipe.timing.march import NOTHING, march


def shuffled(letters_of_stages, num_microbatches, random, swaps):
    """A worker's letters, F before I before W of every micro-batch, else by chance: from fully ordered to wild."""
    order = [letter for _ in range(num_microbatches) for letter in letters_of_stages]
    for _ in range(swaps if len(order) > 1 else 0):
        at = random.randrange(len(order) - 1)
        one, other = order[at : at + 2]
        counts = {letter: order[:at].count(letter) for letter in (one, other)}
        if one // 3 != other // 3 or (other > one and counts[other] < counts[one]) or other < one:
            order[at], order[at + 1] = other, one
    return order


def actions_of(order):
    seen: dict[int, int] = {}
    for letter in order:
        seen[letter] = seen.get(letter, -1) + 1
        yield compute_action(letter // 3, OPS[letter % 3], seen[letter])


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=5).map(lambda homes: [sorted(set(homes)).index(h) for h in homes]),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 60),
    st.integers(0, 10**6),
)
def test_a_march_has_the_ends_of_the_clock_or_both_are_stuck(homes, num_microbatches, latency, swaps, seed):
    random = Random(seed)
    durations = [random.randrange(4) for _ in range(3 * len(homes))]
    costs = [StageCosts(forward=f, input_grad=i, weight_grad=w) for f, i, w in zip(*[iter(durations)] * 3, strict=True)]
    forwards, backwards = list(enumerate(homes)), list(enumerate(homes))[::-1]
    orders = [
        shuffled(
            [3 * s for s, home in forwards if home == worker]
            + [3 * s + op for s, home in backwards if home == worker for op in (1, 2)],
            num_microbatches,
            random,
            swaps,
        )
        for worker in range(max(homes) + 1)
    ]
    inputs = inputs_of(len(homes))
    lags = [0 if b == NOTHING or homes[b // 3] == homes[i // 3] else latency for i, b in enumerate(inputs)]
    ends = march(orders, durations, inputs, lags)

    pipe = Pipe(workers=tuple(homes), microbatches=(1,) * num_microbatches, ops=SPLIT)
    schedule = schedule_of("any", [pipe], [list(actions_of(order)) for order in orders])
    try:
        graph = graph_of(schedule)
    except ScheduleError:
        assert ends is None
        return
    prices = prices_of(graph.works, Costs(stages=tuple(costs), link=Link(latency=latency)))
    times = ends_of(graph, [prices[work] for work in graph.work])
    assert ends is not None
    for events, order in zip(graph.events, schedule.orders, strict=True):
        found = [ends[3 * a.stage + OPS.index(a.op)][a.microbatch] for a in order]
        assert found == [times[event] for event in events]


def test_two_workers_that_wait_for_each_other_are_stuck_and_one_after_the_other_is_not():
    chain = {"durations": [1] * 6, "waits_for": inputs_of(2), "lags": [0, 2, 0, 2, 0, 0]}
    assert inputs_of(2) == (NOTHING, 4, NOTHING, 0, NOTHING, NOTHING)
    ends = march([[0, 1, 0, 1, 2, 2], [3, 4, 5, 3, 4, 5]], **chain)
    assert ends == [[1, 9], [8, 16], [17, 18], [4, 12], [5, 13], [6, 14]]
    assert march([[0, 1, 2, 0, 1, 2], [3, 3, 4, 4, 5, 5]], **chain) is None


@pytest.mark.parametrize("op", [Op.F, Op.I, Op.W])
def test_every_op_of_a_march_takes_its_own_time(op):
    durations = [0, 0, 0]
    durations[OPS.index(op)] = 5
    ends = march([[0, 1, 2]], durations, inputs_of(1), [0, 0, 0])
    assert ends is not None
    assert ends[2] == [5]
