"""Processes whose parent is killed."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from diffusionpipe.runtime.machine.error_file import LAUNCHED

CHILD = """
import os, sys, time
from diffusionpipe.runtime.job.parent_death import end_with_parent, outlive_parent
assert end_with_parent(os.getppid())
if sys.argv[1] == "outlives":
    outlive_parent()
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]]); time.sleep(60)"


@pytest.fixture
def started():
    """Starts a parent with a child of which `outlives` may be said, and gives the parent and the child."""
    children: list[psutil.Process] = []

    def start(word: str) -> tuple[subprocess.Popen[str], psutil.Process]:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, CHILD, word], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        assert parent.stdout is not None
        children.append(psutil.Process(int(parent.stdout.readline())))
        return parent, children[-1]

    yield start
    for child in children:
        if child.is_running():
            child.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="no other system can do it")
def test_even_a_stopped_process_ends_with_its_parent(started):
    parent, child = started("ends")
    child.suspend()
    parent.kill()
    parent.wait()
    psutil.wait_procs([child], timeout=20)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_process_that_outlives_its_parent_goes_on(started):
    parent, child = started("outlives")
    parent.kill()
    parent.wait()
    time.sleep(0.2)
    assert child.is_running()
    assert child.status() != psutil.STATUS_ZOMBIE


def test_a_rank_whose_launcher_has_ended_does_not_begin():
    """Before its imports, which take seconds."""
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "diffusionpipe", "train", "recipe.toml"],
        capture_output=True,
        text=True,
        env=os.environ | {LAUNCHED: "999999999"},
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == ("error: the launcher (process 999999999) has ended; this rank stops too")
    assert "typer" not in ended.stderr
