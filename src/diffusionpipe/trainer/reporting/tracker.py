"""The interface of trackers, programs that record a run besides its folder, and the facts to open them with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedImage:
    """A sample that the model drew: its name, caption, pixels and file."""

    name: str
    """The name of the picture's file without its ending."""
    caption: str
    picture: NDArray[np.uint8]
    """The picture as levels of 8 bits, (H, W, 3)."""
    path: Path
    """The file in which the picture is kept."""


class Tracker(Protocol):
    """The methods of a tracker, a program that records a run besides its folder."""

    def describe(self, recipe: str, values: Mapping[str, object]) -> None:
        """Records the recipe: its text, and the values of its keys ("training.batch")."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records numbers of a step by their tags, such as "train/loss"."""

    def pictures(self, step: int, shown: Sequence[LoggedImage]) -> None:
        """Records the pictures that were drawn after a step."""

    def close(self) -> None:
        """Writes all that is not yet written, and ends the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerConfig:
    """The facts about a run with which a tracker is opened: folder, names, the recipe's values, the step to resume."""

    folder: Path
    """The run's folder."""
    project: str
    """The project in which the tracker files the run."""
    name: str
    """The name of the run in the tracker."""
    values: Mapping[str, object]
    """The values of the recipe's keys, by key."""
    resume_step: int | None
    """The last step that the resumed run has done; None in a new run."""
    identity: str | None
    """The id of the tracker's own run that is to continue; None to begin a new one, or without an id."""
