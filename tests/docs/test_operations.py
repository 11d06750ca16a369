"""The commands of docs/operations.md: run with substitutes for the programs of a cluster, or checked against ours."""

import os
import re
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import typer
import yaml

from diffusionpipe.cli import app
from diffusionpipe.trainer.launching.exit_status import ExitStatus, of_signal

PAGE = (Path(__file__).parents[2] / "docs/operations.md").read_text(encoding="utf-8")
TRAINING = """#!/bin/bash
trap 'exit {on_term}' TERM
echo "$@" > command
touch started
[ {status} = waits ] || exit {status}
while true; do sleep 0.02; done
"""
SLURM = """#!/bin/bash
echo "$@" >> requeued
"""


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    return found


def options_of(words: list[str]) -> dict[str, object]:
    """What our command line makes of `train ...`, which raises an error where it does not fit."""
    command = typer.main.get_command(app)
    group = command.make_context("diffusionpipe", list(words))
    train = command.get_command(group, "train")
    assert train is not None
    return train.make_context("train", list(words[1:])).params


@pytest.mark.parametrize(
    ("status", "on_term", "ends", "is_requeued"),
    [
        ("waits", ExitStatus.STOPPED, ExitStatus.STOPPED, True),
        ("waits", of_signal(signal.SIGTERM), of_signal(signal.SIGTERM), True),  # before its first step
        (ExitStatus.FINISHED, 0, 0, False),
        (ExitStatus.FAILED, 0, 1, False),
        (ExitStatus.REFUSED, 0, 2, False),
    ],
)
def test_slurms_script_asks_for_another_turn_if_the_run_was_stopped(tmp_path, status, on_term, ends, is_requeued):
    number = status if status == "waits" else int(status)
    programs = {"diffusionpipe": TRAINING.format(status=number, on_term=int(on_term)), "scontrol": SLURM}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}
    job = subprocess.Popen(["bash", "-c", block("bash")], cwd=tmp_path, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "started").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if status == "waits":
            job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=30) == ends
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    requeued = tmp_path / "requeued"
    assert (requeued.read_text() if requeued.exists() else None) == ("requeue 4711\n" if is_requeued else None)
    given = options_of(shlex.split((tmp_path / "command").read_text()))
    assert (given["resume"], given["take_over"], given["max_restarts"]) == ("auto", True, 10)


def test_kubernetes_starts_a_stopped_pod_again_and_ends_a_refused_one():
    job = yaml.safe_load(block("yaml"))["spec"]
    action = {
        status: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        for status in rule.get("onExitCodes", {}).get("values", ())
    }
    again = [ExitStatus.STOPPED, *(of_signal(n) for n in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))]
    assert action == {ExitStatus.REFUSED: "FailJob", **dict.fromkeys(again, "Ignore")}
    (container,) = job["template"]["spec"]["containers"]
    assert job["template"]["spec"]["restartPolicy"] == "Never", "or there is no podFailurePolicy"
    program, *words = container["command"]
    given = options_of(words)
    assert (program, given["resume"], given["take_over"]) == ("diffusionpipe", "auto", True)


def test_the_commands_of_the_page_are_those_that_tests_run():
    """tests/torture/restarts.py runs both, with kills."""
    commands = re.findall(r"^    ((?:torchrun|diffusionpipe) .*)$", PAGE, flags=re.MULTILINE)
    assert commands == [
        "diffusionpipe train recipe.toml --ranks 2 --resume auto --max-restarts 10",
        "torchrun --nproc-per-node 2 --max-restarts 3 -m diffusionpipe train recipe.toml",
    ]


def test_every_exit_status_has_a_row():
    rows = re.findall(r"^\| ([\d, ]+) \|", PAGE, flags=re.MULTILINE)
    found = {int(number) for row in rows for number in row.split(",")}
    assert {*map(int, ExitStatus), *(of_signal(n) for n in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))} == found
