import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
from kit import worker_batches

from diffusionpipe.errors import DataError
from diffusionpipe.trainer.data.batches.workers import DataWorkers

SMALL = """
import resource, subprocess, sys
from contextlib import closing
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", "/dev/shm"], check=True)
from kit import worker_batches
from diffusionpipe.trainer.data.batches.workers import DataWorkers
if __name__ == "__main__":
    with closing(DataWorkers(worker_batches.large, range(4), 1)) as workers:
        print([float(workers.take(step)["pixels"].sum()) / 2**18 for step in range(4)])
"""
STOPPED = """
import time
from kit import worker_batches
from diffusionpipe.trainer.data.batches.workers import DataWorkers
if __name__ == "__main__":
    workers = DataWorkers(worker_batches.pid, range(9), 1)
    print(int(workers.take(0)["pid"]), flush=True)
    time.sleep(60)
"""


def may_mount():
    try:
        done = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True)
    except OSError:
        return False
    return done.returncode == 0


def test_batches_arrive_as_they_were_made_and_in_order():
    with closing(DataWorkers(worker_batches.numbered, range(3, 8), 1)) as workers:
        for step in range(3, 8):
            made, taken = worker_batches.numbered(step), workers.take(step)
            assert list(taken) == list(made)
            assert all(torch.equal(taken[name], made[name]) for name in made)
            assert all(taken[name].dtype is made[name].dtype for name in made)


def test_a_worker_has_nothing_in_shared_memory_and_ends_with_its_rank():
    with closing(DataWorkers(worker_batches.pid, range(2), 1)) as workers:
        worker = int(workers.take(0)["pid"])
        assert "/dev/shm/" not in Path(f"/proc/{worker}/maps").read_text()  # batches, nor semaphores of queues
    assert not Path(f"/proc/{worker}").exists()


@pytest.mark.skipif(not may_mount(), reason="mounting needs a user namespace")
def test_a_shared_memory_smaller_than_a_batch_does_not_matter(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SMALL)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[0.0, 1.0, 2.0, 3.0]\n", done.stderr


def test_a_failing_worker_ends_the_wait_and_names_the_cause():
    with (
        closing(DataWorkers(worker_batches.broken, range(3), 1)) as workers,
        pytest.raises(DataError, match=r"^step 0: .*RuntimeError: unable to allocate memory for step 0"),
    ):
        workers.take(0)


def test_a_killed_worker_ends_the_wait_and_is_named():
    with closing(DataWorkers(worker_batches.stuck, range(9), 1)) as workers:
        workers.take(0)
        worker = next(iter(workers._workers)).process.pid
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(DataError, match=rf"step 1: the data worker \(process {worker}\).*SIGKILL.*memory"):
            workers.take(1)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="no other system can do it")
def test_a_stopped_worker_ends_with_its_rank(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(STOPPED)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    rank = subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True)
    worker = psutil.Process(int(rank.stdout.readline()))
    worker.suspend()
    rank.kill()
    rank.wait()
    psutil.wait_procs([worker], timeout=20)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_a_stuck_worker_shows_where_it_is():
    with closing(DataWorkers(worker_batches.stuck, range(9), 1)) as workers:
        worker = workers._workers[0].process.pid
        deadline = time.monotonic() + 30
        while "in stuck" not in (text := workers.stacks(0.1)):  # asked also while it starts
            assert time.monotonic() < deadline, text
        assert f"Data worker (process {worker}):\n" in text
        assert workers.take(0)["ids"].tolist() == [0, 1]
    assert not Path(f"/proc/{worker}").exists()


def test_signals_to_the_group_do_not_reach_workers_that_are_starting():
    with closing(DataWorkers(worker_batches.numbered, range(3), 1)) as workers:
        worker = workers._workers[0].process.pid
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            os.kill(worker, number)  # long before it has imported torch
        assert float(workers.take(0)["pixels"].sum()) == 0
