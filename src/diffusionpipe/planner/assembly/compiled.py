"""A schedule without messages, made ready to be timed thousands of times."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from diffusionpipe.ir import Op, Schedule
from diffusionpipe.units import Seconds

_KINDS = {Op.F: 0, Op.B: 1, Op.I: 2, Op.W: 3}
NUM_KINDS = len(_KINDS)

_Input = tuple[int, int, int, int]
"""Event, index of its lag (0: none), and the streams of the transfer at its two ends."""
_Step = tuple[int, int, int, int, tuple[_Input, ...]]
"""Event, the event before it on its worker and the one before that (-1: none), index of its duration, its inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A compute-only schedule of trained pipelines as a list of events in an order in which they can happen."""

    num_events: int
    steps: tuple[_Step, ...]
    transfers: tuple[tuple[int, int, int, int, int, int], ...]
    """What goes between workers, edge by edge: event that produces it, event behind which it may come (-1: none),
    event that reads it, index of its lag, its streams at both ends."""
    reductions: tuple[tuple[tuple[int, int], ...], ...]
    """Block by block, in the order in which they are issued: (stage, event behind which it is reduced)."""
    worker_of_stage: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    """(producer, consumer) of every edge: what lags are given for."""

    def makespan(
        self,
        stages: Sequence[tuple[Seconds, Seconds, Seconds, Seconds]],
        edges: Sequence[tuple[Seconds, Seconds]],
        reduces: Sequence[Seconds],
    ) -> Seconds:
        """The end of the last action: what `simulate` says of the same schedule.

        Args:
            stages: times of F, B, I, W of each stage.
            edges: times of an activation and of a gradient over each edge; not read within a worker.
            reduces: time of each stage's gradient reduction.
        """
        durations = [time for stage in stages for time in stage]
        lags = [0.0, *(time for edge in edges for time in edge)]
        ends = self._ends(durations, lags)
        return max(*ends, self._last_reduction(ends, reduces))

    def _ends(self, durations: Sequence[Seconds], lags: Sequence[Seconds]) -> list[Seconds]:
        ends = [0.0] * (self.num_events + 1)  # the last one is "before everything": index -1
        for event, before, _, duration, inputs in self.steps:
            start = ends[before]
            for source, lag, _, _ in inputs:
                ready = ends[source] + lags[lag]
                if ready > start:
                    start = ready
            ends[event] = start + durations[duration]
        return ends

    def queued(
        self,
        stages: Sequence[tuple[Seconds, Seconds, Seconds, Seconds]],
        edges: Sequence[tuple[Seconds, Seconds]],
        reduces: Sequence[Seconds],
    ) -> Seconds:
        """What `simulate` says after `communicate`: the same, but transfers wait for each other and for both ends.

        The total order of `communicate` (by the ends of `makespan`), run as `timing.machine` says: a worker has one
        stream towards higher and one towards lower workers, and a transfer needs the streams of both its ends.
        """
        durations = [time for stage in stages for time in stage]
        lags = [0.0, *(time for edge in edges for time in edge)]
        order, arrivals = self._total_order(durations, lags), [0.0] * self.num_events
        num_workers = 1 + max(self.worker_of_stage)
        ends, host, free = [0.0] * self.num_events, [0.0] * num_workers, [0.0] * (2 * num_workers)
        for is_transfer, index in order:
            if is_transfer:
                _, _, event, lag, here, there = self.transfers[index]
                start = max(host[here >> 1], host[there >> 1], free[here], free[there])
                free[here] = free[there] = end = start + lags[lag]
                if end > arrivals[event]:
                    arrivals[event] = end
                continue
            event, _, _, duration, inputs = self.steps[index]
            worker = self.worker_of_stage[duration // NUM_KINDS]
            start = max(host[worker], arrivals[event])
            for source, lag, _, _ in inputs:
                if not lag and ends[source] > start:
                    start = ends[source]
            ends[event] = host[worker] = start + durations[duration]
        return max(*host, *free, self._last_reduction(ends, reduces))

    def _total_order(self, durations: Sequence[Seconds], lags: Sequence[Seconds]) -> list[tuple[bool, int]]:
        """(whether it is a transfer, index of the transfer or step), all of them.

        Computes stand by their ends, each transfer right behind the later of two: the action that produces it, and the
        one at whose end its reader is two computes ahead.
        """
        ends = self._ends(durations, lags)
        ranked = sorted(range(len(self.steps)), key=lambda i: ends[self.steps[i][0]])
        rank = [-1] * (self.num_events + 1)
        for place, index in enumerate(ranked):
            rank[self.steps[index][0]] = place
        keyed = [(place, False, index) for place, index in enumerate(ranked)]
        keyed += [
            (max(rank[source], rank[window]), True, index) for index, (source, window, *_) in enumerate(self.transfers)
        ]
        keyed.sort()
        return [(is_transfer, index) for _, is_transfer, index in keyed]

    def _last_reduction(self, ends: Sequence[Seconds], reduces: Sequence[Seconds]) -> Seconds:
        free = [0.0] * (1 + max(self.worker_of_stage))
        last = 0.0
        for members in self.reductions:
            start = max(max(ends[event], free[self.worker_of_stage[stage]]) for stage, event in members)
            last = start + max(reduces[stage] for stage, _ in members)
            for stage, _ in members:
                free[self.worker_of_stage[stage]] = last
        return max(free)


def compiled(schedule: Schedule) -> Compiled:
    """The schedule in compiled form; it has neither messages nor frozen work.

    Any two blocks are held by the same workers or have none in common, as in all of our schedules. The rules are those
    of `ir.flows`, a test holds both together; but no object is made for each flow, which is what makes it quick.
    """
    assert not schedule.has_communication, "compile before the messages are made explicit"
    assert not schedule.fills, "compile before the frozen work is inserted"
    orders = [[action for action in order if action.op in _KINDS] for order in schedule.orders]
    offsets = list(accumulate(map(len, orders), initial=0))
    event_of = {
        (a.stage, _KINDS[a.op], a.microbatch): offsets[w] + i
        for w, order in enumerate(orders)
        for i, a in enumerate(order)
    }
    edges, feeding, feeding_back = _feeds(schedule)
    steps: list[_Step] = []
    done = [False] * offsets[-1]
    nexts = [0] * len(orders)
    has_moved = True
    while has_moved:
        has_moved = False
        for worker, order in enumerate(orders):
            while nexts[worker] < len(order):
                action, event = order[nexts[worker]], offsets[worker] + nexts[worker]
                kind = _KINDS[action.op]
                feeds = feeding if kind == 0 else None if action.op is Op.W else feeding_back
                inputs = tuple(
                    (event_of[source, kind, action.microbatch], lag, here, there)
                    for source, lag, here, there in (feeds[action.stage] if feeds else ())
                )
                if not all(done[source] for source, *_ in inputs):
                    break
                before = event - 1 if nexts[worker] else -1
                window = event - 2 if nexts[worker] > 1 else -1
                steps.append((event, before, window, action.stage * NUM_KINDS + kind, inputs))
                done[event] = True
                has_moved = True
                nexts[worker] += 1
    assert len(steps) == offsets[-1], "the schedule gets stuck"
    return Compiled(
        num_events=offsets[-1],
        steps=tuple(steps),
        transfers=tuple(
            (source, window, event, lag, here, there)
            for lag, source, window, event, here, there in sorted(
                (lag, source, window, event, here, there)
                for event, _, window, _, inputs in steps
                for source, lag, here, there in inputs
                if lag
            )
        ),
        reductions=_reductions(schedule, offsets),
        worker_of_stage=tuple(stage.worker for stage in schedule.placement.stages),
        edges=edges,
    )


_Feeds = list[list[_Input]]
"""For each stage what it reads: stages in place of events."""


def _feeds(schedule: Schedule) -> tuple[tuple[tuple[int, int], ...], _Feeds, _Feeds]:
    """All edges, and what the forward and the input gradient of each stage read."""
    stages = schedule.placement.stages
    edges = [edge for pipeline in schedule.placement.pipelines for edge in pipeline.edges]
    forward: _Feeds = [[] for _ in stages]
    backward: _Feeds = [[] for _ in stages]
    for number, edge in enumerate(edges):
        shares = stages[edge.producer].share, stages[edge.consumer].share
        if max(shares[0].start, shares[1].start) >= min(shares[0].stop, shares[1].stop):
            continue
        source, target = stages[edge.producer].worker, stages[edge.consumer].worker
        lags = (0, 0) if source == target else (1 + 2 * number, 2 + 2 * number)
        up, down = int(source < target), int(target < source)
        forward[edge.consumer].append((edge.producer, lags[0], 2 * source + up, 2 * target + up))
        if edge.gradients:
            backward[edge.producer].append((edge.consumer, lags[1], 2 * target + down, 2 * source + down))
    return tuple((edge.producer, edge.consumer) for edge in edges), forward, backward


def _reductions(schedule: Schedule, offsets: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    blocks: dict[int, list[tuple[int, int]]] = {}
    for worker, order in enumerate(schedule.orders):
        num_timed = 0
        for action in order:
            num_timed += action.op in _KINDS
            if action.op is Op.REDUCE_GRAD:
                weights = schedule.placement.stages[action.stage].weights
                blocks.setdefault(weights, []).append((action.stage, offsets[worker] + num_timed - 1))
    return tuple(tuple(members) for members in blocks.values())
