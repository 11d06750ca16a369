"""Timelines as the library shows them: simulated ones and measured ones, alone or one beside the other."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import COMPUTE_OPS, Schedule
from diffusionpipe.ir import Timeline as Spans
from diffusionpipe.ir.files import write_timeline
from diffusionpipe.units import Seconds
from diffusionpipe.viz import MILLISECONDS, UNITS, TimeAxis, explained_sketch, gantt, perfetto

if TYPE_CHECKING:
    from diffusionpipe.library.planning import Choice

__all__ = ["MILLISECONDS", "UNITS", "Timeline", "TimelineComparison"]

File: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The start and the end of each action of a schedule on each rank; `print` draws them."""

    schedule: Schedule
    """The schedule whose actions are timed."""
    spans: Spans = field(repr=False)
    """The timeline as plain data, one span for each action."""
    axis: TimeAxis = field(default=MILLISECONDS, repr=False)
    """The unit in which drawings show times."""

    @property
    def source(self) -> str:
        """The origin of the times: "simulated" or "measured"."""
        return self.spans.source

    @property
    def makespan(self) -> Seconds:
        """The time from the first start to the last end, in seconds, or in the unit of `simulate`'s times."""
        return self.spans.makespan

    @property
    def bubble(self) -> float:
        """The idle share of all ranks' time, from 0 to 1."""
        return self.spans.bubble

    def __str__(self) -> str:
        return explained_sketch(self.spans, width=shutil.get_terminal_size().columns, axis=self.axis)

    def show(self) -> None:
        """Write a drawing of the timeline to standard output: a row for each rank, time to the right."""
        sys.stdout.write(f"{self}\n")

    def perfetto(self, path: File) -> None:
        """Write the timeline as a trace file that ui.perfetto.dev opens.

        Raises:
            ConfigError: the file cannot be written.
        """
        perfetto(self.spans, Path(path), schedule=self.schedule)

    def save(self, path: File) -> None:
        """Write a picture of the timeline (.png, .svg, .pdf), or the timeline itself (.json), to a file.

        Raises:
            ConfigError: the name has another ending, or the file cannot be written.
        """
        if Path(path).suffix == ".json":
            write_timeline(self.spans, Path(path))
            return
        title = f"{self.schedule.name}, {self.source}"
        gantt([(self.source, self.spans)], Path(path), title=title, schedule=self.schedule, axis=self.axis)

    def compare(self, other: Choice | Timeline) -> TimelineComparison:
        """A comparison with another timeline of the same schedule, or with the predicted timeline of a `Choice`.

        Raises:
            ConfigError: the other one belongs to another schedule.
        """
        beside = other if isinstance(other, Timeline) else other.timeline
        if difference := _difference(self.schedule, beside.schedule):
            raise ConfigError(
                f"timelines of different schedules cannot be compared: {difference}; compare with the prediction of "
                "the same plan"
            )
        return TimelineComparison(self, beside)


@dataclass(frozen=True, slots=True)
class TimelineComparison:
    """Two timelines of one schedule, to compare their lengths and draw them together."""

    timeline: Timeline
    """The timeline whose `compare` was called."""
    other: Timeline
    """The timeline with which it is compared, such as the prediction."""

    @property
    def ratio(self) -> float:
        """The makespan of the timeline divided by the makespan of the other one."""
        return float(self.timeline.makespan) / float(self.other.makespan)

    def __str__(self) -> str:
        both = (self.other, self.timeline)
        lines = [
            f"{one.source:10} makespan {one.axis.text(one.makespan)} {one.axis.name}, bubble {one.bubble:.1%}"
            for one in both
        ]
        return "\n".join([*lines, f"{self.timeline.source} / {self.other.source}: {self.ratio:.3f}"])

    def show(self) -> None:
        """Write makespans, bubbles and the ratio of both to standard output."""
        sys.stdout.write(f"{self}\n")

    def save(self, path: File) -> None:
        """Draw both timelines one below the other over one time axis into a file (.png, .svg, .pdf).

        Raises:
            ConfigError: the name has another ending, or the file cannot be written.
        """
        panels = [(one.source, one.spans) for one in (self.other, self.timeline)]
        schedule = self.timeline.schedule
        gantt(panels, Path(path), title=schedule.name, schedule=schedule, axis=self.timeline.axis)


def _difference(one: Schedule, other: Schedule) -> str:
    """A sentence about the first difference between the computations of two schedules; "" if they are the same."""
    if one.num_workers != other.num_workers:
        return f"{one.name} has {one.num_workers} ranks, {other.name} has {other.num_workers}"
    for rank, orders in enumerate(zip(one.orders, other.orders, strict=True)):
        mine, theirs = ([str(action) for action in order if action.op in COMPUTE_OPS] for order in orders)
        if mine != theirs:
            place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
            if place is None:
                return f"rank {rank} has {len(mine)} computations in {one.name} and {len(theirs)} in {other.name}"
            return (
                f"computation {place} of rank {rank} is {mine[place]} in {one.name} and {theirs[place]} in {other.name}"
            )
    return ""
