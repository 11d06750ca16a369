"""Where the time of a step goes: on each rank what it computes, and for what it waits.

    rank 1   text_encoder | waits for rank 0 | 1F0 | ... | sums of gradients | update | waits for the slowest rank
             frozen work    stage 0, 0F0       forward                                end of the step

A wait ends when the next action starts. Its cause is the message for which this action waits and that was sent last:
until it was sent, the rank waited for the sender's work; after that for the transfer. Without such a message the cause
is a sum of gradients or a gather that runs in the wait, or a message that the rank sends or receives itself, else the
host, which issues the action late.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from diffusionpipe.ir import COMPUTE_OPS, MESSAGE_OPS, SEND_OPS, Action, Op, Phase, Span, Timeline
from diffusionpipe.units import Seconds
from diffusionpipe.viz.palette import OP_NAMES, UPDATE_NAME, frozen_name

WORK = "other ranks' work"
TRANSFER = "transfers"
SUMS = "sums of gradients"
GATHERS = "gathers of parameters"
HOST = "the host"
END = "the slowest rank, at the end"
WAITS = (WORK, TRANSFER, SUMS, GATHERS, HOST, END)
"""The causes of waits, in the order in which they are listed."""
_COLLECTIVES = {Op.REDUCE_GRAD: SUMS, Op.UNSHARD: GATHERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A time in which a rank computes nothing, with its cause, the action that ends it, and the awaited rank."""

    worker: int
    start: Seconds
    end: Seconds
    cause: str
    """One of `WAITS`."""
    before: str
    """The action that ends the wait; "" at the end of the iteration."""
    sender: int | None = None
    """The rank whose message the wait is for; None without a message."""

    @property
    def seconds(self) -> Seconds:
        """The length of the wait in seconds."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """The seconds in which one rank computes, by kind, and its waits, between the start and the end of a step."""

    worker: int
    computing: Mapping[str, Seconds]
    """Seconds of each kind of computation, of each frozen component and of the update, by their names in legends."""
    waits: tuple[Wait, ...]

    def by_cause(self) -> dict[str, Seconds]:
        """Cause -> seconds of waiting for it; causes without a wait are left out."""
        found = {cause: sum(wait.seconds for wait in self.waits if wait.cause == cause) for cause in WAITS}
        return {cause: seconds for cause, seconds in found.items() if seconds > 0}


def times_of_ranks(
    timeline: Timeline, awaited: Mapping[Action, Sequence[int]], components: Mapping[int, str]
) -> tuple[RankTimes, ...]:
    """The computing and waiting times of each rank, in the order of ranks; together they are `timeline.step`.

    `awaited`: action -> the slots of the messages for which it waits, as `timing.sends.waits_of` finds them.
    `components`: number of a fill -> its component, as `palette.components` finds them. Where several ranks are at a
    worker's place, the timeline has copies, and each copy's messages stay in it.
    """
    copies = timeline.copies or (tuple(range(timeline.num_workers)),)
    spans: dict[int, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        spans[span.worker].append(span)
    phases: dict[int, list[Phase]] = defaultdict(list)
    for phase in timeline.update:
        phases[phase.worker].append(phase)
    step, is_measured = timeline.step, timeline.source == "measured"
    found: dict[int, RankTimes] = {}
    for ranks in copies:
        sent = {span.action.slot: span for rank in ranks for span in spans[rank] if span.action.op in SEND_OPS}
        for rank in ranks:
            found[rank] = _times(_Rank(rank, spans[rank], phases[rank], step, is_measured), awaited, sent, components)
    return tuple(found[rank] for rank in sorted(found))


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank of a timeline, with its spans, its update, and the end of the step."""

    number: int
    spans: Sequence[Span]
    update: Sequence[Phase]
    step: Seconds
    """The end of the step, of all ranks."""
    is_measured: bool
    """Whether the timeline is measured, not simulated."""

    @property
    def beside(self) -> Sequence[tuple[Span, str]]:
        """The rank's sums and gathers, and its measured sends and receives, each with the cause of waits, by start.

        A simulated message runs beside the work, so a rank never waits for its own.
        """
        causes = _COLLECTIVES | (dict.fromkeys(MESSAGE_OPS, TRANSFER) if self.is_measured else {})
        named = ((span, causes[span.action.op]) for span in self.spans if span.action.op in causes)
        return sorted(named, key=lambda one: one[0].start)


def _times(
    rank: _Rank,
    awaited: Mapping[Action, Sequence[int]],
    sent: Mapping[int | None, Span],
    components: Mapping[int, str],
) -> RankTimes:
    computing: dict[str, Seconds] = defaultdict(float)
    waits: list[Wait] = []
    reached = 0.0
    for span in sorted((span for span in rank.spans if _is_work(span.action)), key=lambda span: span.start):
        if span.start > reached:
            senders = [sent[slot] for slot in awaited.get(span.action, ()) if slot in sent]
            waits += _explained(rank, (reached, span.start), str(span.action), senders)
        # A time in which two of them run counts once.
        computing[_name_of_work(span.action, components)] += max(0.0, span.end - max(reached, span.start))
        reached = max(reached, span.end)
    for phase in sorted(rank.update, key=lambda one: one.start):
        if phase.start > reached:
            waits += _split(rank, (reached, phase.start), END)
        computing[UPDATE_NAME] += max(0.0, phase.end - max(reached, phase.start))
        reached = max(reached, phase.end)
    if rank.step > reached:
        waits += _split(rank, (reached, rank.step), END)
    return RankTimes(worker=rank.number, computing=dict(computing), waits=tuple(waits))


def _is_work(action: Action) -> bool:
    return action.op in COMPUTE_OPS or action.op in (Op.ENCODE, Op.STEP)


def _name_of_work(action: Action, components: Mapping[int, str]) -> str:
    """The name in legends of an action's work: its op, frozen component or update; `components`: by number of fill."""
    if action.op is Op.ENCODE:
        return frozen_name(components.get(action.slot or 0, "frozen"))
    return UPDATE_NAME if action.op is Op.STEP else OP_NAMES[action.op]


def _explained(rank: _Rank, gap: tuple[Seconds, Seconds], action: str, senders: Sequence[Span]) -> Iterator[Wait]:
    """The waits in a gap (start, end) before an action: for the sender's work, then for the transfer.

    `senders`: the sends of the messages for which the action waits. Without one of another rank, collectives or the
    host are the cause.
    """
    start, end = gap
    last = max((one for one in senders if one.worker != rank.number), key=lambda span: span.start, default=None)
    if last is None or (last.end <= start and not rank.is_measured):
        yield from _split(rank, gap, HOST, action)
        return
    if last.end <= start:  # measured: sent before, and still under way once the rank has issued all before the action
        issued = max((span.end for span in rank.spans if start < span.end <= end), default=start)
        yield from _split(rank, (start, issued), HOST, action)
        start = issued
    began = min(max(last.start, start), end)
    for first, stop, cause in ((start, began, WORK), (began, end, TRANSFER)):
        if stop > first:
            yield Wait(worker=rank.number, start=first, end=stop, cause=cause, before=action, sender=last.worker)


def _split(rank: _Rank, gap: tuple[Seconds, Seconds], rest: str, before: str = "") -> Iterator[Wait]:
    """The waits in a gap (start, end), cut where collectives begin and end; other times have the cause `rest`."""
    reached, end = gap
    for span, cause in rank.beside:
        first, last = max(span.start, reached), min(span.end, end)
        if last <= first:
            continue
        if first > reached:
            yield Wait(worker=rank.number, start=reached, end=first, cause=rest, before=before)
        yield Wait(worker=rank.number, start=first, end=last, cause=cause, before=before)
        reached = last
    if end > reached:
        yield Wait(worker=rank.number, start=reached, end=end, cause=rest, before=before)
