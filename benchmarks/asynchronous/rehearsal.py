"""Windows of 1F1B on virtual ranks, beside flushed steps in the same run and beside the simulator.

Ranks are real processes with the executors of a training, which send real messages. Compute is a wait. All parts of the
model are equal, and a backward is twice as long as a forward. Systems take turns, each with several steps:

    flushed   | step 0 |   | step 1 |   | step 2 |         from the first rank's start to the last one's end; no rank
                                                           begins before all have ended, as for the norm of a gradient
    windows   begin | window 0 | window 1 | ... | end      from the last rank's end to its next; the first and the last
                                                           windows are left out
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from time import perf_counter

import torch.distributed as dist

from benchmarks.throughput.chains import our_schedule
from benchmarks.throughput.ratios import Ratio, interleaved, median_ratio
from diffusionpipe.costs import Costs, Link, StageCosts, TensorSpec
from diffusionpipe.ir import Mesh
from diffusionpipe.ir.versions import Versions, versions_held
from diffusionpipe.passes import with_versions
from diffusionpipe.planner.assembly.windows import communicate_window, overlap
from diffusionpipe.runtime.engine.windows import WindowExecutor
from diffusionpipe.runtime.job.local_ranks import local_ranks
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.runtime.recording.trace import Recording
from diffusionpipe.runtime.rehearsals.rehearsal import DeviceClock, VirtualRun, virtual_equipment, virtual_executor_of
from diffusionpipe.runtime.weights.versions import BlockVersions
from diffusionpipe.simulator import simulate
from diffusionpipe.simulator.steady import steady
from diffusionpipe.timing.legal import check
from diffusionpipe.units import Seconds
from diffusionpipe.workflows.rehearsing.rehearsal import measured_link

FORWARD: Seconds = 0.05
"""Of a micro-batch through the part of one rank."""
WIDTH = 16
"""Numbers that a sample sends from stage to stage."""
STASHED, FLUSHED, ZB_V = "stashed", "1f1b", "zb-v"
SIZES = ((4, 4), (4, 8), (8, 8))
"""Ranks and micro-batches."""
STEPS = 4
"""Of a turn, beside windows that are left out."""
SKIPPED = 2
"""Windows at the beginning of a turn."""
TENSORS = {
    "input": TensorSpec(name="input", shape=(WIDTH,)),
    "hidden": TensorSpec(name="hidden", shape=(WIDTH,), needs_gradient=True),
    "loss": TensorSpec(name="loss", shape=(), needs_gradient=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one rank did in one turn of a system: of each step that counts."""

    starts: tuple[Seconds, ...]
    """On the clock that all processes of a machine share. A window starts where the one before ends."""
    ends: tuple[Seconds, ...]
    busy: tuple[Seconds, ...]
    """In which it computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One system at some sizes. Times are of a step, of all turns."""

    name: str
    ideal: Seconds
    """Simulated with free messages,"""
    simulated: Seconds
    """and with the measured link."""
    seconds: tuple[Seconds, ...]
    """Measured: the mean of each turn."""
    idle: float
    """The part of a step in which a rank does not compute: the mean over ranks and steps, the median over turns."""

    @property
    def error(self) -> float:
        """Measured over simulated, less 1."""
        return median(self.seconds) / self.simulated - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """All systems at some sizes, measured in turn by the same processes."""

    ranks: int
    microbatches: int
    link: Link
    systems: tuple[System, ...]

    def speedup(self, name: str) -> Ratio:
        """The flushed time over that of a system, turn by turn."""
        seconds = {system.name: system.seconds for system in self.systems}
        return median_ratio(seconds[FLUSHED], seconds[name])

    @property
    def limit(self) -> float:
        """How much faster it can be without a flush: (m + p - 1) / m."""
        return (self.microbatches + self.ranks - 1) / self.microbatches


def measure(num_ranks: int, num_microbatches: int, num_rounds: int, *, forward: Seconds = FORWARD) -> Rehearsal:
    """Those sizes, each round of turns starting with another system."""
    with local_ranks(num_ranks) as ranks:
        link = measured_link(ranks)
        runs = {name: run_of(name, num_ranks, num_microbatches, link, forward) for name in (STASHED, FLUSHED, ZB_V)}
        order = [name for names in interleaved(list(runs), num_rounds) for name in names]
        found: list[list[Turn]] = ranks.run(take_turns, runs, order)
    turns: dict[str, list[tuple[Turn, ...]]] = {name: [] for name in runs}
    for name, parts in zip(order, zip(*found, strict=True), strict=True):
        turns[name].append(parts)
    return Rehearsal(
        ranks=num_ranks,
        microbatches=num_microbatches,
        link=link,
        systems=tuple(_system(name, run, turns[name]) for name, run in runs.items()),
    )


def _system(name: str, run: VirtualRun, turns: Sequence[Sequence[Turn]]) -> System:
    free = replace(run, costs=replace(run.costs, link=Link()))
    seconds = tuple((_window_time if run.schedule.lead else _step_time)(parts) for parts in turns)
    busy = [fmean(busy for turn in parts for busy in turn.busy) for parts in turns]
    return System(
        name=name,
        ideal=predicted(free),
        simulated=predicted(run),
        seconds=seconds,
        idle=median(1 - own / step for own, step in zip(busy, seconds, strict=True)),
    )


def _step_time(parts: Sequence[Turn]) -> Seconds:
    """The mean time from the first rank's start to the last one's end."""
    steps = zip(*(zip(turn.starts, turn.ends, strict=True) for turn in parts), strict=True)
    return fmean(max(end for _, end in ranks) - min(start for start, _ in ranks) for ranks in steps)


def _window_time(parts: Sequence[Turn]) -> Seconds:
    """The mean time from the end of a window on all ranks to that of the next one."""
    steps = zip(*(zip(turn.starts, turn.ends, strict=True) for turn in parts), strict=True)
    return fmean(max(end for _, end in ranks) - max(start for start, _ in ranks) for ranks in steps)


def predicted(run: VirtualRun) -> Seconds:
    """The simulated time of a step, or of a window where it repeats."""
    if run.schedule.lead:
        return float(steady(run.schedule, lambda _: run.costs).period)
    return simulate(run.schedule, run.costs).makespan


def run_of(name: str, num_ranks: int, num_microbatches: int, link: Link, forward: Seconds = FORWARD) -> VirtualRun:
    """A system's schedule with its waits; a model of twice as many stages has parts of half the length."""
    if name == STASHED:
        schedule = with_versions(communicate_window(overlap(num_ranks, num_microbatches)), Versions.STASHED)
        check(schedule)
    else:
        schedule = our_schedule(name, num_ranks, num_microbatches)
    stages = schedule.placement.stages
    time = forward * num_ranks / len(stages)
    cost = StageCosts(forward=time, backward=2 * time, input_grad=time, weight_grad=time)
    return VirtualRun(
        schedule=schedule,
        costs=Costs(
            stages=(cost,) * len(stages),
            tensor_bytes={spec.name: spec.num_bytes for spec in TENSORS.values()},
            link=link,
        ),
        tensors=TENSORS,
        mesh=Mesh(data_parallel=1, pipeline=num_ranks),
        inputs=("input",),
    )


def take_turns(job: Job, runs: Mapping[str, VirtualRun], order: Sequence[str]) -> list[Turn]:
    """One turn of a system for each name of `order`; every rank calls this with the same arguments.

    One turn of each comes before, unmeasured: it opens the connections.
    """
    rank, clock = job.membership.rank, DeviceClock()
    turn_of: dict[str, Callable[[], Turn]] = {}
    for name, run in runs.items():
        turn_of[name] = (_windows if run.schedule.lead else _flushed)(run, rank, clock)
    found = []
    for name in (*runs, *order):
        dist.barrier()
        clock.begin()
        found.append(turn_of[name]())
    return found[len(runs) :]


def _flushed(run: VirtualRun, rank: int, clock: DeviceClock) -> Callable[[], Turn]:
    executor = virtual_executor_of(run, rank, clock)

    def step() -> Recording:
        executor.run()
        return executor.recording

    def wait_for_all() -> None:
        dist.barrier()
        clock.begin()

    return lambda: _turn([step] * STEPS, wait_for_all)


def _windows(run: VirtualRun, rank: int, clock: DeviceClock) -> Callable[[], Turn]:
    """Several windows between two flushes."""
    schedule, worker = run.schedule, run.mesh.place(rank)[1]
    equipment = virtual_equipment(run, rank, clock)
    held = versions_held(schedule)
    own = [stage.weights for stage in schedule.placement.stages if stage.worker == worker]
    nothing = replace(schedule, orders=((),) * schedule.num_workers, messages=())
    executor = WindowExecutor(
        schedule,
        worker,
        replace(equipment, gradients={block: WholeGradients() for block in own}),
        {block: BlockVersions((), held[block]) for block in own},
        (nothing, equipment),
    )
    executor.update = lambda block, step: None
    count = SKIPPED + STEPS + schedule.lead

    def turn() -> Turn:
        stop = executor.batch + count

        def step() -> Recording:
            executor.run(stop, lambda batch: None)
            return executor.recording

        made = _turn([step] * count, lambda: None)
        counted, before = slice(SKIPPED, SKIPPED + STEPS), slice(SKIPPED - 1, SKIPPED + STEPS - 1)
        return Turn(starts=made.ends[before], ends=made.ends[counted], busy=made.busy[counted])

    return turn


def _turn(steps: Sequence[Callable[[], Recording]], before: Callable[[], None]) -> Turn:
    """Run the steps, each after `before`."""
    starts, ends, busy = [], [], []
    for step in steps:
        before()
        starts.append(perf_counter())
        recording = step()
        ends.append(perf_counter())
        busy.append(recording.busy()[0])
    return Turn(starts=tuple(starts), ends=tuple(ends), busy=tuple(busy))


class WholeGradients:
    """Gradients that no other rank has a part of."""

    def reset(self) -> None:
        """See `Reducible`."""

    def open(self) -> None:
        """See `Reducible`."""

    def added(self, *, is_whole: bool) -> None:
        """See `Reducible`."""

    def reduce(self) -> None:
        """See `Reducible`."""

    def finish(self) -> None:
        """See `Reducible`."""
