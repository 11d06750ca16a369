"""How long training stands still for a checkpoint: a benchmark whose ratio is also a promise."""

import pytest

from benchmarks.checkpoints.measure import ratio, saves


def test_both_ways_of_saving_are_measured(crew, tmp_path):
    found = crew.run(saves, tmp_path, 4_000_000, 1)[0]
    assert {name: len(of_way) for name, of_way in found.items()} == {"synchronous": 1, "asynchronous": 1}
    assert all(0 < save.standstill <= save.seconds for of_way in found.values() for save in of_way)
    assert sorted(path.name for path in tmp_path.glob("*/checkpoints/*")) == ["step-00000020"] * 2


@pytest.mark.slow
def test_training_stands_still_for_an_asynchronous_save_a_small_part_of_the_time(crew, tmp_path):
    """400 MB of state; a tenth of the time is the promise, and 0.04 was measured."""
    found = crew.run(saves, tmp_path, 200_000_000, 3)
    assert all(ratio(of_rank) < 0.1 for of_rank in found), found
