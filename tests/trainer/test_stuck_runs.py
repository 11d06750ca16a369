"""Forked ranks that train: what ends the run when one of them stands still, and that a slow run goes on."""

import os
import re
import signal
import socket
import time

import pytest
from kit.forked import Forked
from kit.tiny_runs import losses_of, save_dit, save_pictures

SCRIPT = """
import os, time
from pathlib import Path
from unittest import mock
from kit import worker_batches
from kit.tiny_runs import ask_to_save, recipe_of, train
from diffusionpipe.runtime.engine import compiler
from diffusionpipe.runtime.job.process_group import joined, leave
from diffusionpipe.runtime.job.membership import membership
from diffusionpipe.trainer.inference import drawing
from diffusionpipe.trainer.course import run
from diffusionpipe.trainer.inference import denoise as sampling
from diffusionpipe.trainer.checkpoints import run_checkpoints
from diffusionpipe.trainer.data.batches import loader
from diffusionpipe.trainer.checkpoints.checkpoint import Saving
from diffusionpipe.trainer.data.batches.workers import DataWorkers

member = membership(os.environ)

def starting_stuck_workers(make, steps, num_workers):
    return DataWorkers(worker_batches.StuckAt(make, 3), steps, num_workers)

def at_step(step, then):
    def happen(job, recipe):
        if member.rank == 1:
            then()
    return {{step: happen}}

def stop_in_a_layer():
    mock.patch.object(compiler, "run_backward", lambda *_: time.sleep(600)).start()

def stop_before_the_sum():
    mock.patch.object(run.Stepper, "_start_sum", lambda *_: time.sleep(600)).start()

def slowly(module, name, seconds):
    inner = getattr(module, name)
    def slow(*arguments, **options):
        time.sleep(seconds)
        return inner(*arguments, **options)
    mock.patch.object(module, name, slow).start()

try:
    with joined(member, device="cpu") as job:
        options = {{}}
        {body}
        train(job, recipe_of(Path({model!r}), Path({data!r}), Path({folder!r}), **{sections!r}), **options)
except BaseException as error:
    leave(error, member)
"""
IN_A_LAYER = "options['at'] = at_step(4, stop_in_a_layer)"
BEFORE_THE_SUM = "options['at'] = at_step(4, stop_before_the_sum)"
IN_A_WORKER = """
if member.rank == 1:
    mock.patch.object(loader, "DataWorkers", starting_stuck_workers).start()
"""
ON_A_DISK = """
options['at'] = {2: ask_to_save}
if member.rank == 1:
    mock.patch.object(Saving, "write", lambda *_: time.sleep(600)).start()
"""
SLOW = """
slowly(compiler, "run_backward", 0.8)
slowly(run_checkpoints, "training_tensors", 3)
slowly(drawing, "decode", 3)
"""

DENOISING = """
if member.rank == {rank}:
    def fail(*_, **__):
        raise {error}
    mock.patch.object(sampling.PipelinePredictor, "__call__", fail).start()
"""
ABORTING = """
if member.rank == 0:
    mock.patch.object(run.Stepper, "_start_sum", lambda *_: os.abort()).start()
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return save_dit(folder / "model"), save_pictures(folder / "data")


def ends(body, inputs, folder, **sections):
    """Exit status and standard error of two ranks."""
    model, data = map(str, inputs)
    body = body.strip().replace("\n", "\n        ")
    script = SCRIPT.format(body=body, model=model, data=data, folder=str(folder), sections=sections)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    environment = os.environ | {name: str(value) for name, value in job.items()} | {"TORCH_CPP_LOG_LEVEL": "FATAL"}
    ranks = [Forked(script, environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    try:
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
        return [(rank.returncode, error) for rank, error in zip(ranks, errors, strict=True)]
    finally:
        for rank in ranks:
            rank.close()


@pytest.mark.parametrize(
    ("body", "changed", "place", "waits", "frame"),
    [
        pytest.param(
            IN_A_LAYER,
            {"pipeline": {"stages": 2}},
            "step 4, action 1B0 (backward of stage 1, micro-batch 0)",
            "step 4, action 0B0 (backward of stage 0, micro-batch 0)",
            "in backward",
            id="in a layer",
        ),
        pytest.param(
            BEFORE_THE_SUM,
            {"pipeline": {"data_parallel": 2}},
            "step 4",
            "step 4, the sum over all ranks",
            "in step",
            id="before a collective",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            IN_A_WORKER,
            {"pipeline": {"data_parallel": 2}, "data": {"workers": 1}},
            r"step 4, waiting for its data worker (process ",
            "step 4",
            "worker_batches.py",
            id="in a data worker",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_that_stops_is_named_with_its_place(body, changed, place, waits, frame, inputs, tmp_path):
    sections = changed | {"run": {"folder": str(tmp_path), "stuck_after": 1.0}}
    for status, error in ends(body, inputs, tmp_path, **sections):
        assert status == 1
        lines = error.splitlines()
        found = next(line for line in lines if "has made no progress" in line)
        assert re.match(r"rank 1 \(.*, process \d+\) has made no progress for [1-9]\.\d s: ", found), error
        assert f" s: {place}" in found
        assert any(line.startswith(f"rank 0 waits for it: {waits}") for line in lines), error
        assert "The limit here was 1 s; run.stuck_after changes it." in lines
    logs = tmp_path / "logs"
    assert frame in (logs / "rank_1.stacks").read_text()
    assert "trainer/course/run.py" in (logs / "rank_0.stacks").read_text()


@pytest.mark.slow
def test_a_disk_that_hangs_while_the_steps_go_on_is_noticed(inputs, tmp_path):
    sections = {"training": {"steps": 10_000_000}, "run": {"folder": str(tmp_path), "stuck_after": 1.0}}
    for status, error in ends(ON_A_DISK, inputs, tmp_path, **sections):
        assert status == 1
        found = next(line for line in error.splitlines() if "has made no progress" in line)
        assert re.match(r"rank 1 .* for 1\d s: writing the checkpoint of step 2 \(step \d+\)", found), error
        assert "The limit here was 10 s; run.stuck_after changes it." in error
    assert max(losses_of(tmp_path)) > 3
    assert "in write" in (tmp_path / "logs" / "rank_1.stacks").read_text()


@pytest.mark.slow
def test_a_run_that_is_slow_outside_its_steps_goes_on(inputs, tmp_path):
    """First step, save and drawing each take more than three times the limit of a step."""
    sections = {
        "training": {"steps": 1},
        "pipeline": {"stages": 2, "microbatches": 4},
        "sampling": {"every": 1, "labels": [1], "steps": 2},
        "run": {"folder": str(tmp_path), "stuck_after": 1.0},
    }
    for status, error in ends(SLOW, inputs, tmp_path, **sections):
        assert (status, "no progress" in error) == (0, False), error
    assert sorted(losses_of(tmp_path)) == [1]
    assert not list((tmp_path / "logs").glob("*.stacks"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "error", "cause"),
    [
        (0, 'RuntimeError("shapes differ")', "RuntimeError: shapes differ"),
        (1, '__import__("torch").OutOfMemoryError("CUDA out of memory.")', "CUDA out of memory."),
    ],
    ids=["error", "no memory"],
)
def test_a_denoising_step_that_fails_ends_all_ranks_with_its_cause(rank, error, cause, inputs, tmp_path):
    """The others wait for its tensors, so training cannot go on, unlike where only the decoding lacks memory."""
    sections = {
        "pipeline": {"stages": 2},
        "sampling": {"every": 1, "labels": [1], "steps": 2},
        "run": {"folder": str(tmp_path)},
    }
    ranks = ends(DENOISING.format(rank=rank, error=error), inputs, tmp_path, **sections)
    for number, (status, text) in enumerate(ranks):
        assert status == 1
        last = "\n".join(text.splitlines()[-10:])
        assert cause in last, text
        assert number == rank or f"rank {rank}" in last, text


@pytest.mark.slow
def test_a_first_rank_that_aborts_is_named_by_the_others(inputs, tmp_path):
    """It holds the store through which the ranks would tell each other. NCCL's watchdog ends a rank this way."""
    started = time.monotonic()
    (first, _), (second, text) = ends(ABORTING, inputs, tmp_path, run={"folder": str(tmp_path)})
    assert (first, second) == (-signal.SIGABRT, 1)
    assert "rank 0 (" in "\n".join(text.splitlines()[-10:]), text
    assert time.monotonic() - started < 60
