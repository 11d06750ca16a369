"""Reads a recording action by action: how long each action took, and for how long its rank had waited before it."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from diffusionpipe.costs import Costs
from diffusionpipe.costs.waking import wake_time
from diffusionpipe.ir import COMPUTE_OPS, Action, Mesh, Op, Span
from diffusionpipe.ir.recorded import Recorded
from diffusionpipe.units import Seconds

WAITED: Seconds = 2e-4
"""Shorter waits before an action do not count as waits: clocks and Python take that long."""
_FIELDS = {Op.F: "forward", Op.B: "backward", Op.I: "input_grad", Op.W: "weight_grad"}

Key = tuple[Op, int]
"""An op and its stage; for ENCODE the number of its fill."""
Waking = Sequence[tuple[Seconds, Seconds]]
"""A table of (wait, extra seconds that an action takes after it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The measured time of one computing action of one rank, and its rank's wait before it."""

    rank: int
    action: Action
    wait: Seconds
    """Seconds before the action in which the rank had nothing to do."""
    seconds: Seconds

    @property
    def key(self) -> Key:
        """(op of the action, its stage or for ENCODE the number of its fill)."""
        number = self.action.slot if self.action.op is Op.ENCODE else self.action.stage
        assert number is not None, self.action
        return self.action.op, number


def observations_of(recorded: Recorded) -> tuple[Observation, ...]:
    """The computing actions of all ranks with their times and waits, rank by rank, each in the order of its actions."""
    found = []
    for rank, spans in spans_of_rank(recorded).items():
        free = 0.0
        for span in spans:
            if span.action.op in COMPUTE_OPS or span.action.op is Op.ENCODE:
                wait, seconds = max(0.0, span.start - free), span.end - span.start
                found.append(Observation(rank=rank, action=span.action, wait=wait, seconds=seconds))
            free = span.end  # after messages and sums too, which occupy the host for a moment
    return tuple(found)


def spans_of_rank(recorded: Recorded) -> Mapping[int, Sequence[Span]]:
    """Rank -> the spans of its actions, in the order in which they were recorded."""
    spans: dict[int, list[Span]] = defaultdict(list)
    for span in recorded.timeline.spans:
        spans[span.worker].append(span)
    return spans


def price(key: Key, costs: Costs) -> Seconds:
    """The seconds of an action of an op and a stage (or fill) at these costs, without waking."""
    op, number = key
    return costs.fills[number] if op is Op.ENCODE else float(getattr(costs.stages[number], _FIELDS[op]))


def times_of(observations: Sequence[Observation], waking: Waking) -> dict[Key, Seconds]:
    """(op, stage or fill) -> its measured seconds without waking: means over ranks of medians over micro-batches.

    Only actions without a wait before them count; if a rank has none, waking is subtracted from the others. `waking` is
    a table of (wait, extra seconds after it).
    """
    grouped: dict[Key, dict[int, list[Observation]]] = defaultdict(lambda: defaultdict(list))
    for one in observations:
        grouped[one.key][one.rank].append(one)
    return {key: fmean(_awake(of_rank, waking) for of_rank in ranks.values()) for key, ranks in grouped.items()}


def _awake(same: Sequence[Observation], waking: Waking) -> Seconds:
    awake = [one.seconds for one in same if one.wait < WAITED]
    return median(awake or [one.seconds - wake_time(waking, one.wait, one.seconds) for one in same])


def extras(
    observations: Sequence[Observation], times: Mapping[Key, Seconds], waking: Waking
) -> Iterator[tuple[Seconds, Seconds]]:
    """(predicted, measured) extra seconds of each action after a wait, if its time without a wait was measured too.

    `times`: the seconds of actions without waits. `waking`: a table of (wait, predicted extra seconds after it).
    """
    known = {one.key for one in observations if one.wait < WAITED}
    for one in observations:
        if one.wait >= WAITED and one.key in known:
            time = times[one.key]
            yield wake_time(waking, one.wait, time), one.seconds - time


def ranks_of(mesh: Mesh, worker: int) -> tuple[int, ...]:
    """The ranks of a worker, one in each data-parallel group, in the order of the groups."""
    return tuple(mesh.rank(group, worker) for group in range(mesh.data_parallel))
