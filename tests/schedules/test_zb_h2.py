import pytest
from kit.split_times import SOME_MICROBATCHES, simulated, window
from schedules.measures import counts_up_to_64

from diffusionpipe.costs import StageCosts
from diffusionpipe.errors import ConfigError
from diffusionpipe.schedules.families.zb_h2 import zb_h2
from diffusionpipe.simulator import activations_in_flight
from diffusionpipe.timing.legal import check


@pytest.mark.parametrize("p", range(1, 17))
def test_is_legal_for_any_number_of_microbatches(p):
    for m in SOME_MICROBATCHES:
        check(zb_h2(p, m, 2))


@pytest.mark.slow
@pytest.mark.parametrize("p", range(1, 17))
def test_sizes_up_to_64_microbatches_are_legal(p):
    for m in counts_up_to_64(p):
        check(zb_h2(p, m))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8, 13])
def test_no_worker_is_idle_between_its_first_and_last_action_at_equal_times(p):
    for m in (2 * p - 1, 2 * p, 3 * p):
        timeline = simulated(zb_h2(p, m))
        assert {timeline.window(worker) for worker in range(p)} == {3 * m}
        assert timeline.makespan == 3 * m + p - 1


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("times", [(10, 12, 8), (3, 4, 2), (2, 1, 3), (5, 1, 1)])
def test_window_follows_the_papers_formula_at_other_times(p, times):
    forward, input_grad, weight_grad = times
    for m in (2 * p - 1, 3 * p):
        timeline = simulated(zb_h2(p, m), StageCosts(forward=forward, input_grad=input_grad, weight_grad=weight_grad))
        assert window(timeline) == m * sum(times) + (p - 1) * max(0, forward + input_grad - 2 * weight_grad)


@pytest.mark.parametrize("p", [1, 2, 5, 8])
def test_every_worker_holds_2p_minus_1_microbatches(p):
    for m in (1, p, 3 * p):
        assert activations_in_flight(zb_h2(p, m)) == (min(2 * p - 1, m),) * p


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (2, 2, 0)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ConfigError, match="at least 1"):
        zb_h2(*sizes)
