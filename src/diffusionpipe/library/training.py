"""`dp.train`: a recipe trained as the command line trains it, with functions that hear of each step."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from diffusionpipe.errors import ConfigError, TrainingError
from diffusionpipe.library.environment import place_in_job
from diffusionpipe.trainer.launching.exit_status import ExitStatus
from diffusionpipe.trainer.recipe import load_recipe
from diffusionpipe.trainer.reporting.metrics import METRICS
from diffusionpipe.units import Seconds
from diffusionpipe.workflows.training.job import TrainingJob, arguments_of_rank, start
from diffusionpipe.workflows.training.part import default_ranks

Callback: TypeAlias = Callable[[int, Mapping[str, float | None]], object]
"""A function that is called with a step and its numbers by name, such as "loss" and "step_s"."""
_PAUSE: Seconds = 0.1


def train(
    recipe: str | os.PathLike[str],
    *overrides: str,
    ranks: int | None = None,
    callbacks: Sequence[Callback] = (),
    device: str = "auto",
    resume: str | None = None,
) -> Path:
    """Train a recipe to its end, and return the run's folder.

    Args:
        recipe: the path of a TOML file.
        overrides: keys to change, such as "training.batch=64".
        ranks: processes to start, one for each device; None: one for each GPU, else 1. Not under torchrun.
        callbacks: called in this process with the numbers of each line of metrics.jsonl; under torchrun on rank 0. The
            first one that raises an error stops the training after a checkpoint, and the error is raised.
        device: "auto", "cpu" or "cuda".
        resume: "latest", "auto", a step or the path of a checkpoint; None begins at step 0.

    Raises:
        ConfigError: the recipe cannot be trained.
        PeerError: a rank has failed.
        TrainingError: the training was stopped before its end.
    """
    member = place_in_job()
    if member is not None and ranks is not None:
        raise ConfigError("torchrun has started the ranks already; leave out ranks")
    if ranks is not None and ranks < 1:
        raise ConfigError(f"ranks={ranks}: give a number of at least 1, or leave it out")
    if wrong := [one for one in callbacks if not callable(one)]:
        raise ConfigError(f"callbacks: {wrong[0]!r} cannot be called; give functions of a step and its numbers")
    loaded = load_recipe(Path(recipe), overrides)
    count = ranks or default_ranks(device)
    job = TrainingJob(
        recipe=Path(recipe),
        overrides=overrides,
        folder=loaded.run.folder,
        devices=range(count),
        device=device,
        resume=resume,
        take_over=False,
        port=None,
        max_restarts=0,
        uses_cache=True,
    )
    listener = _Listener(loaded.run.folder / METRICS, callbacks if member is None or member.rank == 0 else ())
    with listener:
        if member is None:
            status = start(job)
        else:
            # torchrun's variables are inherited, so the process becomes this rank of the job.
            process = subprocess.Popen([sys.executable, "-m", "diffusionpipe", *arguments_of_rank(job, resume)])
            listener.stop = process.terminate
            status = process.wait()
    if listener.error is not None:
        raise listener.error
    if status == ExitStatus.STOPPED:
        raise TrainingError(f"the training was stopped and has saved a checkpoint in {loaded.run.folder}; give resume=")
    if status:
        raise TrainingError(f"the training ended with status {status}; its messages say why")
    return loaded.run.folder


class _Listener:
    """A thread that follows metrics.jsonl while a training writes it, and calls functions with each line's numbers.

    Used in a `with` block; the first error of a function is kept in `error`, and `stop` is then called. Mutable.
    """

    def __init__(self, path: Path, callbacks: Sequence[Callback]) -> None:
        self._path, self._callbacks = path, callbacks
        self._before = _lines_from(path, 0)
        """The lines of earlier runs in the file: a resumed run keeps the first of them, and a new one none."""
        self._told: int | None = None
        """The number of the file's bytes that the functions have got; None while the file has no line of this run."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="callbacks", daemon=True)
        self.stop: Callable[[], None] = _ask_launcher
        """A function that asks the training to stop."""
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        if self._callbacks:
            self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        if self._callbacks:
            self._thread.join()

    def _follow(self) -> None:
        while not self._is_over.wait(_PAUSE) and self.error is None:
            self._tell()
        if self.error is None:
            self._tell()

    def _tell(self) -> None:
        lines = _lines_from(self._path, self._told or 0)
        if self._told is not None:
            self._told += sum(map(len, lines))
            self._call(lines)
            return
        # This run begins with the first line that no earlier run wrote.
        same = next((n for n, (a, b) in enumerate(zip(lines, self._before, strict=False)) if a != b), None)
        same = min(len(lines), len(self._before)) if same is None else same
        if len(lines) > same:
            self._told = sum(map(len, lines))
            self._call(lines[same:])
        else:
            self._before = lines

    def _call(self, lines: Sequence[bytes]) -> None:
        try:
            for line in lines:
                row = json.loads(line)
                step = int(row.pop("step"))
                for callback in self._callbacks:
                    callback(step, dict(row))
        except BaseException as error:
            self.error = error
            # After the end there is no training that could stop.
            if not self._is_over.is_set():
                self.stop()


def _ask_launcher() -> None:
    """Send SIGTERM to this process if the launcher at work in it handles the signal; it then asks the ranks to stop."""
    if callable(signal.getsignal(signal.SIGTERM)):
        os.kill(os.getpid(), signal.SIGTERM)


def _lines_from(path: Path, start: int) -> list[bytes]:
    """The complete lines of a file from the byte `start` on; [] if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return [line for line in file if line.endswith(b"\n")]
    except OSError:
        return []
