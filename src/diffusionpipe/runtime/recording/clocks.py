"""The steps of all ranks on one clock.

Ranks of one machine read the same clock, so their times need no change [1]. Clocks of two machines show different
times. Ranks leave the barrier in front of a step together, so the first exit of each machine is one time [2]. An exit
may still be late. Then a message would be read before it is sent, and the reader's clock is moved by the least time
that forbids it [3]. A device counts from the start of its own work, which the host sees only nearly, so each device
has a clock of its own.

    machine A   | 0F0 |--s0--------------          machine A   | 0F0 |--s0------
    machine B  | 1F0 |             [3]   ->        machine B            | 1F0 |
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from diffusionpipe.ir import SEND_OPS, Action, Mesh, Phase, Schedule, Span, Timeline
from diffusionpipe.timing.sends import waits_of
from diffusionpipe.units import Seconds

# Seconds below which a gap is an error of float64.
_ROUNDING: Seconds = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClock:
    """The clock by which a rank timed a step, and two moments of the step on it, in seconds."""

    machine: str
    """Ranks with the same name read the same host clock."""
    is_device: bool
    """Whether a device timed the step; else the host did."""
    met: Seconds
    """The time at which the rank left the barrier in front of the step, or its start where there was none."""
    began: Seconds
    """The time that is 0 for the rank's spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """The spans and update phases of one step as one rank timed them, in seconds from `clock.began`."""

    clock: RankClock
    spans: tuple[Span, ...]
    """The actions with their start and end."""
    update: tuple[Phase, ...]
    """The parts of the update with their start and end."""
    schedule: Schedule | None = None
    """The schedule of the rank's copy where the step has micro-batches of its own; None: the plan's."""


@dataclass(frozen=True, slots=True)
class MessageTimes:
    """When one message was sent and when it was read, each in seconds from the start of that rank's own times."""

    sender: int
    """The rank that sent it."""
    sent: Seconds
    reader: int
    """The rank with the action that read it."""
    read: Seconds


def timeline_of(mesh: Mesh, schedule: Schedule, traces: Sequence[RankTrace]) -> Timeline:
    """One timeline of a step from the traces of all ranks, which are in the order of ranks; it begins at 0.

    `schedule`: of the plan, for traces without one of their own.
    """
    clocks = [trace.clock for trace in traces]
    owns = [traces[mesh.rank(group, 0)].schedule for group in range(mesh.data_parallel)]
    schedules = [schedule if own is None else own for own in owns]
    starts = starts_of(clocks, list(_readings(mesh, schedules, traces)))
    spans = (
        replace(span, worker=rank, start=span.start + start, end=span.end + start)
        for rank, (trace, start) in enumerate(zip(traces, starts, strict=True))
        for span in trace.spans
    )
    update = (
        replace(phase, worker=rank, start=phase.start + start, end=phase.end + start)
        for rank, (trace, start) in enumerate(zip(traces, starts, strict=True))
        for phase in trace.update
    )
    groups = range(mesh.data_parallel)
    copies = tuple(tuple(mesh.rank(group, worker) for worker in range(mesh.pipeline)) for group in groups)
    return Timeline(
        num_workers=mesh.num_ranks,
        spans=tuple(spans),
        source="measured",
        update=tuple(update),
        copies=copies if len(copies) > 1 else (),
        schedules=tuple(schedules) if any(owns) else (),
    )


def _readings(mesh: Mesh, schedules: Sequence[Schedule], traces: Sequence[RankTrace]) -> Iterator[MessageTimes]:
    """The times of all messages between ranks, one data-parallel copy after the other; `schedules`: of each copy."""
    for group, schedule in enumerate(schedules):
        waits = waits_of(schedule)
        ranks = [mesh.rank(group, worker) for worker in range(mesh.pipeline)]
        of_group = [(rank, span) for rank in ranks for span in traces[rank].spans]
        sent = {span.action.slot: (rank, span.start) for rank, span in of_group if span.action.op in SEND_OPS}
        read: dict[Action, tuple[int, Seconds]] = {span.action: (rank, span.start) for rank, span in of_group}
        for action, slots in waits.items():
            for slot in slots:
                if slot in sent and action in read:
                    yield MessageTimes(*sent[slot], *read[action])


def starts_of(clocks: Sequence[RankClock], readings: Iterable[MessageTimes]) -> list[Seconds]:
    """The start of each rank's times on one common clock, in seconds; the earliest is 0.

    Ranks leave the barrier together; then clocks are moved by the least times with which no message is read before it
    is sent. Where no such times exist, clocks are not moved. `readings`: the messages between the ranks.
    """
    late = lateness([clock.met for clock in clocks], [clock.machine for clock in clocks])
    starts = [own + clock.began - clock.met for own, clock in zip(late, clocks, strict=True)]
    # Ranks that are timed by the host share their machine's clock; each device has one.
    names = [(clock.machine, rank if clock.is_device else None) for rank, clock in enumerate(clocks)]
    number = {name: place for place, name in enumerate(dict.fromkeys(names))}
    of_rank = [number[name] for name in names]
    least: dict[tuple[int, int], Seconds] = {}
    for one in readings:
        pair = of_rank[one.sender], of_rank[one.reader]
        gap = one.sent + starts[one.sender] - one.read - starts[one.reader]
        least[pair] = max(gap, least.get(pair, gap))
    # Messages within one clock say nothing of it.
    moved = _least_shifts(len(number), {pair: gap for pair, gap in least.items() if pair[0] != pair[1]})
    starts = [start + moved[clock] for start, clock in zip(starts, of_rank, strict=True)]
    first = min(starts)
    return [start - first for start in starts]


def lateness(met: Sequence[Seconds], machines: Sequence[str]) -> list[Seconds]:
    """How much later than the first rank of its machine each rank left the barrier, in seconds.

    `met`: when each rank left it, by its machine's clock. `machines`: the name of each rank's machine.
    """
    first: dict[str, Seconds] = {}
    for machine, time in zip(machines, met, strict=True):
        first[machine] = min(time, first.get(machine, time))
    return [time - first[machine] for machine, time in zip(machines, met, strict=True)]


def _least_shifts(count: int, least: dict[tuple[int, int], Seconds]) -> list[Seconds]:
    """The least shifts of `count` clocks with `shift[b] - shift[a] >= least[a, b]`, in seconds, each at least 0.

    All are 0 where no shifts satisfy this. Longest paths by Bellman and Ford's relaxations.
    """
    shifts = [0.0] * count
    # A longest path has less than `count` edges. If a further round still finds one, the gaps contradict each other.
    for _ in range(count + 1):
        is_over = True
        for (sender, reader), gap in least.items():
            if shifts[reader] < shifts[sender] + gap - _ROUNDING:
                shifts[reader], is_over = shifts[sender] + gap, False
        if is_over:
            return shifts
    return [0.0] * count
