import pytest
from kit.tiers import quick_and_slow

from diffusionpipe.ir import Op
from diffusionpipe.schedules.families.bitpipe import bitpipe
from diffusionpipe.schedules.families.chimera import chimera
from diffusionpipe.simulator import activations_in_flight, simulate, uniform_costs
from diffusionpipe.timing.legal import check

EVEN = range(2, 17, 2)


def simulated(p, m, **times):
    schedule = bitpipe(p, m)
    return simulate(schedule, uniform_costs(schedule, **times))


def forward_order(schedule, worker):
    """Numbers as in the paper's code: micro-batches down, then up; p more on the way back."""
    p, (down, up) = schedule.num_workers, schedule.placement.pipelines
    numbers = []
    for action in schedule.orders[worker]:
        if action.op is Op.F:
            is_up = action.stage in up.stages
            is_back = schedule.placement.stages[action.stage].weights >= p
            numbers.append(action.microbatch + len(down.microbatches) * is_up + p * is_back)
    return numbers


def test_the_forwards_of_a_unit_are_in_the_papers_order():
    schedule = bitpipe(4, 4)
    assert [forward_order(schedule, worker) for worker in range(4)] == [
        [0, 1, 2, 6, 3, 7, 4, 5],
        [0, 2, 1, 3, 6, 4, 7, 5],
        [2, 0, 3, 1, 4, 6, 5, 7],
        [2, 3, 0, 4, 1, 5, 6, 7],
    ]


@pytest.mark.parametrize("p", EVEN)
def test_the_papers_formulas_hold_where_their_assumptions_do(p):
    for m in (p, 2 * p, 3 * p, 4 * p):
        timeline = simulated(p, m, backward=1)
        assert timeline.makespan == 4 * m + p - 2
        assert timeline.bubble == pytest.approx((p - 2) / (4 * m + p - 2))
    timeline = simulated(p, p, backward=2)
    assert timeline.makespan == 6 * p + 2 * (p - 2)
    assert timeline.bubble == pytest.approx((p - 2) / (3 * p + p - 2))


def test_two_units_of_double_backwards_wait_in_between():
    assert simulated(8, 16, backward=2).bubble == pytest.approx(0.158, abs=5e-4)  # the formula says 0.111
    assert simulated(8, 16, backward=2).makespan == 114


@pytest.mark.parametrize("p", EVEN)
def test_the_bubble_of_one_unit_is_half_of_chimeras(p):
    schedule = chimera(p, p)
    whole = simulate(schedule, uniform_costs(schedule, forward=2, backward=4))
    idle, idle_of_chimera = simulated(p, p).makespan - 6 * p, whole.makespan - 6 * p
    assert 2 * idle == idle_of_chimera


@pytest.mark.parametrize("p", EVEN)
def test_activations_in_flight_in_stages_of_half_the_size(p):
    for m in (p, 2 * p, 48):
        in_flight = activations_in_flight(bitpipe(p, m))
        assert max(in_flight) <= 2 * p
    assert activations_in_flight(bitpipe(4, 8)) == (7, 8, 8, 7)


@pytest.mark.parametrize("p", quick_and_slow(EVEN, quick=(2, 4, 8)))
def test_many_sizes_are_legal_and_send_nothing_where_a_pipe_turns(p):
    for m in sorted({2, 3, p + 1, 2 * p, 4 * p}):
        schedule = bitpipe(p, m)
        check(schedule)
        assert sum(action.op is Op.B for _, action in schedule.actions()) == 2 * m * p
        for pipeline in schedule.placement.pipelines:
            last, first = pipeline.stages[p - 1], pipeline.stages[p]
            assert schedule.placement.stages[last].worker == schedule.placement.stages[first].worker


@pytest.mark.slow
@pytest.mark.parametrize("p", EVEN)
def test_every_size_is_legal(p):
    for m in range(2, 65):
        check(bitpipe(p, m))
