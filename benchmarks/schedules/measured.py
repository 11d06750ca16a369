"""Every family as real processes with virtual stages, beside its simulated makespan and beside torch's runtime."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from benchmarks.schedules.delays import TENSORS, Delays, calibration, delays_of, predicted, trace
from benchmarks.schedules.torch_stages import FAMILIES, torch_step
from benchmarks.throughput.chains import our_schedule
from benchmarks.throughput.ranks import run_ranks
from benchmarks.throughput.ratios import Ratio, interleaved, median_ratio
from diffusionpipe.costs import Costs, StageCosts
from diffusionpipe.ir import Schedule, Span
from diffusionpipe.runtime.comm.transport import ProcessTransport
from diffusionpipe.runtime.rehearsals.virtual import precise_wait, virtual_executor
from diffusionpipe.units import Seconds

PART: Seconds = 0.040
"""F = I = W of a rank's part of the model; half of it for each of two stages on a rank."""
NUM_DRAWS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One family on a number of ranks. Times are medians over rounds."""

    family: str
    ranks: int
    microbatches: int
    ideal: Seconds
    """Simulated with waits of exactly their length and free messages."""
    predicted: Seconds
    """Simulated with the medians of the delays that were measured just before."""
    drawn: Seconds
    """The same with each delay drawn from all that were measured, independently: the median of NUM_DRAWS draws."""
    ours: Seconds
    torch: Seconds | None
    """None where torch does not have the family."""
    ours_over_torch: Ratio | None
    rounds: int

    @property
    def error(self) -> float:
        """Measured over predicted, less 1."""
        return self.ours / self.predicted - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Several families measured in turn by the same processes."""

    ranks: int
    action_delay: Seconds
    """Median, as `message`."""
    message: Seconds
    cases: tuple[Case, ...]


@dataclass(slots=True)
class _Switch:
    """A wait that can be left out: the iterations that only open connections need none. Mutable."""

    is_on: bool = False

    def __call__(self, duration: Seconds) -> None:
        """See `precise_wait`."""
        if self.is_on:
            precise_wait(duration)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """One rank's."""

    trace: list[tuple[Span, ...]]
    """Of the iterations on which delays are measured."""
    spans: Mapping[tuple[str, str], list[tuple[Seconds, Seconds]]]
    """By system and family: start and end of every iteration, on the clock that all processes of a machine share."""


def measure(families: Sequence[str], num_ranks: int, *, num_rounds: int, part: Seconds = PART, repeats: int = 3) -> Run:
    """Those families at m = 2p, ours and torch's in turn, each round starting with another one.

    Raises ConfigError where a family cannot do these sizes.
    """
    num_microbatches = 2 * num_ranks
    schedules = {name: our_schedule(name, num_ranks, num_microbatches) for name in families}
    reports: list[_Report] = run_ranks(
        num_ranks, _rank, schedules, num_ranks, num_rounds, part, repeats, preload=__name__
    )
    delays = delays_of(calibration(num_ranks), zip(*(report.trace for report in reports), strict=True))
    cases = tuple(_case(name, schedules[name], reports, delays, part) for name in families)
    return Run(ranks=num_ranks, action_delay=median(delays.actions), message=median(delays.messages), cases=cases)


def _case(name: str, schedule: Schedule, reports: Sequence[_Report], delays: Delays, part: Seconds) -> Case:
    seconds = {}
    for system in ("ours", "torch"):
        spans = zip(*(report.spans.get((system, name), []) for report in reports), strict=True)
        seconds[system] = [max(end for _, end in span) - min(start for start, _ in span) for span in spans]
    costs, ours, theirs = costs_of(schedule, part), seconds["ours"], seconds["torch"]
    exact = Delays(actions=(0.0,), messages=(0.0,))
    middle = Delays(actions=(median(delays.actions),), messages=(median(delays.messages),))
    return Case(
        family=name,
        ranks=schedule.num_workers,
        microbatches=2 * schedule.num_workers,
        ideal=predicted(schedule, costs, exact, num_draws=1),
        predicted=predicted(schedule, costs, middle, num_draws=1),
        drawn=predicted(schedule, costs, delays, num_draws=NUM_DRAWS),
        ours=median(ours),
        torch=median(theirs) if theirs else None,
        ours_over_torch=median_ratio(ours, theirs) if theirs else None,
        rounds=len(ours),
    )


def costs_of(schedule: Schedule, part: Seconds) -> Costs:
    """Waits of a schedule's stages, which are equal parts of the model; `part`: F, I and W of 1/p of it."""
    stages = schedule.placement.stages
    seconds = part * schedule.num_workers / len({stage.weights for stage in stages})
    stage = StageCosts(forward=seconds, backward=2 * seconds, input_grad=seconds, weight_grad=seconds)
    return Costs(stages=(stage,) * len(stages))


def _rank(
    rank: int, schedules: Mapping[str, Schedule], num_ranks: int, num_rounds: int, part: Seconds, repeats: int
) -> _Report:
    transport, switch = ProcessTransport(torch.device("cpu")), _Switch()
    steps: dict[tuple[str, str], Callable[[], object]] = {}
    for name, schedule in schedules.items():
        executor = virtual_executor(
            schedule,
            rank,
            costs=costs_of(schedule, part),
            tensors=TENSORS,
            transport=transport,
            inputs=("input",),
            wait=switch,
        )
        steps["ours", name] = executor.run
        if name in FAMILIES:
            microbatches = 2 * num_ranks
            steps["torch", name] = torch_step(name, rank, num_ranks, microbatches, part=part, wait=switch)
    for step in steps.values():
        dist.barrier()
        step()
    switch.is_on = True
    found = trace(rank, num_ranks, transport, repeats=repeats)
    spans: dict[tuple[str, str], list[tuple[Seconds, Seconds]]] = {name: [] for name in steps}
    names = {f"{system} {family}": (system, family) for system, family in steps}
    for order in interleaved(list(names), num_rounds):
        for name in order:
            dist.barrier()
            start = perf_counter()
            steps[names[name]]()
            spans[names[name]].append((start, perf_counter()))
    return _Report(trace=found, spans=spans)
