import pytest
from schedules.pairs import RATIOS, paired_makespan

from diffusionpipe.errors import ConfigError
from diffusionpipe.schedules.families.dualpipe import dualpipe
from diffusionpipe.schedules.families.dualpipe_v import dualpipe_v
from diffusionpipe.simulator import activations_in_flight, simulate, uniform_costs
from diffusionpipe.timing.legal import check

WORKERS = range(1, 17)


@pytest.mark.parametrize("p", WORKERS)
def test_the_time_is_the_formula_for_all_ratios_that_it_is_stated_for(p):
    for m in (2 * p, 2 * p + 3):
        schedule = dualpipe_v(p, m)
        for f, i, w in RATIOS:
            timeline = simulate(schedule, uniform_costs(schedule, forward=f, input_grad=i, weight_grad=w))
            assert timeline.makespan == 2 * m * (f + i + w) + (p - 1) * (f + i - w)


@pytest.mark.parametrize("p", WORKERS)
def test_pairs_in_one_piece_take_the_time_of_the_published_formula(p):
    """3m + p - 1 in units of a worker's two stages."""
    schedule = dualpipe_v(p, 2 * p)
    assert paired_makespan(schedule) == 2 * (3 * 2 * p + p - 1)
    assert simulate(schedule, uniform_costs(schedule)).makespan <= paired_makespan(schedule)


@pytest.mark.parametrize("p", WORKERS)
def test_activations_are_one_micro_batch_more_than_stages(p):
    for m in (2 * p, 2 * p + 5):
        assert activations_in_flight(dualpipe_v(p, m)) == (2 * p + 1,) * p


@pytest.mark.parametrize("p", WORKERS)
def test_many_sizes_are_legal_and_complete(p):
    for m in (2 * p, 2 * p + 1, 3 * p + 1):
        check(dualpipe_v(p, m))


@pytest.mark.slow
@pytest.mark.parametrize("p", WORKERS)
def test_every_size_is_legal(p):
    for m in range(2 * p, 65):
        check(dualpipe_v(p, m))


def test_a_worker_does_what_two_mirrored_workers_of_dualpipe_do():
    whole, half = dualpipe(8, 20), dualpipe_v(4, 10)
    for worker in range(4):
        ops = [(action.op, action.microbatch) for action in half.orders[worker]]
        for other in (worker, 7 - worker):
            assert [(action.op, action.microbatch) for action in whole.orders[other]] == ops


def test_too_few_micro_batches_are_refused():
    with pytest.raises(ConfigError, match="5 micro-batches are too few for 3 workers; use at least 6"):
        dualpipe_v(3, 5)
