"""Figures of a run on a device that only takes work in while the host goes on, as GPUs do."""

from unittest import mock

import pytest
from tiny_runs import recipe_of, save_dit, save_pictures, train_here

from diffusionpipe.trainer.metrics import read_metrics

ACTION = 3.0
"""Seconds of the device between two marks; the host passes them in microseconds."""


class SlowDevice:
    """Marks like CUDA events: their times are the device's, and reading them waits for it."""

    def __init__(self) -> None:
        self._num_marks = 0

    def mark(self) -> None:
        self._num_marks += 1

    def reset(self) -> None:
        self._num_marks = 0

    def times(self) -> list[float]:
        return [ACTION * i for i in range(self._num_marks)]

    def passed(self) -> int:
        return self._num_marks


def test_times_and_bubble_are_the_devices(tmp_path):
    recipe = recipe_of(
        save_dit(tmp_path / "model"), save_pictures(tmp_path / "data"), tmp_path / "run", training={"steps": 2}
    )
    with mock.patch("diffusionpipe.runtime.executor.recorder_for", side_effect=lambda device: SlowDevice()):
        assert train_here(recipe) == 2
    rows = [row for row in read_metrics(tmp_path / "run") if "bubble" in row]
    assert len(rows) == 2
    for row in rows:
        actions = row["iteration_s"] / ACTION
        assert actions == round(actions) >= 4  # two micro-batches, each forward and backward
        assert row["bubble"] == pytest.approx(1 / actions)  # the end of the iteration: one rank waits for nobody
