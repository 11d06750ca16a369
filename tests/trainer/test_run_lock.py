"""Who may use a run folder: real processes hold its lock; another machine is simulated by the file that it leaves."""

import errno
import fcntl
import json
import os
import re
import signal
import socket
import time
from contextlib import contextmanager
from threading import Event, Thread

import pytest
from kit.forked import Forked

from diffusionpipe.errors import ConfigError
from diffusionpipe.runtime.job.verdict import RankProcess, this_member
from diffusionpipe.trainer.launching import run_lock
from diffusionpipe.trainer.launching.lock_owner import Life, Owner, Timing, life_of, refusal
from diffusionpipe.trainer.launching.run_lock import acquire, is_held
from diffusionpipe.trainer.recipe.run_section import RunSection
from diffusionpipe.workflows.training.recipe_checks import checks_of_run

QUICK = Timing(beat=0.05, stale=0.4, ending=0.3)
HOLDER = """
import os, time
from pathlib import Path
from diffusionpipe.trainer.launching.run_lock import acquire
lock = acquire(Path({folder!r}))
print(os.getpid(), flush=True)
time.sleep(60)
"""
LAUNCHER = """
import os, signal, time
from pathlib import Path
from diffusionpipe.trainer.launching.run_lock import acquire, join
folder, launcher = Path({folder!r}), os.getpid()
acquire(folder).share()
if os.fork() == 0:
    assert join(folder, launcher, on_loss=print) is not None
    os.kill(launcher, signal.SIGKILL)
    while os.getppid() == launcher:
        time.sleep(0.01)
    print(launcher, flush=True)
    time.sleep({seconds})
    os._exit(0)
time.sleep(60)
"""


@contextmanager
def holding(folder, script=HOLDER, **values):
    process = Forked(script.format(folder=str(folder), **values), os.environ)
    try:
        assert process.stdout.readline().strip().isdecimal()
        yield process
    finally:
        process.close()


def test_a_job_of_these_tests_leaves_no_stream_open(tmp_path):
    with holding(tmp_path) as job:
        pass
    assert job.returncode is not None
    assert job.stdout.closed
    assert job.stderr.closed


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def elsewhere(folder, *, age=0.0):
    """What a job on another machine leaves when it dies: nobody here holds a flock."""
    owner = {"host": "node7", "pid": os.getpid(), "machine": "other/1", "started": time.time() - 3600}
    (folder / "run.lock").write_text(json.dumps(owner))
    os.utime(folder / "run.lock", (time.time() - age,) * 2)


def test_a_second_job_is_refused_by_name_and_touches_nothing(tmp_path):
    with holding(tmp_path) as first:
        (tmp_path / "metrics.jsonl").write_text("{}")
        before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
        for take_over in (False, True):
            with pytest.raises(ConfigError) as caught:
                acquire(tmp_path, take_over=take_over)
            text = str(caught.value)
            assert f"process {first.pid} on {socket.gethostname()}" in text
            assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", text)
        assert "--take-over is only for jobs that are dead" in text
        assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


def test_the_checkpoints_of_a_job_that_runs_are_not_called_those_of_an_earlier_run(tmp_path):
    """Or a second start beside it would be told to delete the folder."""
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    *_, has_a_free_folder = checks_of_run(2, None)
    with holding(tmp_path):
        assert is_held(tmp_path)
        assert list(has_a_free_folder(run=RunSection(folder=tmp_path))) == []  # the lock itself refuses by name
    assert not is_held(tmp_path)
    (problem,) = has_a_free_folder(run=RunSection(folder=tmp_path))
    assert "holds the checkpoints of an earlier run" in problem
    assert not is_held(tmp_path / "no such folder")


def test_the_lock_of_a_killed_process_needs_no_flag(tmp_path):
    with holding(tmp_path) as first:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        assert not is_held(tmp_path)
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == first.pid
        with acquire(tmp_path):
            assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    assert files(tmp_path) == [], "the lock goes with its owner"


def test_the_ranks_of_a_killed_launcher_keep_the_folder_until_they_have_ended(tmp_path):
    with holding(tmp_path, LAUNCHER, seconds=5) as job, pytest.raises(ConfigError, match=f"process {job.pid} on"):
        acquire(tmp_path, timing=QUICK)
    other = tmp_path / "other"
    with holding(other, LAUNCHER, seconds=0.5), acquire(other, timing=Timing(ending=20)):
        assert json.loads((other / "run.lock").read_text())["pid"] == os.getpid()


def test_an_owner_on_another_machine_is_asked_for_a_sign_of_life(tmp_path):
    elsewhere(tmp_path, age=10)
    with pytest.raises(ConfigError, match=r"on node7.*sign of life was 10 s ago: wait") as caught:
        acquire(tmp_path)
    assert "--take-over" not in str(caught.value)
    elsewhere(tmp_path, age=300)
    with pytest.raises(ConfigError, match=r"sign of life was 300 s ago.*add --take-over"):
        acquire(tmp_path)
    with acquire(tmp_path, take_over=True, timing=QUICK):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
        with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
            acquire(tmp_path, timing=QUICK)


def test_who_beats_is_not_taken_over_even_if_its_clock_is_wrong(tmp_path):
    elsewhere(tmp_path, age=5000)
    stop = Event()

    def beat():
        while not stop.wait(0.05):
            os.utime(tmp_path / "run.lock", (time.time() - 5000,) * 2)

    thread = Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="on node7"):
            acquire(tmp_path, take_over=True, timing=Timing(beat=1))
    finally:
        stop.set()
        thread.join()


def test_an_owner_beats_and_learns_that_its_lock_was_taken_over(tmp_path):
    lost = []
    with acquire(tmp_path, on_loss=lost.append, timing=QUICK) as lock:
        os.utime(tmp_path / "run.lock", (0, 0))
        wait_until(lambda: (tmp_path / "run.lock").stat().st_mtime > 0)
        assert not lock.is_lost
        (tmp_path / "new").write_text("{}")
        (tmp_path / "new").rename(tmp_path / "run.lock")
        wait_until(lambda: lost)
        assert lock.is_lost
    assert "another job has taken over" in lost[0]
    assert files(tmp_path) == ["run.lock"], "it is the other job's"


def wait_until(happened):
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_flock_the_process_decides_and_of_two_at_once_the_later_wins(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(run_lock, "_CONTEST", 0.0)
    with acquire(tmp_path), pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        acquire(tmp_path)
    monkeypatch.setattr(run_lock, "_CONTEST", 0.1)
    rival = Thread(target=lambda: (time.sleep(0.05), run_lock._replace(tmp_path / "run.lock", this_member(0))))
    rival.start()
    with pytest.raises(ConfigError, match="just now"):
        acquire(tmp_path)
    rival.join()


HERE = RankProcess(rank=0, host="a", pid=1, machine="boot/1")
LIVING = {"host": "a", "pid": os.getpid(), "started": 0.0}


@pytest.mark.parametrize(
    ("machine", "is_locked", "life"),
    [
        ("boot/1", True, Life.ALIVE),
        ("boot/1", False, Life.GONE),  # the process id was given to another program
        ("boot/1", None, Life.ALIVE),
        ("boot/2", True, Life.ALIVE),  # another container of this machine
        ("boot/2", False, Life.GONE),
        ("boot/2", None, Life.ELSEWHERE),
        ("other/1", True, Life.ELSEWHERE),
        ("other/1", False, Life.ELSEWHERE),  # its flock may not reach this machine
        ("", None, Life.ELSEWHERE),
    ],
)
def test_what_is_known_of_an_owner(machine, is_locked, life):
    assert life_of(Owner(machine=machine, **LIVING), HERE, is_locked=is_locked) is life


def test_a_file_without_a_name_is_free_unless_it_is_locked():
    assert life_of(None, HERE, is_locked=False) is Life.NONE
    assert "a job that is just starting" in refusal(run_lock.Path("x"), None, Life.ALIVE, age=0, take_over=False)


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.folder: .*file/run cannot be used"):
        acquire(tmp_path / "file" / "run")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_lock_that_is_a_link_is_refused_and_its_target_is_not_written(tmp_path, is_there):
    precious = tmp_path / "precious"
    if is_there:
        precious.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.lock").symlink_to(precious)
    with pytest.raises(ConfigError, match="it is a link; remove it"):
        acquire(tmp_path / "run", timing=QUICK)
    assert precious.exists() == is_there
    assert not is_there or precious.read_text() == "precious"


def test_a_lock_that_is_a_fifo_is_refused(tmp_path):
    os.mkfifo(tmp_path / "run.lock")
    with pytest.raises(ConfigError, match="it is not a regular file; remove it"):
        acquire(tmp_path, timing=QUICK)


@pytest.mark.parametrize(
    "change",
    [{"machine": 5}, {"host": None}, {"pid": "x"}, {"pid": 10**30}, {"started": "x"}, {"started": 1e300}, "[" * 3000],
    ids=str,
)
def test_a_lock_that_no_job_has_written_counts_as_empty(tmp_path, change):
    owner = {"host": "h", "pid": 1, "machine": "m", "started": 0.0}
    text = change if isinstance(change, str) else json.dumps({**owner, **change})
    (tmp_path / "run.lock").write_text(text)
    acquire(tmp_path, timing=QUICK).release()


def test_an_owner_whose_clock_is_impossible_can_be_named():
    assert "since an unknown time" in str(Owner(host="h", pid=1, machine="m", started=1e20))
