"""A search for a faster layout beside a training: `python -m diffusionpipe.workflows.training.replanning`, a process.

    rank 0 ──request──> stdin │ idle priority, limited processor time │ stdout ──> {"sizes": ..., "step_s": ...}
                              │ plan.suggested.json, its prediction   │            or null

Only cores that would else be idle work for it, so that training does not wait. It ends with its parent.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from diffusionpipe.costs import Cluster, Profile
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.costs.files import read_profile
from diffusionpipe.holding import State, Workload
from diffusionpipe.ir.files import Format, from_text, to_text, write_plan
from diffusionpipe.planner import Given, Setting
from diffusionpipe.planner.choosing.suggestion import suggest
from diffusionpipe.runtime.job.parent_death import end_with_parent
from diffusionpipe.units import Bytes, Seconds
from diffusionpipe.workflows.planning.prediction_file import write_prediction

CPU_LIMIT = 300
"""Seconds of processor time that a search may take."""
TIME_LIMIT: Seconds = 1800.0
"""Most seconds on the clock: work of idle priority may wait long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A workload without the places of its weights, as a file can hold it."""

    batch: int
    states: tuple[State, ...]
    once: Bytes
    checkpointed: tuple[str, ...]
    encode_chunk: int

    @property
    def workload(self) -> Workload:
        """The planner's workload, with all weights on the device."""
        return Workload(
            batch=self.batch,
            states=self.states,
            once=self.once,
            checkpointed=self.checkpointed,
            encode_chunk=self.encode_chunk,
        )


def training_of(workload: Workload) -> Training:
    """The part of a workload that the search for a better layout needs."""
    return Training(
        batch=workload.batch,
        states=workload.states,
        once=workload.once,
        checkpointed=workload.checkpointed,
        encode_chunk=workload.encode_chunk,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The question to a search for a better layout: profile, cluster, training and present step."""

    profile: str
    """Path of the corrected profile."""
    cluster: str
    """Path of the corrected cluster."""
    plan: str
    """Path of the plan file that it may write."""
    training: Training
    given: Given
    fill: bool | None
    sample_batch: int
    step: Seconds
    """Step of the present layout, by the corrected profile."""
    parent: int
    """The number of the process that asks."""


REQUEST = Format("diffusionpipe-replanning", Request)


@dataclass(frozen=True, slots=True)
class FoundLayout:
    """The sizes and the predicted step of the better layout whose plan a search has written."""

    sizes: str
    step: Seconds


class Replanning:
    """A search for a better layout in a process of its own, seen from the process that asked. Mutable: it may end."""

    def __init__(self, request: Request, errors: Path) -> None:
        """Start the search; `errors`: the file for what it writes to its standard error."""
        with errors.open("w", encoding="utf-8") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "diffusionpipe.workflows.training.replanning"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C ends the training first, which then ends this
            )
        self._started, self._limit = monotonic(), TIME_LIMIT
        assert self._process.stdin is not None, "it is a pipe"
        # A search that has died already shows it by its status.
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(to_text(request, REQUEST))

    def is_over(self) -> bool:
        """Whether the search has ended; one that has used up its time is ended here."""
        if self._process.poll() is None and monotonic() - self._started > self._limit:
            self.stop()
        return self._process.poll() is not None

    def result(self) -> FoundLayout | None:
        """The layout that the search has found; None if no layout is better.

        Raises:
            OSError: it has failed, or was stopped.
        """
        assert self._process.stdout is not None, "it is a pipe"
        text = self._process.stdout.read()
        if self._process.wait():
            raise OSError(f"the search ended with status {self._process.returncode}")
        found = json.loads(text)
        return FoundLayout(sizes=str(found["sizes"]), step=float(found["step_s"])) if found is not None else None

    def stop(self) -> None:
        """End the search, if it still runs."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Read a request from the standard input, search for a better layout, and print the answer as JSON."""
    request = from_text(sys.stdin.read(), REQUEST, source="the request")
    if not end_with_parent(request.parent):
        return
    _yield_to_training()
    profile, cluster = read_profile(Path(request.profile)), load_cluster(request.cluster)
    sys.stdout.write(json.dumps(answer(request, profile, cluster)))


def answer(request: Request, profile: Profile, cluster: Cluster) -> dict[str, object] | None:
    """Search for a better layout; returns its sizes and step, or None, and writes its plan file."""
    setting = Setting(profile=profile, cluster=cluster, workload=request.training.workload, given=request.given)
    found = suggest(setting, request.step, fill=request.fill, sample_batch=request.sample_batch)
    if found is None:
        return None
    path = Path(request.plan)
    write_plan(found.plan, path)
    write_prediction(found.timeline, path)
    return {"sizes": found.sizes, "step_s": found.step}


def _yield_to_training() -> None:
    """Take only time that nobody else wants, and not too much of it."""
    os.nice(19)
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # The system ends a search that computes too long, even if its parent forgets it.
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT, CPU_LIMIT))


if __name__ == "__main__":
    main()
