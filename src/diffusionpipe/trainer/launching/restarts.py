"""Restarts of a job after crashes: from where, after which pause, and when it is no use to try again."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusionpipe.errors import PeerError
from diffusionpipe.trainer.checkpoints.checkpoint import AUTO
from diffusionpipe.trainer.checkpoints.checkpoint_folder import num_written
from diffusionpipe.trainer.launching.exit_status import of_signal
from diffusionpipe.trainer.launching.forwarded_signals import pause
from diffusionpipe.trainer.reporting.metrics import last_step
from diffusionpipe.units import Seconds

logger = logging.getLogger(__name__)

LONGEST: Seconds = 60.0
"""The longest pause before a restart."""
FRUITLESS = 2
"""The number of restarts in a row without progress that ends the job."""

Launch = Callable[[str | None], int]
"""`launch(resume)` runs all ranks and returns the exit status of the job, or raises a PeerError after a crash."""
Wait = Callable[[Seconds], int | None]
"""`wait(seconds)` returns the signal that ended the wait early, None if none did."""


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The highest step and the number of checkpoints that a run has ever reached."""

    step: int
    """The highest step in the metrics."""
    checkpoints: int
    """The number of checkpoints written."""

    def at_least(self, other: "RunProgress") -> "RunProgress":
        """The higher step and the higher number of checkpoints of both."""
        return RunProgress(max(self.step, other.step), max(self.checkpoints, other.checkpoints))


def reached_in(run_folder: Path) -> RunProgress:
    """The highest step in the metrics of a run folder, and the number of checkpoints that were written there."""
    return RunProgress(last_step(run_folder), num_written(run_folder))


def reason_to_give_up(history: Sequence[RunProgress], max_restarts: int) -> str | None:
    """Why a job that crashed is not started once more; None if it is.

    Args:
        history: how far the run had ever come after the first start and after each restart.
        max_restarts: the most restarts that the user allows.
    """
    restarts = len(history) - 1
    if restarts >= FRUITLESS and history[-1] == history[-1 - FRUITLESS]:
        return f"The last {FRUITLESS} restarts brought neither a new step nor a checkpoint, so there is no further one."
    if restarts >= max_restarts:
        return f"All restarts are used up (--max-restarts {max_restarts})."
    return None


def pause_before(restart: int) -> Seconds:
    """The pause before restart `restart`, counted from 1: 1, 2, 4, ... seconds, at most 60."""
    return min(LONGEST, 2.0 ** min(restart - 1, 30))  # 30: the power must stay a float


def resume_of_restart(resume: str | None, *, has_saved: bool) -> str | None:
    """The `--resume` of a restart: "auto", unless the job was to return to an older checkpoint and saved none yet."""
    is_named = resume is not None and resume not in {AUTO, "latest"}
    return resume if is_named and not has_saved else AUTO


def with_restarts(
    launch: Launch, run_folder: Path, resume: str | None, *, max_restarts: int, wait: Wait = pause
) -> int:
    """Runs a job by `launch`, restarts it after crashes, and returns its exit status.

    `resume`: the `--resume` of the first start. Only a crash or a killed rank is worth a restart: errors that the user
    has to fix, a loss that is not finite and a stop that was asked for end the job at once.

    Raises:
        PeerError: the last crash, if it is given up.
        ConfigError, TrainingError: as `launch` raises them.
    """
    history: list[RunProgress] = []
    before = reached_in(run_folder)
    text, now = "", resume
    while True:
        try:
            return launch(now)
        except PeerError as error:
            if max_restarts == 0:
                raise
            text = str(error)  # the error itself holds the frames that hold the port
        # At least as far as before: a crash may lose lines of metrics or a checkpoint, and getting them back is not
        # progress.
        history.append(reached_in(run_folder).at_least(history[-1] if history else before))
        if (why := reason_to_give_up(history, max_restarts)) is not None:
            raise PeerError(f"{text}\n{why}")
        restart, seconds = len(history), pause_before(len(history))
        now = resume_of_restart(resume, has_saved=history[-1].checkpoints > before.checkpoints)
        logger.warning(
            'restart=%d of=%d resume=%s pause_s=%g reason="%s"', restart, max_restarts, now, seconds, _first_line(text)
        )
        if (number := wait(seconds)) is not None:
            return of_signal(number)


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else "unknown"
