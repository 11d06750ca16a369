"""Jobs of two ranks started by the command, to which something happens; `make torture` has many more."""

import resource
import shutil
import signal
import socket

import pytest
from kit.crew import crew_of
from kit.forked_jobs import ForkedCommand
from kit.tiny_runs import losses_of, recipe_of, save_pictures, save_stable_diffusion, tensors_of, train, train_here

from diffusionpipe.errors import CheckpointError
from diffusionpipe.trainer.checkpoints.checkpoint import verify
from diffusionpipe.trainer.checkpoints.checkpoint_folder import latest


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
        options = {"checkpoint": {"every": 5, "asynchronous": False}, "training": {"steps": steps}}
        return recipe_of(place / "sd", place / "data", tmp_path / name, **(options | sections))

    return make


def continued(crew, folder, recipe):
    """Losses of the run resumed until a few steps after its last checkpoint, and of an uninterrupted run."""
    steps = int(latest(folder).name.removeprefix("step-")) + 3
    assert crew.run(train, recipe(folder.name, steps), "latest") == [steps, steps]
    assert crew.run(train, recipe("uninterrupted", steps)) == [steps, steps]
    return losses_of(folder), losses_of(folder.parent / "uninterrupted")


def test_a_killed_rank_ends_all_within_seconds_and_the_run_continues_exactly(recipe):
    job = ForkedCommand(recipe())
    job.await_step(7)
    job.rank(1).send_signal(signal.SIGKILL)
    status, error = job.end(seconds=15)
    assert status == 1
    assert "rank 1" in error.splitlines()[-2] + error.splitlines()[-1]
    assert "SIGKILL" in error or "killed" in error
    assert "Traceback" not in error
    step = int(latest(job.folder).name.removeprefix("step-"))
    assert f"The checkpoint of step {step} is kept. Resume with --resume latest." in error
    assert error.count("is kept") == 1
    verify(latest(job.folder))
    with crew_of(2) as crew:
        found, expected = continued(crew, job.folder, recipe)
    assert found == expected


@pytest.mark.slow
def test_pictures_that_cannot_be_read_are_one_error_of_the_job_that_names_no_rank(recipe, place, tmp_path):
    data = shutil.copytree(place / "data", tmp_path / "data")
    for file in sorted(data.glob("*.png"))[4:]:
        file.write_bytes(file.read_bytes()[:60])
    status, error = ForkedCommand(recipe(data={"train": str(data)})).end()
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
        status, error = ForkedCommand(recipe(), "--port", str(port)).end()
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
