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
    """The part of a planner's `Workload` that a request has as JSON; the storages of weights are left out."""

    batch: int
    states: tuple[State, ...]
    """All that a trained parameter holds, itself included."""
    once: Bytes
    """Bytes that the optimizer holds once on each rank that trains anything."""
    checkpointed: tuple[str, ...]
    """Patterns of the layers that are recomputed."""
    encode_chunk: int
    """The most samples that go through the frozen layers at a time."""

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
    """Path of the plan file that the search writes if it finds a better layout."""
    training: Training
    given: Given
    """The sizes of the layout that the recipe fixes."""
    fill: bool | None
    """Whether frozen work fills bubbles; None leaves it to the search."""
    sample_batch: int
    """The rows that go through the denoiser at a time when the run draws; 0 if it draws nothing."""
    step: Seconds
    """Seconds of a step with the present layout, by the corrected profile."""
    parent: int
    """The process id of the process that asks; the search ends with it."""


REQUEST = Format("diffusionpipe-replanning", Request)


@dataclass(frozen=True, slots=True)
class FoundLayout:
    """The sizes and the predicted step of the better layout whose plan a search has written."""

    sizes: str
    """The name and sizes of the layout in words."""
    step: Seconds


class Replanning:
    """A search for a better layout in a process of its own, seen from the process that asked. Mutable: it may end."""

    def __init__(self, request: Request, errors: Path) -> None:
        """Start the search in a process; `errors`: the file to which its standard error goes."""
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
    """Search for a layout with a shorter step; returns {"sizes": text, "step_s": seconds}, or None if none is found.

    Its plan is written to the file that the request names, and its prediction beside it.
    """
    setting = Setting(profile=profile, cluster=cluster, workload=request.training.workload, given=request.given)
    found = suggest(setting, request.step, fill=request.fill, sample_batch=request.sample_batch)
    if found is None:
        return None
    path = Path(request.plan)
    write_plan(found.plan, path)
    write_prediction(found.timeline, path)
    return {"sizes": found.sizes, "step_s": found.step}


def _yield_to_training() -> None:
    """Give this process idle priority, and limit its processor time to `CPU_LIMIT` seconds."""
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
