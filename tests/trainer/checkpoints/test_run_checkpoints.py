"""Checkpoints that are written while training goes on."""

import logging
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from kit.background_saves import PATIENCE, WRITING, train_and_hear, train_with_a_full_disk, train_with_late_writes
from kit.full_disk import REASONS, full_disk
from kit.tiny_runs import losses_of, recipe_of, save_dit, save_pictures, tensors_of, train, train_here
from torch import nn

from diffusionpipe.errors import CheckpointError, NonFiniteLossError, NonFiniteWeightsError, RecipeError
from diffusionpipe.runtime.job.membership import membership
from diffusionpipe.runtime.job.process_group import joined
from diffusionpipe.trainer.checkpoints.background_task import BackgroundTask
from diffusionpipe.trainer.checkpoints.checkpoint import Saving, save, verify
from diffusionpipe.trainer.checkpoints.checkpoint_folder import latest, saved_checkpoints
from diffusionpipe.trainer.checkpoints.host_copy import HostCopy
from diffusionpipe.trainer.checkpoints.manifest import read_manifest
from diffusionpipe.trainer.checkpoints.run_checkpoints import RunCheckpoints
from diffusionpipe.trainer.checkpoints.training_state import TrainingState
from diffusionpipe.trainer.course import copy_memory
from diffusionpipe.trainer.course.copy_memory import MemoryNeed, shortage_of
from diffusionpipe.trainer.reporting.screen import NoScreen

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def names_of(run_folder):
    return [path.name for path in saved_checkpoints(run_folder)]


# One process, without a training.


def tensors():
    """Of several types, shapes and orders in memory."""
    generator = torch.Generator().manual_seed(0)
    return {
        "model.a": torch.randn(5, 3, generator=generator),
        "model.b": torch.randn(4, 2, 3, generator=generator, dtype=torch.float64).transpose(0, 1),
        "model.c": nn.Parameter(torch.randn(7, generator=generator).bfloat16()),
        "model.part": torch.randn(100, generator=generator)[10:30],
        "model.every_second": torch.randn(20, generator=generator)[::2],
        "model.none": torch.zeros(0, 3),
        "optimizer.a.step": torch.tensor(3.0),
        "optimizer.a.seen": torch.tensor([True, False]),
    }


def test_a_copy_is_written_with_the_bytes_of_the_tensors_although_they_change(tmp_path):
    expected = save(tmp_path / "synchronous", 3, tensors(), {"step": 3}, keep=1)
    given, saving, host = tensors(), Saving(tmp_path / "asynchronous", 3, {"step": 3}), HostCopy(CPU)
    copies = host.start({name: given[name] for name in saving.plan(given)})
    host.complete()
    host.protect()

    def change() -> None:
        with torch.no_grad():
            for tensor in given.values():
                tensor.zero_()

    change()
    part = saving.write(copies, change)
    saving.collect(part)
    saving.publish()
    verify(saving.path)
    data = "rank-0.safetensors"
    assert (saving.path / data).read_bytes() == (expected / data).read_bytes()
    names = [[record.name for record in read_manifest(path).files] for path in (saving.path, expected)]
    assert names[0] == names[1]
    found = tensors_of(saving.path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors().items())


def test_the_memory_of_a_copy_is_kept_for_the_next_one():
    host, given = HostCopy(CPU), tensors()

    def copied(sources):
        copies = host.start(sources)
        host.complete()
        return copies

    first = copied(given)
    places = {name: tensor.data_ptr() for name, tensor in first.items() if tensor.numel()}
    given["model.a"] += 1
    second = copied(given)
    assert {name: tensor.data_ptr() for name, tensor in second.items() if tensor.numel()} == places
    assert torch.equal(second["model.a"], given["model.a"])
    third = copied(given | {"model.new": torch.ones(3)})
    assert torch.equal(third["model.new"], torch.ones(3))


def test_a_disk_that_fills_while_a_copy_is_written_is_named(tmp_path):
    given = {"model.w": torch.zeros(20_000)}
    with full_disk(tmp_path, free=16384) as folder:
        saving = Saving(folder, 2, {})
        saving.plan(given)
        with pytest.raises((CheckpointError, OSError), match=REASONS):
            saving.write(given, lambda: None)
        assert "step 2 could not be written: full\nthere is no earlier" in str(saving.give_up(CheckpointError("full")))
        assert list((folder / "checkpoints").iterdir()) == []


def test_nothing_changes_before_it_is_copied():
    host, given, seen = HostCopy(CPU), {"w": torch.ones(3)}, []
    copies = host.start(given)

    def update():
        host.protect()
        seen.append(copies["w"].tolist())
        given["w"].zero_()

    thread = threading.Thread(target=update)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    host.complete()
    thread.join(PATIENCE)
    assert seen == [[1.0] * 3]


@contextmanager
def checkpoints_of(folder, keep=1):
    """What a run of one process has, with a job."""
    with joined(membership({}), device="cpu") as job:
        yield RunCheckpoints(job, folder, keep, NoScreen(), is_asynchronous=True)


def state_with(value):
    parameter = nn.Parameter(torch.full((10,), float(value)))
    return TrainingState(model={"w": parameter}, trainable={"w": parameter}, optimizer=None, ema=None)


def go_on(checkpoints, step):
    """The steps that follow, until nothing is on its way."""
    for later in range(step + 1, step + 4):
        for thread in threading.enumerate():
            if "checkpoint of step" in thread.name:
                thread.join(PATIENCE)
        checkpoints.after(later, checkpoints.vote())
    assert checkpoints.is_idle


def test_a_checkpoint_gets_its_name_when_all_ranks_are_ready_and_the_older_one_goes_then(tmp_path):
    with checkpoints_of(tmp_path) as checkpoints:
        assert checkpoints.vote() == 0
        checkpoints.save(5, state_with(5), {"step": 5}, is_proven=False, is_last=False)
        assert not checkpoints.is_idle
        assert names_of(tmp_path) == []
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".step-00000005.writing"]
        checkpoints.after(6, 0)  # another rank is not ready
        assert names_of(tmp_path) == []
        go_on(checkpoints, 6)
        assert names_of(tmp_path) == ["step-00000005"]
        checkpoints.save(10, state_with(10), {"step": 10}, is_proven=False, is_last=False)
        assert names_of(tmp_path) == ["step-00000005"]
        go_on(checkpoints, 10)
        assert names_of(tmp_path) == ["step-00000010"]
        assert torch.equal(tensors_of(latest(tmp_path))["model.w"], torch.full((10,), 10.0))


def test_the_older_checkpoint_stays_until_the_weights_of_the_newer_have_given_a_loss(tmp_path):
    with checkpoints_of(tmp_path) as checkpoints:
        for step in (5, 10):
            checkpoints.save(step, state_with(step), {}, is_proven=False, is_last=False)
            checkpoints.finish()
        assert names_of(tmp_path) == ["step-00000005", "step-00000010"]
        checkpoints.after(11, checkpoints.vote())
        assert names_of(tmp_path) == ["step-00000010"]


def test_the_next_save_waits_for_the_one_under_way_and_says_so(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="diffusionpipe")
    with checkpoints_of(tmp_path, keep=2) as checkpoints:
        checkpoints.save(5, state_with(5), {}, is_proven=True, is_last=False)
        checkpoints.save(6, state_with(6), {}, is_proven=True, is_last=True)
        assert checkpoints.is_idle
    assert names_of(tmp_path) == ["step-00000005", "step-00000006"]
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("step=6 waited_s=") and "of step 5 was still being written" in line for line in lines)
    saved = [line for line in lines if line.startswith("checkpoint=")]
    assert len(saved) == 2
    assert all(" standstill_s=" in line and " save_s=" in line for line in saved)


def test_weights_that_are_not_finite_are_found_by_the_thread_and_leave_nothing(tmp_path):
    with checkpoints_of(tmp_path) as checkpoints:
        checkpoints.save(5, state_with("nan"), {}, is_proven=False, is_last=False)
        with pytest.raises(NonFiniteWeightsError, match=r"after step 5 the weights are not finite, first model\.w"):
            checkpoints.finish()
        assert checkpoints.is_idle
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_an_error_of_all_ranks_lets_the_checkpoint_under_way_be_completed(tmp_path):
    with checkpoints_of(tmp_path) as checkpoints:
        checkpoints.save(5, state_with(5), {}, is_proven=False, is_last=False)
        checkpoints.leave(NonFiniteLossError("nan"))
    assert names_of(tmp_path) == ["step-00000005"]


def test_a_thread_that_nobody_waits_for_ends_after_its_present_part():
    started = threading.Event()

    def work(go_on):
        started.set()
        while True:
            go_on()

    with joined(membership({}), device="cpu") as job:
        task = BackgroundTask(work, "forever", job.progress)
        assert started.wait(PATIENCE)
        assert not task.is_done
        task.abandon(PATIENCE)
        assert task.has_failed


# Whole runs.


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saves")
    save_dit(folder / "dit")
    save_pictures(folder / "data")
    return folder


@pytest.fixture
def recipe(place, tmp_path):
    def make(name, **sections):
        base = {"checkpoint": {"every": 2, "keep": 5, "asynchronous": True}}
        merged = {key: base.get(key, {}) | sections.get(key, {}) for key in {**base, **sections}}
        return recipe_of(place / "dit", place / "data", tmp_path / name, **merged)

    return make


def assert_equal_checkpoints(found: Path, expected: Path):
    a, b = tensors_of(found), tensors_of(expected)
    assert a.keys() == b.keys()
    assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def test_checkpoints_of_a_run_that_trains_on_are_those_of_one_that_stands_still(crew, recipe, tmp_path):
    """Each is written only after two more steps, when weights, optimizer and average have changed."""
    assert crew.run(train, recipe("still", checkpoint={"asynchronous": False})) == [6, 6]
    found = crew.run(train_with_late_writes, recipe("beside"), {2: 4, 4: 6})
    assert [steps for steps, _ in found] == [6, 6]
    assert names_of(tmp_path / "beside") == ["step-00000002", "step-00000004", "step-00000006"]
    for name in names_of(tmp_path / "still"):
        assert_equal_checkpoints(*(tmp_path / run / "checkpoints" / name for run in ("beside", "still")))
    assert losses_of(tmp_path / "beside") == losses_of(tmp_path / "still")
    assert any("the checkpoint of step 2 was still being written" in line for line in found[0][1])
    assert not any("checkpoint" in line for line in found[1][1])  # rank 0 speaks

    shutil.rmtree(tmp_path / "beside" / "checkpoints" / "step-00000006")
    assert crew.run(train, recipe("beside"), "latest") == [6, 6]
    assert_equal_checkpoints(latest(tmp_path / "beside"), latest(tmp_path / "still"))
    assert losses_of(tmp_path / "beside") == losses_of(tmp_path / "still")


def test_a_rank_that_cannot_write_while_training_goes_on_ends_all_at_the_next_step(crew, recipe, tmp_path):
    errors = crew.run(train_with_a_full_disk, recipe("full", training={"steps": 30}), step=4, rank=1)
    assert [type(error) for error in errors] == [CheckpointError] * 2
    assert str(errors[0]) == str(errors[1])
    folder = tmp_path / "full" / "checkpoints"
    assert str(errors[0]) == (
        "the checkpoint of step 4 could not be written: rank 1: OSError: [Errno 28] No space left on device\n"
        f"the last good checkpoint is {folder / 'step-00000002'}"
    )
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    assert max(losses_of(tmp_path / "full")) in (5, 6)


def test_weights_that_are_not_finite_reach_no_checkpoint_of_a_run_that_trains_on(crew, recipe, tmp_path):
    sections = {"training": {"clip_norm": None, "steps": 3}, "optimizer": {"learning_rate": 1e39}}
    found = crew.run(train_and_hear, recipe("ruined", checkpoint={"every": 1}, **sections))
    assert all(text.startswith("NonFinite") for text, _ in found)
    assert any("after step 1 the weights are not finite" in line for line in (found[0][0], *found[0][1]))
    assert list((tmp_path / "ruined" / "checkpoints").iterdir()) == []


# Is there memory for a copy?

GIB = 2**30


def demand(host="a", held=GIB, owned=GIB, later=0, free=4 * GIB):
    return MemoryNeed(host=host, machine=host, held=held, owned=owned, later=later, free=free)


def test_the_copies_of_all_ranks_of_a_machine_must_fit_beside_what_training_takes_itself():
    assert shortage_of([demand()] * 4) is None
    problem = shortage_of([demand()] * 5)
    assert problem == "a copy of the training's state needs 5.00 GiB of host memory on a, where 4.00 GiB are left"
    assert shortage_of([demand(host=name) for name in "aabbb"]) is None
    full = demand(host="b", held=2 * GIB, owned=2 * GIB, later=7 * GIB // 2, free=9 * GIB // 2)
    assert "on b, where 1.00 GiB" in shortage_of([demand(), full])
    assert shortage_of([demand(free=None)] * 100) is None


def test_of_what_several_ranks_hold_each_copies_a_part():
    assert shortage_of([demand(owned=GIB if rank == 0 else 0) for rank in range(8)]) is None


def test_a_copy_that_does_not_fit_is_refused_or_replaced_by_waiting(recipe, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(copy_memory, "free_memory", lambda: 1000)
    with pytest.raises(RecipeError, match=r"checkpoint.asynchronous: a copy .* needs 0.00 GiB .*; set it to \"auto\""):
        train_here(recipe("refused"))
    assert not (tmp_path / "refused" / "checkpoints").exists()
    caplog.set_level(logging.INFO, logger="diffusionpipe")
    train_here(recipe("waits", training={"steps": 3}, checkpoint={"asynchronous": "auto"}))
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith('asynchronous_checkpoints=False reason="a copy of the training') for line in lines)
    assert names_of(tmp_path / "waits") == ["step-00000002", "step-00000003"]
    assert not any(thread.name.startswith(WRITING) for thread in threading.enumerate())
