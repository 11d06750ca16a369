"""BaPipe's balanced partition of a chain of layers: by time, then by links, then by memory.

Zhao et al., "BaPipe: Exploration of Balanced Pipeline Parallelism for DNN Training", 2020,
https://arxiv.org/abs/2012.12544. Layers here are whole, so its division of a single layer is left out.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from diffusionpipe.planner.assembly.partition import balanced_cuts
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.rivals.baselines import places
from diffusionpipe.planner.rivals.guesses import PlannerEstimate, times_of
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.units import Bytes, Seconds

Starts = tuple[int, ...]


def bapipe(
    times: Sequence[Seconds],
    transfers: Sequence[Seconds],
    speeds: Sequence[float],
    lacking: Callable[[int, int, int], Bytes],
) -> Starts:
    """The first layer of each stage in BaPipe's balanced partition, with one stage for each speed.

    1. Cuts are placed so that the longest stage is as short as possible.
    2. If a cut takes longer to cross than that stage takes, layers on both sides of every such cut stay together and
       the stages are balanced a second time. If fewer than S - 1 cuts are left, the S - 1 that take least are used.
    3. While a stage lacks memory, the one that lacks most gives its outermost layers, or those that stay together, to
       the neighbour with more room.

    Args:
        times: forward and backward of each layer for one micro-batch, at speed 1.
        transfers: seconds in which a micro-batch and its gradients cross the cut before each layer.
        speeds: the speed of each stage's device; 1 for the profiled device.
        lacking: (first layer, layer after the last, stage) -> bytes beyond its device's memory, negative if some are
            left.
    """
    num_stages, num_layers = len(speeds), len(times)
    starts = balanced_cuts(times, num_stages, speeds)
    spans = zip(_spans(starts, num_layers), speeds, strict=True)
    longest = max(sum(times[first:stop]) / speed for (first, stop), speed in spans)
    cuts = list(range(1, num_layers))
    if any(transfers[cut] > longest for cut in starts[1:]):
        cheap = [cut for cut in cuts if transfers[cut] <= longest]
        least = sorted(sorted(cuts, key=lambda cut: transfers[cut])[: num_stages - 1])
        cuts = cheap if len(cheap) >= num_stages - 1 else least
        groups = [0, *cuts]
        sums = [sum(times[first:stop]) for first, stop in _spans(groups, num_layers)]
        starts = tuple(groups[start] for start in balanced_cuts(sums, num_stages, speeds))
    return _within_memory(starts, [0, *cuts, num_layers], lacking)


def _within_memory(starts: Starts, borders: Sequence[int], lacking: Callable[[int, int, int], Bytes]) -> Starts:
    """The first layer of each stage after moves of layers from stages that lack memory to their neighbours.

    If no move makes all stages fit, it is the partition seen that lacks least. `borders`: the layers at which stages
    may begin, and the number of layers. `lacking`: see `bapipe`.
    """
    seen: dict[Starts, Bytes] = {}
    # Ends where the moves come back to a partition that was seen.
    while starts not in seen:
        lacks = [lacking(first, stop, stage) for stage, (first, stop) in enumerate(_spans(starts, borders[-1]))]
        seen[starts] = sum(max(0, own) for own in lacks)
        moves = _moves(starts, borders, lacks) if max(lacks) > 0 else ()
        starts = min(moves, key=lambda move: move[0])[1] if moves else starts
    return min(seen, key=lambda one: seen[one])


def _moves(starts: Starts, borders: Sequence[int], lacks: Sequence[Bytes]) -> list[tuple[Bytes, Starts]]:
    """(bytes that the neighbour lacks before it, first layers after it) of each move off the stage that lacks most.

    A move gives the stage's outermost layers to a neighbour. `lacks`: the bytes that each stage lacks.
    """
    stage = max(range(len(lacks)), key=lambda one: lacks[one])
    first, stop = (*starts, borders[-1])[stage : stage + 2]
    place, end = borders.index(first), borders.index(stop)
    if end - place < 2:  # a stage keeps one layer, or the layers that stay together
        return []
    moves = []
    if stage:
        moves.append((lacks[stage - 1], (*starts[:stage], borders[place + 1], *starts[stage + 1 :])))
    if stage + 1 < len(starts):
        moves.append((lacks[stage + 1], (*starts[: stage + 1], borders[end - 1], *starts[stage + 2 :])))
    return moves


def _spans(starts: Sequence[int], num_layers: int) -> list[tuple[int, int]]:
    return list(pairwise((*starts, num_layers)))


def bapipe_guesses(judge: Judge) -> Iterator[PlannerEstimate]:
    """BaPipe's layout for each number of micro-batches that cuts the batch, with its estimate of the time.

    The layout has one stage for each device, so no copies.
    """
    for arrangement, count in places(judge):
        if arrangement.data_parallel == 1:
            candidate = Candidate(
                arrangement=arrangement,
                schedule="1f1b",
                microbatches=count,
                starts=_starts(judge, arrangement, count),
                replicas=(1,) * arrangement.units,
            )
            stages, links = times_of(judge, candidate)
            clock = (count + len(stages) - 1) * max(forward + backward for forward, backward, _ in stages)
            ramp = (len(stages) - 1) * max(ahead + back for ahead, back in links)
            yield PlannerEstimate(judge=judge, candidate=candidate, seconds=clock + ramp)


def _starts(judge: Judge, arrangement: Arrangement, count: int) -> tuple[int, ...]:
    ground, tables = judge.tables.ground(arrangement), judge.tables
    question = judge.questions.question(arrangement, count, ignores_memory=True)
    samples, num_stages = tables.unit_samples(arrangement, count), arrangement.units

    def crossing(cut: int) -> Seconds:
        ways = (question.link(cut, stage, 1, 1) for stage in range(1, num_stages))
        return max(ahead + back for ahead, back, *_ in ways)

    def lacking(first: int, stop: int, stage: int) -> Bytes:
        held = judge.footprint.stage_bytes(first, stop, samples, count, min(num_stages - stage, count))
        return held - ground.memories[stage]

    transfers = [0.0, *(crossing(cut) for cut in range(1, tables.num_layers))]
    return bapipe(tables.table.sums(samples, count).steps(), transfers, ground.speeds, lacking)
