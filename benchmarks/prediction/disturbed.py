"""The check of the first steps beside another program: a bounded loop on the cores, while ranks wait (virtual stages).

    nothing beside       15 steps                        judged
    a loop               15 steps, 15 more, 15 more      not judged: other programs used 50 % of the cores
    a loop that ends     15 steps beside it, 15 more     judged by the steps behind it
    a loop of a rank     15 steps, ...                   judged: what a rank has started is no other program

The profile is right, so whatever a correction changes is what the loop did to the ranks.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.prediction.planted import RECORDED, planned_run, recorded_of
from diffusionpipe.ir import Plan
from diffusionpipe.planner import Setting
from diffusionpipe.planner.correction.correct import correct
from diffusionpipe.runtime.comm.exchange import form_of, gather
from diffusionpipe.runtime.job.local_ranks import LocalRanks
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.runtime.machine.cores import cpu_wait_time, num_cores
from diffusionpipe.runtime.machine.machine_use import (
    CorePlace,
    StepCounters,
    cores_of,
    place_of,
    read_counters,
    used_by_others,
)
from diffusionpipe.runtime.rehearsals.rehearsal import RankIteration, VirtualRun, rehearse
from diffusionpipe.trainer.course.counted_steps import MOST_ROUNDS, Counted, Note, steps_that_count, used_text
from diffusionpipe.units import Seconds
from diffusionpipe.workflows.rehearsing.rehearsal import measured_link, rehearsed_of

LONGEST = 60
"""Seconds after which a loop ends by itself."""
LOOP = f"from time import monotonic\nend = monotonic() + {LONGEST}\nwhile monotonic() < end: pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbed:
    """What a run says in one case. All times are iterations."""

    name: str
    recorded: int
    counted: Counted
    says: str
    predicted: Seconds
    by_all: Seconds
    """What a correction by all recorded steps predicts."""
    corrected: Seconds | None
    """What the correction by the steps that count predicts; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """What one rank recorded."""

    place: CorePlace
    counters: list[StepCounters]
    waited: list[Seconds]
    iterations: list[RankIteration]


def disturbed_cases(ranks: LocalRanks) -> Iterator[Disturbed]:
    """All cases, one after the other."""
    setting, plan, run = planned_run(measured_link(ranks))
    cases = {
        "nothing beside": (0, False),
        "a loop beside": (MOST_ROUNDS, False),
        "a loop beside the first 15 steps": (1, False),
        "a loop that a rank has started": (MOST_ROUNDS, True),
    }
    for name, (rounds, is_ours) in cases.items():
        yield _case(ranks, name, setting, plan, run, rounds, is_ours=is_ours)


def _case(
    ranks: LocalRanks, name: str, setting: Setting, plan: Plan, run: VirtualRun, rounds: int, *, is_ours: bool
) -> Disturbed:
    """`rounds`: so many of them have a loop beside them; `is_ours`: a rank has started it."""
    found: list[list[_Round]] = []
    while True:
        is_beside = len(found) < rounds
        with loop() if is_beside and not is_ours else nullcontext():
            found.append(ranks.run(record, run, RECORDED, is_beside and is_ours))
        counted = steps_that_count(notes_of(found))
        if not counted.why_more or len(found) == MOST_ROUNDS:
            break
    parts = [[one for part in rank for one in part.iterations] for rank in zip(*found, strict=True)]
    rehearsed = rehearsed_of(run, parts)

    def corrected(steps: Sequence[int]) -> Seconds:
        return correct(setting, plan, recorded_of(rehearsed, steps)).corrected.iteration

    others = counted.others or 0.0
    return Disturbed(
        name=name,
        recorded=len(parts[0]),
        counted=counted,
        says=f"judged: {used_text(others)}" if counted.steps else f"not judged: {used_text(others)}",
        predicted=rehearsed.predicted.makespan,
        by_all=corrected(range(len(parts[0]))),
        corrected=corrected(counted.steps) if counted.steps else None,
    )


@contextmanager
def loop() -> Iterator[None]:
    """A bounded loop on half of the cores, for the length of the block."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(max(1, num_cores() // 2))]
    try:
        yield
    finally:
        for one in loops:
            one.kill()
            one.wait()


def record(job: Job, run: VirtualRun, count: int, starts_loop: bool) -> _Round:
    """One rank's part of so many iterations, with its counters; `starts_loop`: the first rank has one beside it."""
    with loop() if starts_loop and job.membership.rank == 0 else nullcontext():
        places = gather(place_of(1), form_of(CorePlace))
        place = places[job.membership.rank]
        cores, readings = cores_of(places, place.machine), []
        steps = rehearse(job, {"run": run}, ["run"] * count)
        while True:
            try:
                next(steps)
            except StopIteration as over:
                iterations: list[RankIteration] = over.value["run"]
                break
            counters = read_counters(cores)
            assert counters is not None, "this machine does not count processor time in /proc"
            readings.append((counters, cpu_wait_time()))
    pairs = list(pairwise(readings))
    return _Round(
        place=place,
        counters=[StepCounters(begin, end) for (begin, _), (end, _) in pairs],
        waited=[after - before for (_, before), (_, after) in pairs],
        iterations=iterations,
    )


def notes_of(rounds: Sequence[Sequence[_Round]]) -> list[Note]:
    """What a run knows of each step, round by round."""
    notes = []
    for ranks in rounds:
        uses = used_by_others([rank.place for rank in ranks], [rank.counters for rank in ranks])
        for step, use in enumerate(uses):
            parts = [rank.iterations[step] for rank in ranks]
            seconds = max(part.end for part in parts) - min(part.start for part in parts)
            late = max(rank.waited[step] for rank in ranks) / seconds
            notes.append(Note(without_core=late, iteration=seconds, use=use))
    return notes
