from itertools import pairwise

import pytest
from kit.tiers import quick_and_slow

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Op
from diffusionpipe.schedules.families.chimera import chimera, chimera_doubling
from diffusionpipe.simulator import activations_in_flight, simulate, uniform_costs
from diffusionpipe.timing.legal import check

EVEN = range(2, 17, 2)


def makespan(schedule, **times):
    return simulate(schedule, uniform_costs(schedule, **times)).makespan


def row(order, num_stages):
    """A worker's order as direction and op: df, db down, uf, ub up."""
    return " ".join(("d" if action.stage < num_stages // 2 else "u") + action.op.lower() for action in order)


def test_four_workers_and_micro_batches_are_the_papers_picture():
    schedule = chimera(4, 4)
    assert [row(order, len(schedule.placement.stages)) for order in schedule.orders] == [
        "df df uf ub uf ub db db",
        "df uf df uf ub db ub db",
        "uf df uf df db ub db ub",
        "uf uf df db df db ub ub",
    ]


@pytest.mark.parametrize(
    ("p", "m", "equal", "double"),
    [(4, 4, 10, 16), (4, 8, 18, 30), (6, 6, 16, 26), (8, 8, 22, 36), (8, 16, 38, 66)],
)
def test_the_published_generators_times_are_reached(p, m, equal, double):
    assert makespan(chimera(p, m), backward=1) == equal
    assert makespan(chimera(p, m), backward=2) == double


@pytest.mark.parametrize("p", EVEN)
def test_the_papers_formulas_hold_where_their_assumptions_do(p):
    for units in (1, 2, 3, 4):  # the published generator loses micro-batches at 4 units from 6 workers up
        m = units * p
        timeline = simulate(chimera(p, m), uniform_costs(chimera(p, m), backward=1))
        assert timeline.makespan == 2 * m + p - 2
        assert timeline.bubble == pytest.approx((p - 2) / (2 * m + p - 2))
    assert makespan(chimera(p, p), backward=2) == 3 * p + 2 * p - 4


@pytest.mark.parametrize("p", quick_and_slow(EVEN, quick=(2, 4, 8)))
def test_no_micro_batch_is_lost_and_all_are_legal_for_many_sizes(p):
    for m in sorted({2, 3, p - 1, p, p + 1, 2 * p + 3, 4 * p, 64} - {1}):
        for family in (chimera, chimera_doubling):
            schedule = family(p, m)
            check(schedule)
            assert sum(action.op is Op.B for _, action in schedule.actions()) == m * p
            assert makespan(schedule, backward=1) >= 2 * m


@pytest.mark.slow
@pytest.mark.parametrize("p", EVEN)
@pytest.mark.parametrize("family", [chimera, chimera_doubling])
def test_every_size_is_legal(family, p):
    for m in range(2, 65):
        check(family(p, m))


@pytest.mark.parametrize("p", EVEN)
def test_activations_in_flight_are_half_the_workers_and_one_to_all_workers(p):
    for m in (p, 2 * p, 64):
        middle = range(1, p // 2 + 1)
        outer_to_middle = [p // 2 + i for i in middle]
        assert activations_in_flight(chimera(p, p * m)) == (*outer_to_middle, *reversed(outer_to_middle))


@pytest.mark.parametrize(("p", "directions"), [(4, 4), (8, 4), (8, 8), (12, 4), (12, 6), (12, 12), (16, 8)])
def test_more_directions_have_smaller_bubbles_and_more_weights(p, directions):
    for units in (1, 2, 4):
        m = units * p
        schedule = chimera(p, m, directions=directions)
        check(schedule)
        assert makespan(schedule, backward=1) == 2 * m + 2 * p // directions - 2
        assert max(activations_in_flight(schedule)) <= p
    for order in schedule.orders:
        assert len({schedule.placement.stages[action.stage].weights for action in order}) == directions


def test_a_rest_of_micro_batches_over_more_directions_is_legal():
    for m in range(4, 20):
        check(chimera(8, m, directions=4))


@pytest.mark.parametrize(("p", "directions"), [(4, 3), (4, 0), (6, 4), (4, 8)])
def test_directions_that_do_not_fit_the_workers_are_refused(p, directions):
    fitting = {4: "2, 4", 6: "2, 6"}[p]
    with pytest.raises(ConfigError, match=f"{directions} directions do not fit {p} workers; use one of {fitting}$"):
        chimera(p, 16, directions=directions)


@pytest.mark.parametrize("p", EVEN)
def test_doubling_takes_at_most_the_time_of_the_papers_formula(p):
    """The formula has slots of two forwards; ours lets the next stage begin after the first of them."""
    for units in (1, 2, 3):
        m = 2 * p * units
        assert 3 * m <= makespan(chimera_doubling(p, m)) <= 3 * m + 2 * (p - 2)
    for m in (2, 3, 2 * p + 1, 2 * p + 2, 3 * p - 1, 65):
        assert makespan(chimera_doubling(p, m)) <= 3 * m + 2 * (p - 2) + 2 * p


def test_doubling_removes_the_waits_between_the_units():
    timeline = simulate(chimera_doubling(4, 16), uniform_costs(chimera_doubling(4, 16)))
    assert timeline.makespan == 52
    assert timeline.bubble == pytest.approx(2 / (3 / 2 * 16 + 2))
    assert makespan(chimera(4, 16)) == 58


@pytest.mark.parametrize("p", EVEN)
def test_doubling_holds_at_most_twice_the_activations(p):
    for m in (2 * p, 4 * p, 64):
        assert max(activations_in_flight(chimera_doubling(p, m))) <= 2 * p


def test_doubling_runs_the_forwards_of_a_pair_one_after_the_other():
    for order in chimera_doubling(6, 24).orders:
        for first, second in pairwise(order):
            if first.op is Op.F and first.microbatch % 2 == 0:
                assert (second.stage, second.op, second.microbatch) == (first.stage, Op.F, first.microbatch + 1)
