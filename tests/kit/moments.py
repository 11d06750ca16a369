"""Moments of a rank's work at which a test makes it wait, so that what happens to it then happens exactly there."""

import importlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

PLACES = {
    "joining": "diffusionpipe.runtime.job.process_group:admit",
    "the lock": "diffusionpipe.trainer.course.run:locked_folder",
    "reading the model": "diffusionpipe.trainer.course.run:open_model",
    "reading the data": "diffusionpipe.trainer.course.run:read_data",
    "measuring": "diffusionpipe.profiler.measured:_run_once",
    "measuring links": "diffusionpipe.profiler.links:measure_links",
    "planning": "diffusionpipe.trainer.setup.session:build_worker",
    "verifying": "diffusionpipe.trainer.course.run:checkpoint_of",
    "loading": "diffusionpipe.trainer.course.run:load_training",
    "starting workers": "diffusionpipe.trainer.data.batches.loader:DataWorkers",
    "a step": "diffusionpipe.trainer.step.loop:Stepper.step",
    "a backward": "diffusionpipe.runtime.engine.compiler:run_backward",
    "the sum": "diffusionpipe.trainer.step.loop:Stepper._start_sum",
    "encoding a batch": "diffusionpipe.trainer.step.windows:WindowStepper._feed",
    "an update": "diffusionpipe.trainer.step.windows:WindowStepper._update",
    "the sum of a window": "diffusionpipe.trainer.step.windows:WindowStepper._start_sum",
    "the average": "diffusionpipe.trainer.optim.ema:Ema.update",
    "recording": "diffusionpipe.trainer.course.step_reports:StepReports._write",
    "making the folder": "diffusionpipe.trainer.checkpoints.checkpoint:_make_empty",
    "writing tensors": "diffusionpipe.trainer.checkpoints.checkpoint:Saving.write",
    "checksums": "diffusionpipe.trainer.checkpoints.checkpoint:describe_files",
    "publishing": "diffusionpipe.trainer.checkpoints.checkpoint:_publish",
    "the manifest": "diffusionpipe.trainer.checkpoints.checkpoint:write_manifest",
    "the rename": "diffusionpipe.trainer.checkpoints.checkpoint:sync",
    "pruning": "diffusionpipe.trainer.checkpoints.checkpoint:prune",
    "validating": "diffusionpipe.trainer.course.run:validate",
    "a validation batch": "diffusionpipe.trainer.course.evaluation:_add_losses",
    "drawing": "diffusionpipe.trainer.course.run:draw_in_session",
    "a drawing step": "diffusionpipe.trainer.inference.denoise:PipelinePredictor.__call__",
    "decoding": "diffusionpipe.trainer.inference.drawing:decode",
    "keeping samples": "diffusionpipe.trainer.course.run:keep_in_session",
    "exporting": "diffusionpipe.trainer.course.run:export",
    "writing the export": "diffusionpipe.trainer.exports.export:_copy_frozen",
    "replacing the export": "diffusionpipe.trainer.exports.export:_replace",
    "drawing results": "diffusionpipe.workflows.training.part:draw_results",
}
"""Functions, at whose beginning a rank waits; "start": before anything."""


@dataclass(frozen=True)
class Moment:
    """The `count`-th time that a rank comes to a place, in the first start of a job."""

    place: str
    rank: int
    count: int = 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Moment":
        return cls(**found)

    def arm(self, rank: int, folder: Path) -> None:
        """In rank `rank`: wait there, with the file `reached` as a sign, until there is a file `go`."""
        if rank != self.rank:
            return
        if self.place == "start":
            _wait(folder)
            return
        self.watch(partial(_wait, folder))

    def watch(self, act: Callable[[], None]) -> None:
        """In this process: do something there."""
        module, _, path = PLACES[self.place].partition(":")
        *names, name = path.split(".")
        owner: Any = importlib.import_module(module)
        for inner in names:
            owner = getattr(owner, inner)
        function, calls = getattr(owner, name), 0

        def waiting(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.count:
                act()
            return function(*arguments, **options)

        mock.patch.object(owner, name, waiting).start()


def _wait(folder: Path) -> None:
    try:
        (folder / "reached").touch(exist_ok=False)
    except FileExistsError:
        return  # in a restart
    deadline = time.monotonic() + 60
    while not (folder / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
