"""The check of the first steps beside another program: a bounded loop on the cores, while ranks wait (virtual stages).

    nothing beside       15 steps                        judged
    a loop               15 steps, 15 more, 15 more      not judged: other programs used 50 % of the cores
    a loop that ends     15 steps beside it, 15 more     judged by the steps behind it
    a loop of a rank     15 steps, ...                   judged: what a rank has started is no other program
    four ranks           15 steps of compute             judged: ranks that share cores are no other programs

The profile is right, so whatever a correction changes is what the loop did to the ranks. Beside the share that the run
says of other programs stands a count of another kind: the processor time of each process of the machine, added up.
"""

import os
import subprocess
import sys
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter, process_time

import torch.distributed as dist

from benchmarks.prediction.planted import RECORDED, planned_run, recorded_of
from diffusionpipe.ir import Plan
from diffusionpipe.planner import Setting
from diffusionpipe.planner.correction.correct import correct
from diffusionpipe.runtime.comm.exchange import form_of, gather
from diffusionpipe.runtime.job.local_ranks import LocalRanks
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.runtime.machine.cores import cpu_wait_time, num_cores
from diffusionpipe.runtime.machine.machine_use import (
    PROC,
    CorePlace,
    StepCounters,
    cores_of,
    place_of,
    read_counters,
    used_by_others,
)
from diffusionpipe.runtime.rehearsals.rehearsal import RankIteration, VirtualRun, rehearse
from diffusionpipe.trainer.course.counted_steps import MOST_ROUNDS, Counted, Note, representative_steps, used_text
from diffusionpipe.units import Seconds
from diffusionpipe.workflows.rehearsing.rehearsal import measured_link, rehearsed_of

LONGEST = 60
"""Seconds after which a loop ends by itself."""
PASS: Seconds = 0.1
"""Processor time that each of four ranks takes in a step."""
LOOP = f"from time import monotonic\nend = monotonic() + {LONGEST}\nwhile monotonic() < end: pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbed:
    """What a run says in one case. All times are iterations."""

    name: str
    recorded: int
    counted: Counted
    says: str
    ours: float
    """Part of the cores that the ranks and the processes that they have started used."""
    others: float
    """Part of the cores that all other processes used, by the sum of their processor times."""
    predicted: Seconds | None = None
    by_all: Seconds | None = None
    """What a correction by all recorded steps predicts."""
    corrected: Seconds | None = None
    """What the correction by the steps that count predicts; None where there is none, as where ranks compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """What one rank recorded."""

    place: CorePlace
    counters: list[StepCounters]
    others: Seconds
    """Processor time of all processes of the machine that are not the job's, over all steps."""
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
        counted = representative_steps(notes_of(found))
        if not counted.why_more or len(found) == MOST_ROUNDS:
            break
    parts = [[one for part in rank for one in part.iterations] for rank in zip(*found, strict=True)]
    rehearsed = rehearsed_of(run, parts)

    def corrected(steps: Sequence[int]) -> Seconds:
        return correct(setting, plan, recorded_of(rehearsed, steps)).corrected.iteration

    return replace(
        _said(name, found, counted),
        predicted=rehearsed.predicted.makespan,
        by_all=corrected(range(len(parts[0]))),
        corrected=corrected(counted.steps) if counted.steps else None,
    )


def sharing_case(ranks: LocalRanks, count: int = RECORDED) -> Disturbed:
    """Ranks that compute for so many steps, more of them than there are cores."""
    found = [ranks.run(record_compute, count)]
    return _said(f"{len(found[0])} ranks that compute", found, representative_steps(notes_of(found)))


def _said(name: str, rounds: Sequence[Sequence[_Round]], counted: Counted) -> Disturbed:
    """What a run says of other programs, beside the times of its own processes and of all others."""
    spans = [(one[0].counters[0].begin.clock, one[0].counters[-1].end.clock) for one in rounds]
    capacity = num_cores() * sum(end - begin for begin, end in spans)
    own = [(rank.counters[0].begin, rank.counters[-1].end) for one in rounds for rank in one]
    said = used_text(counted.others or 0.0)
    return Disturbed(
        name=name,
        recorded=sum(len(one[0].iterations) for one in rounds),
        counted=counted,
        says=f"judged: {said}" if counted.steps else f"not judged: {said}",
        ours=sum(end.own + end.helpers - begin.own - begin.helpers for begin, end in own) / capacity,
        others=sum(one[0].others for one in rounds) / capacity,
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
        return _recorded(job, rehearse(job, {"run": run}, ["run"] * count))


def record_compute(job: Job, count: int) -> _Round:
    """One rank's part of so many steps, in each of which every rank computes for `PASS` seconds of processor time."""
    return _recorded(job, _passes(count))


def _passes(count: int) -> Generator[int, None, dict[str, list[RankIteration]]]:
    """Steps of compute, in the form of `rehearse`."""
    found = list[RankIteration]()
    yield 0
    for number in range(count):
        dist.barrier()
        start, began = perf_counter(), process_time()
        while process_time() < began + PASS:
            pass
        found.append(RankIteration(start=start, end=perf_counter(), spans=(), cpu=process_time() - began))
        yield number + 1
    return {"run": found}


def _recorded(job: Job, steps: Generator[int, None, dict[str, list[RankIteration]]]) -> _Round:
    """All steps, with counters before the first and after each."""
    places, ranks = gather(place_of(1), form_of(CorePlace)), gather(os.getpid(), form_of(int))
    place = places[job.membership.rank]
    cores, readings, others = cores_of(places, place.machine), [], list[Seconds]()
    while True:
        try:
            next(steps)
        except StopIteration as over:
            iterations: list[RankIteration] = over.value["run"]
            break
        counters = read_counters(cores)
        assert counters is not None, "this machine does not count processor time in /proc"
        readings.append((counters, cpu_wait_time()))
        others = [*others[:1], other_processes(ranks)]
    pairs = list(pairwise(readings))
    return _Round(
        place=place,
        counters=[StepCounters(begin, end) for (begin, _), (end, _) in pairs],
        others=others[-1] - others[0],
        waited=[after - before for (_, before), (_, after) in pairs],
        iterations=iterations,
    )


def other_processes(ranks: Collection[int]) -> Seconds:
    """Processor time of all processes of this machine but these and all that they have started, ended ones too."""
    parent_of, ticks_of = dict[int, int](), dict[int, int]()
    for path in PROC.glob("[0-9]*/stat"):
        try:
            words = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has just ended, and counts with its parent
            continue
        process = int(path.parent.name)
        parent_of[process], ticks_of[process] = int(words[1]), sum(map(int, words[11:15]))

    def is_ours(process: int) -> bool:
        return process in ranks or (process in parent_of and is_ours(parent_of[process]))

    ticks = sum(ticks for process, ticks in ticks_of.items() if not is_ours(process))
    return ticks / os.sysconf("SC_CLK_TCK")


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
