"""The predicted step of a run, loading included, and the result of the run's own check: a file of the run folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.errors import FileFormatError
from diffusionpipe.ir.files import Format, read_file, write_file
from diffusionpipe.units import Seconds

if TYPE_CHECKING:
    from diffusionpipe.workflows.training.expectation import Expectation

EXPECTED = "expected_step.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedStep:
    """The predicted seconds of a step that a run announced before it began, by part."""

    iteration: Seconds
    update: Seconds
    loading: Seconds
    """The time by which data workers usually lengthen the step."""
    unjudged: str = ""
    """The reason why the run did not judge the prediction by its first steps; "" if it did, and before it does."""

    @property
    def step(self) -> Seconds:
        """The predicted seconds of the whole step, as in the run's log."""
        return self.iteration + self.update + self.loading


_FORM = Format("diffusionpipe-expected-step", ExpectedStep)


def keep_expected(expected: Expectation, folder: Path) -> None:
    """Write the announced step into the run folder; where nothing is predicted, remove the file of an earlier start."""
    path = folder / EXPECTED
    if expected.iteration is None:
        path.unlink(missing_ok=True)
        return
    loading = expected.loading.usual if expected.loading is not None else 0.0
    write_file(ExpectedStep(iteration=expected.iteration, update=expected.update or 0.0, loading=loading), path, _FORM)


def note_unjudged(folder: Path, why: str) -> None:
    """Add to the announced step in the run folder why the run did not judge it; without one do nothing."""
    found = read_expected(folder)
    if found is not None:
        write_file(replace(found, unjudged=why), folder / EXPECTED, _FORM)


def read_expected(folder: Path) -> ExpectedStep | None:
    """The announced step in a run folder; None where there is none, or none that this version can read."""
    path = folder / EXPECTED
    if not path.exists():
        return None
    try:
        return read_file(path, _FORM)
    except FileFormatError:
        return None
