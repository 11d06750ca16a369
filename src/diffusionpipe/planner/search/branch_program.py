"""Cuts a series-parallel model into stages, so that stages on different branches run at the same time.

    layers     a c | b d | e          branch by branch, see `series_parallel`
    devices    0   | 1   | 2
                                      0 --> 2
    stages     two on the longest     1 ----^
               path in place of three

A stage is a part of the tree, or neighbours in one part: all other layers come before all of its layers, after all of
them, or beside all of them. The stages form a graph without circles. As in 1F1B, a stage holds as many micro-batches as
there are stages on the longest path from it to the end; so branches hold fewer than a chain.

This is the partition of GraphPipe (Jeon et al., "GraphPipe: Improving Performance and Scalability of DNN Training with
Graph Pipeline Parallelism", ASPLOS 2025). Theirs looks for the least time of the slowest stage by bisection. Ours
keeps, as `dynamic_program`, all suffixes that no other beats, and minimises the time of an iteration:

    end     the largest, over all stages s, of: the longest path of one micro-batch through s, there and back, and
            (M - 1) (F_s + B_s) for the others
    path    the longest path of one micro-batch, there and back
    depth   stages on the longest path, which decides the memory of what comes before

Transfers are left to the simulation of what is found. Of parts in a series the last is cut first. The branches of a
parallel part all come before the same suffix; their numbers are joined by the larger one.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import le
from typing import TypeAlias

from diffusionpipe.planner.search.dynamic_program import Partition, Question
from diffusionpipe.planner.search.series_parallel import Parallel, Series, Tree, listed
from diffusionpipe.units import Seconds

_Stages: TypeAlias = "tuple[int, int, _Stages] | None"
"""(first layer of a stage, number of its devices, the stages listed after it), or None for no stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """A suffix of the layers, cut into stages, with the numbers by which it is judged."""

    end: Seconds = 0.0
    """Seconds of an iteration of its stages."""
    path: Seconds = 0.0
    """Seconds of the longest path of one micro-batch through its stages, there and back."""
    depth: int = 0
    """Stages on the longest path."""
    num_stages: int = 0
    stages: _Stages = None

    @property
    def numbers(self) -> tuple[float, ...]:
        """(end, path, depth), by which suffixes are compared; smaller is better in each."""
        return self.end, self.path, self.depth

    def listed_after(self, other: "_Cut") -> "_Cut":
        """The same suffix with the list of stages of `other`, which has a further branch before it."""
        return replace(self, num_stages=other.num_stages, stages=other.stages)

    def beside(self, other: "_Cut") -> "_Cut":
        """The suffix with the branches of both cuts before it; this cut's branch is listed first."""
        longer = max(self.end, other.end), max(self.path, other.path), max(self.depth, other.depth)
        return replace(self, end=longer[0], path=longer[1], depth=longer[2])


_Cuts: TypeAlias = dict[int, list[_Cut]]
"""Number of devices -> the suffixes that take this number."""


def best_branches(question: Question, tree: Tree, num_microbatches: int, *, width: int = 16) -> tuple[Partition, ...]:
    """The partitions into stages on branches that no other beats, the least time first; () where nothing fits.

    The layers of the tree are numbered as they are listed. `question.stage` is asked with the number of stages on the
    longest path from a stage to the end, itself included; links, `reach` and `is_hopeless` are not asked. The first
    partition is optimal as long as no front is longer than `width`.
    """
    program = _Program(question, num_microbatches, width)
    root = tree if isinstance(tree, Series) else Series((tree,))
    found = [
        Partition(starts=starts, replicas=replicas, value=cut.end, numbers=cut.numbers)
        for cut in program.series(root, {0: [_Cut()]}).get(question.num_devices, [])
        if cut.num_stages >= question.min_stages
        for starts, replicas in [_places(cut.stages)]
    ]
    return tuple(sorted(found, key=lambda one: (one.value, len(one.starts), tuple(-s for s in one.starts))))


def _places(stages: _Stages) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(first layers, numbers of devices) of all stages, in order."""
    starts, replicas = list[int](), list[int]()
    while stages is not None:
        first, devices, stages = stages
        starts.append(first)
        replicas.append(devices)
    return tuple(starts), tuple(replicas)


@dataclass(frozen=True, slots=True)
class _Program:
    """The dynamic program: it puts stages before suffixes of the layers and keeps the best suffixes."""

    question: Question
    num_microbatches: int
    width: int

    def series(self, tree: Series, behind: _Cuts) -> _Cuts:
        """The suffixes that grow from `behind` by putting all parts of a series before them, cut into stages."""
        spans = [_span(part) for part in tree.parts]
        fronts: list[_Cuts] = [{} for _ in spans] + [behind]
        for index, part in reversed(list(enumerate(tree.parts))):
            grown = _Grown()
            # This part and those after it, up to `stop`, as one stage.
            for stop in range(index + 1, len(fronts)):
                grown.add(self._with_stage(fronts[stop], spans[index][0], spans[stop - 1][1]))
            # Or its branches by themselves, before each suffix that begins after the part.
            if isinstance(part, Parallel):
                for devices, cut in _each(fronts[index + 1]):
                    grown.add(_each(self._parallel(part, devices, cut)))
            fronts[index] = grown.fronts(self.width)
        return fronts[0]

    def _parallel(self, tree: Parallel, devices: int, after: _Cut) -> _Cuts:
        """The suffixes that grow from `after` by putting all branches of a parallel part before it, cut into stages.

        A stage has neighbouring branches, or a part of one branch. `devices`: the number that `after` takes.
        """
        spans = [_span(branch) for branch in tree.branches]
        # Where no branch has been cut there is nothing yet that its numbers could be joined with.
        fronts: list[_Cuts] = [{} for _ in spans] + [{devices: [_Cut().listed_after(after)]}]
        for index, branch in reversed(list(enumerate(tree.branches))):
            grown = _Grown()
            for stop in range(index + 1, len(fronts)):
                if stop - index == len(spans):
                    continue  # all branches as one stage are a stage of the series around them
                for taken, cut in _each(fronts[stop]):
                    behind = {taken: [after.listed_after(cut)]}
                    # A branch by itself may be cut further; as one stage it is among these cuts too.
                    if stop == index + 1 and isinstance(branch, Series):
                        found = _each(self.series(branch, behind))
                    else:
                        found = self._with_stage(behind, spans[index][0], spans[stop - 1][1])
                    grown.add((total, own.beside(cut)) for total, own in found)
            fronts[index] = grown.fronts(self.width)
        return fronts[0]

    def _with_stage(self, behind: _Cuts, first: int, stop: int) -> Iterator[tuple[int, _Cut]]:
        """(devices, suffix) for each suffix of `behind` with the layers first, ..., stop - 1 as a stage before it.

        There is one for each number of replicas with which the stage fits.
        """
        question = self.question
        for replicas in question.replicas:
            if question.longest is not None and stop > question.longest(first, replicas):
                continue
            for devices, cut in _each(behind):
                position = question.num_devices - devices - replicas
                if position < 0 or cut.num_stages >= question.max_stages:
                    continue
                times = question.stage(first, stop, position, replicas, cut.depth + 1)
                if times is None:
                    continue
                both = times[0] + times[1]
                path = both + cut.path
                yield (
                    devices + replicas,
                    _Cut(
                        end=max(path + (self.num_microbatches - 1) * both, both + cut.end),
                        path=path,
                        depth=cut.depth + 1,
                        num_stages=cut.num_stages + 1,
                        stages=(first, replicas, cut.stages),
                    ),
                )


class _Grown:
    """A collection of suffixes, by their number of devices, that grows."""

    def __init__(self) -> None:
        self._found: dict[int, list[_Cut]] = defaultdict(list)

    def add(self, cuts: Iterable[tuple[int, _Cut]]) -> None:
        """Add each suffix of `cuts`, given as (devices, suffix), to the collection."""
        for devices, cut in cuts:
            self._found[devices].append(cut)

    def fronts(self, width: int) -> _Cuts:
        """Number of devices -> its suffixes that no other beats in all numbers, at most `width`, the fastest first."""
        return {devices: _front(cuts, width) for devices, cuts in self._found.items()}


def _front(cuts: list[_Cut], width: int) -> list[_Cut]:
    kept = list[_Cut]()
    for cut in sorted(cuts, key=lambda cut: cut.numbers):  # by time, so the first ones are the best
        if len(kept) < width and not any(all(map(le, other.numbers, cut.numbers)) for other in kept):
            kept.append(cut)
    return kept


def _each(cuts: _Cuts) -> Iterator[tuple[int, _Cut]]:
    return ((devices, cut) for devices, own in cuts.items() for cut in own)


def _span(tree: Tree) -> tuple[int, int]:
    """(first layer of the tree, layer after its last)."""
    layers = listed(tree)
    return layers[0], layers[-1] + 1
