import pytest
from kit.split_times import SOME_MICROBATCHES, simulated
from schedules.measures import counts_up_to_64

from diffusionpipe.costs import StageCosts
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Op
from diffusionpipe.schedules.families.zb_h1 import zb_h1
from diffusionpipe.simulator import activations_in_flight
from diffusionpipe.timing.legal import check


@pytest.mark.parametrize("p", range(1, 17))
def test_is_legal_for_any_number_of_microbatches(p):
    for m in SOME_MICROBATCHES:
        check(zb_h1(p, m, 2))


@pytest.mark.slow
@pytest.mark.parametrize("p", range(1, 17))
def test_sizes_up_to_64_microbatches_are_legal(p):
    for m in counts_up_to_64(p):
        check(zb_h1(p, m))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8, 13])
@pytest.mark.parametrize("times", [(1, 1, 1), (10, 12, 8), (3, 4, 2), (2, 5, 1), (5, 1, 1)])
def test_takes_the_papers_time_where_w_is_no_longer_than_f_and_i(p, times):
    forward, input_grad, weight_grad = times
    for m in (p, p + 1, 3 * p):
        timeline = simulated(zb_h1(p, m), StageCosts(forward=forward, input_grad=input_grad, weight_grad=weight_grad))
        assert timeline.makespan == m * sum(times) + (p - 1) * (forward + input_grad - weight_grad)


def test_bubble_is_a_third_of_that_of_1f1b_at_equal_times():
    p, m = 8, 16
    assert simulated(zb_h1(p, m)).makespan - 3 * m == 3 * (p - 1) / 3
    assert simulated(zb_h1(p, m)).bubble == pytest.approx(0.127, abs=5e-4)


@pytest.mark.parametrize("p", [1, 2, 5, 8])
def test_every_worker_holds_p_microbatches(p):
    for m in (1, p, 3 * p):
        assert activations_in_flight(zb_h1(p, m)) == (min(p, m),) * p


def test_stage_s_holds_p_minus_s_before_i_and_s_between_i_and_w():
    p = 6
    schedule = zb_h1(p, 20)
    for stage, order in enumerate(schedule.orders):
        counts = {Op.F: 0, Op.I: 0, Op.W: 0}
        held = set()
        for action in order:
            counts[action.op] += 1
            if action.op is Op.F:
                held.add((counts[Op.F] - counts[Op.I], counts[Op.I] - counts[Op.W]))
        assert max(held) == (p - stage, stage)
        assert max(after_i for _, after_i in held) == stage


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (2, 2, 0)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ConfigError, match="at least 1"):
        zb_h1(*sizes)
