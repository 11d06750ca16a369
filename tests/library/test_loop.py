"""A training loop is the same program with ranks as threads and under torchrun, and goes on from any save."""

import json
from functools import cache
from pathlib import Path

import pytest
from kit.forked import completed

PROGRAM = Path(__file__).with_name("loop_program.py")
SIZES = ({}, {"stages": 2, "microbatches": 4}, {"data_parallel": 2})
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(folder, sizes, *moment, under_torchrun=False):
    """What the program printed."""
    words = [*(TORCHRUN if under_torchrun else ()), str(PROGRAM), str(folder), json.dumps(sizes), *map(str, moment)]
    done = completed(words, check=False)
    assert (done.returncode == 0) == (not moment), done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What the program prints with ranks as threads and no kill, by the place of its sizes, and its folder."""

    @cache
    def run_of(place):
        folder = tmp_path_factory.mktemp("whole")
        return run(folder, SIZES[place]), folder

    return run_of


@pytest.mark.parametrize("place", range(len(SIZES)), ids=map(str, SIZES))
def test_threads_and_torchrun_print_the_same_losses_to_the_last_bit(tmp_path, whole, place):
    threads, folder = whole(place)
    assert run(tmp_path, SIZES[place], under_torchrun=True) == threads
    assert [line.split()[0] for line in threads] == [str(step) for step in range(20)]
    assert (folder / "timeline.png").stat().st_size > 10_000
    assert (tmp_path / "timeline.png").stat().st_size > 10_000


@pytest.mark.parametrize(("moment", "first"), [(1, True), (9, False), (20, True)])
def test_a_killed_run_goes_on_as_the_other_kind_with_the_same_losses(tmp_path, whole, moment, first):
    place = moment % 2 + 1
    begun = run(tmp_path, SIZES[place], moment, under_torchrun=first)
    assert begun + run(tmp_path, SIZES[place], under_torchrun=not first) == whole(place)[0]


@pytest.mark.parametrize("kind", [False, True])
def test_a_killed_run_goes_on_as_the_same_kind_with_the_same_losses(tmp_path, whole, kind):
    begun = run(tmp_path, SIZES[1], 7, under_torchrun=kind)
    assert begun + run(tmp_path, SIZES[1], under_torchrun=kind) == whole(1)[0]


@pytest.mark.parametrize("kind", ["pipeline", "copies"])
def test_a_process_needs_its_own_samples_alone_and_may_run_twice(kind):
    program = str(PROGRAM.with_name("rows_program.py"))
    found = []
    for start in ((), TORCHRUN):
        done = completed([*start, program, kind])
        found.append([line.replace(" 8", "").replace(" 4", "") for line in done.stdout.splitlines()])
    assert found[0] == found[1]
    assert "nan" not in "".join(found[0])
    assert len(found[0]) == 4
