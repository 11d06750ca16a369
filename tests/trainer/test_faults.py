"""Jobs of two ranks started by the command, to which something happens."""

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil
import pytest
from crew import crew_of
from tiny_runs import losses_of, recipe_of, save_pictures, save_stable_diffusion, tensors_of, train, train_here

from diffusionpipe.errors import CheckpointError
from diffusionpipe.trainer.checkpoint import latest, verify
from diffusionpipe.trainer.recipe_file import recipe_to_toml

PATIENCE = 120.0
"""Seconds until a job must have started and come to its steps on a busy machine."""

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    save_stable_diffusion(folder / "sd")
    save_pictures(folder / "data")
    return folder


@pytest.fixture
def recipe(place, tmp_path):
    """A recipe of a run called `name` that takes far longer than a test waits."""

    def make(name="run", steps=100_000, **sections):
        options = {"checkpoint": {"every": 5}, "training": {"steps": steps}}
        return recipe_of(place / "sd", place / "data", tmp_path / name, **(options | sections))

    return make


class Command:
    """`python -m diffusionpipe train` with a recipe."""

    def __init__(self, recipe, *words, ranks=2, launcher=None):
        self.folder = Path(recipe.run.folder)
        self.folder.mkdir(exist_ok=True)
        file = self.folder.with_suffix(".toml")
        file.write_text(recipe_to_toml(recipe))
        options = ["--device", "cpu", *words, *([] if launcher else ["--ranks", str(ranks)])]
        self.process = subprocess.Popen(
            [sys.executable, *(launcher or ()), "-m", "diffusionpipe", "train", str(file), *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def await_step(self, step):
        """Wait until the step is in the metrics."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self.process.poll() is None:
            if max(losses_of(self.folder), default=0) >= step:
                return
            time.sleep(0.05)
        raise AssertionError((self.process.poll(), self.process.communicate() if self.process.poll() else "too slow"))

    def rank(self, number, *, waits=False):
        """The process of a rank; `waits`: also if the job is between two starts."""
        deadline = time.monotonic() + (PATIENCE if waits else 0)
        while True:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    if child.environ().get("RANK") == str(number) and "diffusionpipe" in child.cmdline():
                        return child
            assert time.monotonic() < deadline, f"no rank {number}"
            time.sleep(0.05)

    def end(self, seconds=PATIENCE):
        """Status and standard error when it has ended, with every process that it started."""
        started = psutil.Process(self.process.pid).children(recursive=True)
        try:
            _, error = self.process.communicate(timeout=seconds)
            _, alive = psutil.wait_procs(started, timeout=5)
            assert not alive
        finally:
            self.process.kill()
        return self.process.returncode, error


def continued(crew, folder, recipe):
    """Losses of the run resumed until a few steps after its last checkpoint, and of an uninterrupted run."""
    steps = int(latest(folder).name.removeprefix("step-")) + 3
    assert crew.run(train, recipe(folder.name, steps), "latest") == [steps, steps]
    assert crew.run(train, recipe("uninterrupted", steps)) == [steps, steps]
    return losses_of(folder), losses_of(folder.parent / "uninterrupted")


def test_a_killed_rank_ends_all_within_seconds_and_the_run_continues_exactly(recipe):
    job = Command(recipe())
    job.await_step(7)
    job.rank(1).send_signal(signal.SIGKILL)
    status, error = job.end(seconds=15)
    assert status == 1
    assert "rank 1" in error.splitlines()[-2] + error.splitlines()[-1]
    assert "SIGKILL" in error or "killed" in error
    assert "Traceback" not in error
    assert "--resume latest" in error
    verify(latest(job.folder))
    with crew_of(2) as crew:
        found, expected = continued(crew, job.folder, recipe)
    assert found == expected


@pytest.mark.slow
def test_a_terminated_job_saves_ends_in_good_order_and_continues_exactly(recipe):
    job = Command(recipe(data={"workers": 1}))
    job.await_step(7)
    job.process.send_signal(signal.SIGTERM)
    status, error = job.end()
    assert status == 75, error
    last = max(losses_of(job.folder))
    assert latest(job.folder).name == f"step-{last:08d}"
    resumed = Command(recipe(data={"workers": 1}), "--resume", "latest")
    resumed.await_step(last + 2)
    resumed.process.send_signal(signal.SIGINT)
    status, error = resumed.end()
    assert status == 75, error
    with crew_of(2) as crew:
        found, expected = continued(crew, job.folder, recipe)
    assert found == expected


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_whose_ranks_are_killed_at_random_ends_by_itself_with_the_losses_of_an_uninterrupted_one(recipe):
    """A rank is killed in a step, the next one while the ranks start, and so on: five times."""
    steps, random, reached = 80, Random(7), 0
    job = Command(recipe(steps=steps), "--resume", "auto", "--max-restarts", "10")
    for number in range(5):
        if number % 2 == 0:
            job.await_step(reached + random.randint(1, 6))
        ranks = [job.rank(rank, waits=True) for rank in range(2)]
        time.sleep(0.0 if number % 2 == 0 else 2 * random.random())
        reached = max(losses_of(job.folder), default=0)
        ranks[random.randrange(2)].send_signal(signal.SIGKILL)
        psutil.wait_procs(ranks, timeout=30)
    status, error = job.end(seconds=3 * PATIENCE)
    assert status == 0, error
    lines = [line for line in error.splitlines() if " restart=" in line]
    assert len(lines) == 5
    assert all("was killed by signal 9 (SIGKILL)" in line for line in lines)
    with crew_of(2) as crew:
        assert crew.run(train, recipe("uninterrupted", steps)) == [steps, steps]
    assert losses_of(job.folder) == losses_of(job.folder.parent / "uninterrupted")


@pytest.mark.slow
def test_torchrun_restarts_a_job_from_its_last_checkpoint(recipe):
    """The second start has the same command as the first, which would refuse a folder that holds checkpoints."""
    job = Command(recipe(steps=40), launcher=TORCHRUN)
    job.await_step(12)
    job.rank(1).send_signal(signal.SIGKILL)
    status, error = job.end()
    assert status == 0, error
    assert "restarted=1 resume=auto" in error
    assert list(losses_of(job.folder)) == list(range(1, 41))
    assert (job.folder / "export").is_dir()


@pytest.mark.slow
def test_pictures_that_cannot_be_read_are_one_error_of_the_job_that_names_no_rank(recipe, place, tmp_path):
    data = shutil.copytree(place / "data", tmp_path / "data")
    for file in sorted(data.glob("*.png"))[4:]:
        file.write_bytes(file.read_bytes()[:60])
    status, error = Command(recipe(data={"train": str(data)})).end()
    assert status == 2
    assert "Traceback" not in error
    (line,) = (line for line in error.splitlines() if line.startswith("error: "))
    assert not line.startswith("error: rank")
    assert "012.png" in error


def test_a_port_in_use_is_said_before_any_rank_starts(recipe):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, error = Command(recipe(), "--port", str(port)).end()
    assert status == 2
    (line,) = (line for line in error.splitlines() if " starting " not in line)
    assert line.startswith(f"error: port {port} is in use")


def test_a_full_disk_leaves_the_last_good_checkpoint(recipe, tmp_path):
    """The limit on the size of a file is reached by the second checkpoint, which is the larger one."""
    run = recipe(steps=10)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill_the_disk(job, recipe):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    try:
        with pytest.raises(CheckpointError, match=r"step 10 could not be written: .*\n.*last good .*step-00000005"):
            train_here(run, at={8: fill_the_disk})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000005"]
    assert train_here(run, "latest") == 10
    assert tensors_of(latest(tmp_path / "run"))
