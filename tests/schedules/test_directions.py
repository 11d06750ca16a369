import pytest

from diffusionpipe.errors import ConfigError
from diffusionpipe.schedules.building.directions import shared_out
from diffusionpipe.schedules.families.bitpipe import bitpipe
from diffusionpipe.schedules.families.chimera import chimera, chimera_doubling

FAMILIES = [chimera, chimera_doubling, bitpipe]


@pytest.mark.parametrize("num_microbatches", range(1, 12))
@pytest.mark.parametrize("num_pipes", [1, 2, 4])
def test_micro_batches_are_shared_out_whole_and_as_evenly_as_possible(num_microbatches, num_pipes):
    counts = shared_out(num_microbatches, num_pipes)
    assert len(counts) == num_pipes
    assert sum(counts) == num_microbatches
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pipes_share_the_batch_one_after_the_other(family):
    schedule = family(4, 7, 3)
    down, up = schedule.placement.pipelines
    assert (down.first_sample, down.microbatches) == (0, (3,) * 4)
    assert (up.first_sample, up.microbatches) == (12, (3,) * 3)
    assert schedule.placement.num_samples == 21


@pytest.mark.parametrize("family", FAMILIES)
def test_every_block_has_a_copy_in_each_direction_on_mirrored_workers(family):
    stages = family(6, 6).placement.stages
    half = len(stages) // 2
    for down, up in zip(stages[:half], stages[half:], strict=True):
        assert (down.weights, down.worker) == (up.weights, 5 - up.worker)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((3, 4), "3 workers cannot be shared by two directions; use an even number, such as 4"),
        ((4, 1), "1 micro-batches are too few for 2 directions, because each direction needs one; use at least 2"),
    ],
)
def test_sizes_that_two_directions_cannot_have_are_refused(family, sizes, words):
    with pytest.raises(ConfigError, match=words):
        family(*sizes)


def test_all_wrong_sizes_of_two_directions_are_named_at_once():
    with pytest.raises(ConfigError, match=r"(?s)5 workers .*\n1 micro-batches"):
        chimera(5, 1)
