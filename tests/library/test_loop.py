"""A training loop is the same program with ranks as threads and under torchrun, and goes on from any save."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("loop_program.py")
SIZES = ({}, {"stages": 2, "microbatches": 4}, {"data_parallel": 2})
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(folder, sizes, *moment, under_torchrun=False):
    """What the program printed."""
    start = TORCHRUN if under_torchrun else (sys.executable,)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*start, str(PROGRAM), str(folder), json.dumps(sizes), *map(str, moment)],
        env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == (not moment), done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_threads_and_torchrun_print_the_same_losses_to_the_last_bit(tmp_path, sizes):
    threads, processes = run(tmp_path / "a", sizes), run(tmp_path / "b", sizes, under_torchrun=True)
    assert threads == processes
    assert [line.split()[0] for line in threads] == [str(step) for step in range(20)]
    assert (tmp_path / "a/timeline.png").stat().st_size > 10_000
    assert (tmp_path / "b/timeline.png").stat().st_size > 10_000


@pytest.mark.parametrize(("moment", "first"), [(1, True), (9, False), (20, True)])
def test_a_killed_run_goes_on_as_the_other_kind_with_the_same_losses(tmp_path, moment, first):
    sizes = SIZES[moment % 2 + 1]
    whole = run(tmp_path / "whole", sizes)
    begun = run(tmp_path / "cut", sizes, moment, under_torchrun=first)
    rest = run(tmp_path / "cut", sizes, under_torchrun=not first)
    assert begun + rest == whole


def test_a_killed_run_goes_on_as_the_same_kind_with_the_same_losses(tmp_path):
    whole = run(tmp_path / "whole", SIZES[1])
    for kind in (False, True):
        begun = run(tmp_path / str(kind), SIZES[1], 7, under_torchrun=kind)
        assert begun + run(tmp_path / str(kind), SIZES[1], under_torchrun=kind) == whole


@pytest.mark.parametrize("kind", ["pipeline", "copies"])
def test_a_process_needs_its_own_samples_alone_and_may_run_twice(kind):
    program = str(PROGRAM.with_name("rows_program.py"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = []
    for start in ((sys.executable,), TORCHRUN):
        done = subprocess.run(
            [*start, program, kind], env=environment, capture_output=True, text=True, timeout=200, check=True
        )
        found.append([line.replace(" 8", "").replace(" 4", "") for line in done.stdout.splitlines()])
    assert found[0] == found[1]
    assert "nan" not in "".join(found[0])
    assert len(found[0]) == 4
