from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.split_times import simulated
from kit.strategies import durations

from diffusionpipe.costs import StageCosts
from diffusionpipe.errors import ScheduleError
from diffusionpipe.ir import Action, Op
from diffusionpipe.schedules.building.shapes import linear, loop, wave
from diffusionpipe.schedules.building.split_work import SplitWork, peaks, schedule_of_work
from diffusionpipe.schedules.building.squeeze import best_squeezed
from diffusionpipe.timing.legal import check

times = st.one_of(durations, st.just(0), st.floats(0.001, 9))


def one_by_one(work):
    """Each micro-batch is finished before the next one begins."""
    orders = [[] for _ in work.limits]
    for microbatch in range(work.num_microbatches):
        for stage, worker in enumerate(work.workers):
            orders[worker].append(Action(stage=stage, op=Op.F, microbatch=microbatch))
        for stage, worker in reversed(list(enumerate(work.workers))):
            orders[worker] += [Action(stage=stage, op=op, microbatch=microbatch) for op in (Op.I, Op.W)]
    return orders


@st.composite
def works(draw):
    p, m = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    workers = draw(st.sampled_from([linear(p), wave(p, 2), loop(p, 2), wave(p, 3)]))
    costs = []
    for _ in workers:
        activation = draw(st.integers(0, 5))
        kept = draw(st.integers(0, activation))
        costs.append(
            StageCosts(
                forward=draw(times),
                input_grad=draw(times),
                weight_grad=draw(times),
                activation=activation,
                kept_after_input_grad=kept,
            )
        )
    needs = [sum(c.activation for c, home in zip(costs, workers, strict=True) if home == w) for w in range(p)]
    limits = tuple(need + draw(st.integers(0, 20)) for need in needs)
    return SplitWork(workers=workers, num_microbatches=m, costs=tuple(costs), latency=draw(times), limits=limits)


def makespan(work, orders):
    return simulated(schedule_of_work("test", work, orders, 1), work.costs, work.latency).makespan


@given(works())
def test_squeezed_orders_are_legal_fit_into_memory_and_are_no_longer(work):
    given_orders = one_by_one(work)
    orders = best_squeezed(work, [given_orders])
    check(schedule_of_work("test", work, orders, 1))
    assert all(peak <= limit for peak, limit in zip(peaks(work.costs, orders), work.limits, strict=True))
    assert makespan(work, orders) <= makespan(work, given_orders) * (1 + 1e-6)


@given(works())
def test_peaks_are_those_of_the_simulator(work):
    orders = best_squeezed(work, [one_by_one(work)])
    timeline = simulated(schedule_of_work("test", work, orders, 1), work.costs, work.latency)
    if all(min(c.forward, c.input_grad, c.weight_grad) > 0 for c in work.costs):
        assert peaks(work.costs, orders) == [timeline.peak_memory(worker) for worker in range(len(work.limits))]


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_microbatches_one_by_one_become_as_short_as_zero_bubble(p):
    m = 3 * p
    chain = SplitWork(workers=linear(p), num_microbatches=m, costs=(StageCosts(),) * p, limits=(p,) * p)
    assert makespan(chain, best_squeezed(chain, [one_by_one(chain)])) == 3 * m + p - 1
    v = SplitWork(workers=wave(p, 2), num_microbatches=m, costs=(StageCosts(),) * (2 * p), limits=(2 * p,) * p)
    assert makespan(v, best_squeezed(v, [one_by_one(v)])) == 6 * m + p - 1


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("durations", list(product((1, 3), repeat=3)))
def test_two_stages_and_two_microbatches_come_close_to_the_best_of_all_orders(durations, limit):
    forward, input_grad, weight_grad = durations
    costs = StageCosts(forward=forward, input_grad=input_grad, weight_grad=weight_grad)
    work = SplitWork(workers=(0, 1), num_microbatches=2, costs=(costs, costs), limits=(limit, limit))
    found = makespan(work, best_squeezed(work, [one_by_one(work)]))
    assert best_of_all(work) <= found <= best_of_all(work) + 1


def best_of_all(work):
    actions = [Action(stage=0, op=op, microbatch=m) for op in (Op.F, Op.I, Op.W) for m in (0, 1)]
    sequences = [
        sequence
        for sequence in permutations(actions)
        if all(sequence.index(a) < sequence.index(b) for a, b in ordered(actions))
        and peaks(work.costs, [sequence])[0] <= work.limits[0]
    ]
    second = [[Action(stage=1, op=a.op, microbatch=a.microbatch) for a in s] for s in sequences]
    return min(makespan(work, pair) for pair in product(sequences, second) if can_run(work, pair))


def can_run(work, orders):
    try:
        check(schedule_of_work("test", work, orders, 1))
    except ScheduleError:
        return False
    return True


def ordered(actions):
    """What comes first: F, I, W of a micro-batch, and micro-batch 0 before 1, as both are the same."""
    for a, b in product(actions, repeat=2):
        is_same_microbatch = a.microbatch == b.microbatch and "FIW".index(a.op) < "FIW".index(b.op)
        if is_same_microbatch or (a.op is b.op and a.microbatch < b.microbatch):
            yield a, b
