"""Figures of a run on a device that only takes work in while the host goes on, as GPUs do."""

import itertools
from unittest import mock

import pytest
from kit.asynchronous_device import AsynchronousDevice, AsynchronousRecorder
from kit.tiny_runs import losses_of, recipe_of, save_dit, save_pictures, train_here

from diffusionpipe.errors import NonFiniteLossError
from diffusionpipe.trainer.course import run
from diffusionpipe.trainer.reporting.metrics import read_metrics
from diffusionpipe.trainer.step import loop
from diffusionpipe.trainer.step.host_sum import HostSum

ACTION = 3.0
"""Seconds of the device between two marks; the host passes them in microseconds."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    return save_dit(folder / "model"), save_pictures(folder / "data")


def train_on(device, recipe, **options):
    """A run whose executors and sums are on such a device; for each step the waits of the host in it, and its marks."""
    steps = []

    class Sum(HostSum):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            self.mark = device.issue()

        def wait(self):
            device.wait(self.mark)
            return super().wait()

    def step(self, *arguments, original=loop.Stepper.step):
        start, waits = len(device.ends), len(device.waits)
        found = original(self, *arguments)
        steps.append((start, device.waits[waits:]))
        return found

    with (
        mock.patch(
            "diffusionpipe.runtime.engine.executor.recorder_for", side_effect=lambda _: AsynchronousRecorder(device)
        ),
        mock.patch.object(loop, "HostSum", Sum),
        mock.patch.object(loop.Stepper, "step", step),
        mock.patch.object(run, "NUM_TRACED", 0),
    ):
        train_here(recipe, **options)
    return steps


def test_times_and_bubble_are_the_devices(sources, tmp_path):
    train_on(AsynchronousDevice(lambda: ACTION), recipe_of(*sources, tmp_path, training={"steps": 2}))
    rows = [row for row in read_metrics(tmp_path) if "bubble" in row]
    assert len(rows) == 2
    for row in rows:
        actions = row["iteration_s"] / ACTION
        assert actions == round(actions) >= 4  # two micro-batches, each forward and backward
        assert row["bubble"] == pytest.approx(1 / actions)  # the end of the iteration: one rank waits for nobody
        assert row["step_s"] == pytest.approx(row["data_s"] + row["iteration_s"] + row["update_s"])
        assert row["update_s"] >= 0


def test_each_steps_own_times_are_in_its_line_though_they_are_known_a_step_later(sources, tmp_path):
    lengths = itertools.chain([0.0] * 1000)
    device = AsynchronousDevice(lambda: next(lengths))
    seen = []

    def number_steps(*_):
        nonlocal lengths
        lengths = itertools.repeat(float(len(seen) + 1))
        seen.append([row["step"] for row in read_metrics(tmp_path) if "loss" in row])

    train_on(device, recipe_of(*sources, tmp_path, training={"steps": 4}), at=dict.fromkeys(range(1, 5), number_steps))
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    first = rows[0]["iteration_s"]
    assert [row["iteration_s"] for row in rows] == [first * step for step in (1, 2, 3, 4)]
    assert seen == [[], [], [1], [1, 2]]  # when steps 1, 2, 3 and 4 began


@pytest.mark.parametrize("is_checked_later", [False, True])
def test_the_host_waits_for_a_step_once_at_most_and_never_where_it_is_checked_later(
    sources, tmp_path, is_checked_later
):
    training = {"steps": 6, "clip_norm": 1e9, "post_validation": is_checked_later}
    device = AsynchronousDevice(lambda: ACTION)
    steps = train_on(device, recipe_of(*sources, tmp_path, training=training))
    waits = [sum(mark >= start for mark in waits) for start, waits in steps]  # for what the step itself has issued
    assert waits == ([1] + [0] * 5 if is_checked_later else [1] * 6)  # the first decides about the next ones
    assert sorted(losses_of(tmp_path)) == [1, 2, 3, 4, 5, 6]


def test_no_line_is_lost_where_training_fails(sources, tmp_path):
    def fail(*_):
        raise KeyError("failed")

    recipe = recipe_of(*sources, tmp_path, training={"steps": 4})
    with pytest.raises(KeyError, match="failed"):
        train_on(AsynchronousDevice(lambda: ACTION), recipe, at={3: fail})
    assert [(row["step"], row["bubble"] is None) for row in read_metrics(tmp_path)] == [(1, False), (2, True)]


def test_the_step_before_one_that_is_not_finite_has_all_its_numbers(sources, tmp_path):
    recipe = recipe_of(*sources, tmp_path, training={"steps": 4}, optimizer={"learning_rate": 1e30})
    with pytest.raises(NonFiniteLossError):
        train_on(AsynchronousDevice(lambda: ACTION), recipe)
    rows = read_metrics(tmp_path)
    assert rows
    assert all(row["bubble"] is not None for row in rows)
