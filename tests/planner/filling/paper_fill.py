"""The paper's own filling, for comparison: groups of idle devices share one layer at a time.

        worker 0   F F F F aaabb . . B B B            a bubble is a time in which the same workers are idle;
        worker 1   . aa F F aaabb B F B . . aa        its workers run a layer together, each on its part of the batch
        time ->      [1]    [2]  [3]      [4]

After Tian et al., "DiffusionPipe", MLSys 2024, https://arxiv.org/abs/2405.01248, bubble filling; reconstructed from
summaries, since the text was not at hand. Bubbles in order of time, those below a threshold dropped; for each the
candidates are, of every component whose predecessors are done, some next layers on the whole batch, and at most one
more layer on a part of it; the candidate that fills most is taken. What is left runs on all devices after the
iteration. What differs: of the last component only the longest prefix is a candidate (shorter ones fill less), and a
bubble is offered again while something fits. Moving samples between the devices of a group is not counted, which
favours it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from diffusionpipe.costs import Costs, Profile
from diffusionpipe.ir import Range, Schedule
from diffusionpipe.planner.filling.fills import case_of
from diffusionpipe.planner.filling.frozen_layers import FillOptions, FrozenLayers
from diffusionpipe.planner.filling.shares import Case
from diffusionpipe.units import Seconds

PARTIAL_BATCHES = (4, 8, 12, 16, 24, 32, 48, 64, 96)
"""Samples of a partial batch on one device, as recalled of the paper."""
THRESHOLD: Seconds = 0.010
"""Bubbles shorter than this are not used, as recalled of the paper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperFill:
    """What the greedy makes of the iteration."""

    iteration: Seconds
    unfilled: Seconds
    left_over: Seconds
    """Time of what fits nowhere, on all devices after the iteration."""
    filled: Seconds
    """Device time of the frozen work inside the bubbles."""
    bubble_after: float
    """The idle part of all workers' time; what is left over counts as work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubble:
    """A time in which the same workers are idle."""

    start: Seconds
    end: Seconds
    workers: frozenset[int]


@dataclass(slots=True)
class _Progress:
    """How far a component is."""

    layers: Range
    layer: int
    left: int
    """Samples that this layer has not seen."""

    @property
    def is_done(self) -> bool:
        return self.layer == self.layers.stop


Choice = tuple[tuple[int, ...], tuple[int, int] | None]
"""Layers of each ready component on all their samples; (component, samples a device) of a partial batch."""


def paper_fill(
    schedule: Schedule,
    costs: Costs,
    frozen: FrozenLayers,
    options: FillOptions | None = None,
    *,
    needs: Sequence[Sequence[int]] = (),
    partial_batches: Sequence[int] = PARTIAL_BATCHES,
    threshold: Seconds = THRESHOLD,
) -> PaperFill:
    """The iteration with the paper's greedy; arguments as of `plan_fills`.

    `needs`: for each layer the earlier ones that it reads from; () if all read the one before.

    Raises:
        ConfigError: the options do not fit.
        ScheduleError: the schedule has fills or messages already.
    """
    case = case_of(schedule, costs, frozen, options)
    greedy = _Greedy(case, needs, sorted(partial_batches))
    filled = 0.0
    for bubble in bubbles(case, threshold):
        filled += greedy.fill(bubble)
    left_over = greedy.left_over()
    num_workers, unfilled = case.graph.num_workers, case.graph.makespan
    work = sum(case.graph.busy) + filled + left_over * len(case.hosts)
    return PaperFill(
        iteration=unfilled + left_over,
        unfilled=unfilled,
        left_over=left_over,
        filled=filled,
        bubble_after=1.0 - work / (num_workers * (unfilled + left_over)),
    )


def bubbles(case: Case, threshold: Seconds) -> list[Bubble]:
    """The bubbles of the unfilled iteration that last at least the threshold, in order of time."""
    graph = case.graph
    idle = {w: [*((g.start, g.end) for g in graph.gaps[w]), (graph.ends[w], graph.makespan)] for w in case.hosts}
    times = sorted({0.0, graph.makespan, *(time for waits in idle.values() for wait in waits for time in wait)})
    found: list[Bubble] = []
    for start, end in pairwise(times):
        workers = frozenset(w for w, waits in idle.items() if any(a <= start and end <= b for a, b in waits))
        if found and found[-1].workers == workers:
            found[-1] = Bubble(start=found[-1].start, end=end, workers=workers)
        else:
            found.append(Bubble(start=start, end=end, workers=workers))
    return [bubble for bubble in found if bubble.workers and bubble.end - bubble.start >= threshold]


class _Greedy:
    """The components' progress while bubbles are filled."""

    def __init__(self, case: Case, needs: Sequence[Sequence[int]], partial_batches: Sequence[int]) -> None:
        self.case, self.partial_batches = case, partial_batches
        runs = case.frozen.runs
        self.progress = [_Progress(layers=run, layer=run.start, left=case.batch) for run in runs]
        self.needs = [_needed_runs(case.frozen, needs, run) for run in runs]

    def fill(self, bubble: Bubble) -> Seconds:
        """Run in the bubble what the greedy chooses; the device time of it."""
        left, filled = bubble.end - bubble.start, 0.0
        while True:
            ready = [
                own
                for own, needs in zip(self.progress, self.needs, strict=True)
                if not own.is_done and all(self.progress[run].is_done for run in needs)
            ]
            choices = self._choices(ready, bubble, left) if ready else iter(())
            time, choice = max(choices, key=lambda choice: choice[0], default=(0.0, None))
            if choice is None or not time:
                return filled
            self._commit(ready, choice, len(bubble.workers))
            left -= time
            filled += time * len(bubble.workers)

    def _seconds(self, layer: int, samples: int, workers: frozenset[int]) -> Seconds:
        """Time of one layer with so many samples on each of these workers."""
        options = self.case.options
        seconds = options.overhead + self.case.frozen.seconds(Range(layer, layer + 1), samples)
        return seconds / min(options.speed(worker) for worker in workers)

    def _choices(self, ready: list[_Progress], bubble: Bubble, time: Seconds) -> Iterator[tuple[Seconds, Choice]]:
        """(time filled, choice)."""
        for lengths, used in self._prefixes(ready, bubble.workers, time):
            best: tuple[Seconds, tuple[int, int] | None] = (0.0, None)
            for i, (own, length) in enumerate(zip(ready, lengths, strict=True)):
                layer, left = own.layer + length, own.left if not length else self.case.batch
                if layer < own.layers.stop:
                    best = max(best, (*self._partial(layer, left, bubble.workers, time - used, i),), key=lambda b: b[0])
            yield used + best[0], (lengths, best[1])

    def _prefixes(
        self, ready: Sequence[_Progress], workers: frozenset[int], time: Seconds
    ) -> Iterator[tuple[tuple[int, ...], Seconds]]:
        """(number of layers of each ready component, their time) as far as they fit."""
        own, rest = ready[0], ready[1:]
        used, length = 0.0, 0
        while True:
            following = self._following(own, length, workers)
            fits = following is not None and used + following <= time
            if rest:
                yield from (
                    ((length, *lengths), used + more) for lengths, more in self._prefixes(rest, workers, time - used)
                )
            elif not fits:
                yield (length,), used
            if not fits:
                return
            assert following is not None
            used, length = used + following, length + 1

    def _following(self, own: _Progress, length: int, workers: frozenset[int]) -> Seconds | None:
        """Time of the layer after so many, on all its samples; None after the last."""
        layer = own.layer + length
        if layer == own.layers.stop:
            return None
        return self._seconds(layer, -(-(own.left if not length else self.case.batch) // len(workers)), workers)

    def _partial(
        self, layer: int, left: int, workers: frozenset[int], time: Seconds, component: int
    ) -> tuple[Seconds, tuple[int, int] | None]:
        """(time, (component, samples a device)) of the largest partial batch that fits."""
        for samples in reversed(self.partial_batches):
            if samples * len(workers) < left and (seconds := self._seconds(layer, samples, workers)) <= time:
                return seconds, (component, samples)
        return 0.0, None

    def _commit(self, ready: Sequence[_Progress], choice: Choice, num_workers: int) -> None:
        lengths, partial = choice
        for own, length in zip(ready, lengths, strict=True):
            if length:
                own.layer, own.left = own.layer + length, self.case.batch
        if partial is not None:
            ready[partial[0]].left -= partial[1] * num_workers

    def left_over(self) -> Seconds:
        """Time of all that is left, on all hosts together."""
        workers = frozenset(self.case.hosts)
        total = 0.0
        for own in self.progress:
            for length in range(own.layers.stop - own.layer):
                following = self._following(own, length, workers)
                assert following is not None
                total += following
        return total


def needs_of(profile: Profile) -> tuple[tuple[int, ...], ...]:
    """For each frozen layer of a profiled model the earlier ones that it reads from."""
    names = profile.graph.frozen_layers
    spec = {layer.name: layer for layer in profile.graph.layers}
    writer = {tensor: i for i, name in enumerate(names) for tensor in spec[name].writes}
    return tuple(tuple(sorted({writer[t] for t in spec[name].reads if t in writer})) for name in names)


def _needed_runs(frozen: FrozenLayers, needs: Sequence[Sequence[int]], run: Range) -> set[int]:
    """The other runs that layers of this one read from."""
    needs = needs or tuple((layer - 1,) if layer else () for layer in range(frozen.num_layers))
    layers = {layer for i in range(run.start, run.stop) for layer in needs[i]}
    return {
        i for i, other in enumerate(frozen.runs) if other != run and any(other.start <= n < other.stop for n in layers)
    }
