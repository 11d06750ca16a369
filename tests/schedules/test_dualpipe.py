import pytest
from schedules.pairs import RATIOS, paired_makespan

from diffusionpipe.errors import ConfigError
from diffusionpipe.schedules.families.dualpipe import dualpipe
from diffusionpipe.simulator import activations_in_flight, simulate, uniform_costs
from diffusionpipe.timing.legal import check

EVEN = range(2, 17, 2)


@pytest.mark.parametrize("p", EVEN)
def test_the_time_is_the_formula_for_all_ratios_that_it_is_stated_for(p):
    for m in (2 * p, 2 * p + 6):
        schedule = dualpipe(p, m)
        for f, i, w in RATIOS:
            timeline = simulate(schedule, uniform_costs(schedule, forward=f, input_grad=i, weight_grad=w))
            assert timeline.makespan == m * (f + i + w) + (p // 2 - 1) * (f + i - w)


@pytest.mark.parametrize("p", EVEN)
def test_pairs_in_one_piece_take_the_time_of_the_papers_formula(p):
    for m in (2 * p, 4 * p):
        schedule = dualpipe(p, m)
        assert paired_makespan(schedule) == 3 * m + (p // 2 - 1) * (3 + 2 - 3)
        assert simulate(schedule, uniform_costs(schedule)).makespan <= 3 * m + p - 2


@pytest.mark.parametrize("p", EVEN)
def test_activations_are_one_micro_batch_more_than_workers(p):
    for m in (2 * p, 2 * p + 8):
        assert activations_in_flight(dualpipe(p, m)) == (p + 1,) * p


@pytest.mark.parametrize("p", EVEN)
def test_many_sizes_are_legal_and_complete(p):
    for m in (2 * p, 2 * p + 2, 3 * p + 2):
        check(dualpipe(p, m))


@pytest.mark.slow
@pytest.mark.parametrize("p", EVEN)
def test_every_size_is_legal(p):
    for m in range(2 * p, 65, 2):
        check(dualpipe(p, m))


def test_the_halves_are_mirror_images():
    schedule = dualpipe(8, 20)
    for worker in range(4):
        mirrored = [((action.stage + 8) % 16, action.op, action.microbatch) for action in schedule.orders[7 - worker]]
        assert [(action.stage, action.op, action.microbatch) for action in schedule.orders[worker]] == mirrored


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((3, 8), "3 workers cannot be shared by two directions; use an even number, such as 4"),
        ((4, 6), "6 micro-batches do not work: the number must be even and at least 2 x 4 workers; use 8"),
        ((4, 9), "9 micro-batches do not work: the number must be even and at least 2 x 4 workers; use 10"),
        ((0, 8), "num_workers=0"),
    ],
)
def test_sizes_that_dualpipe_cannot_have_are_refused(sizes, words):
    with pytest.raises(ConfigError, match=words):
        dualpipe(*sizes)
