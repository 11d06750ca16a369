"""Building blocks: each worker's actions for one micro-batch, repeated at equal intervals.

Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, https://arxiv.org/abs/2405.15362: a block
repeated every T slots of time holds the activations of at most ceil(lifespan / T) micro-batches on each stage, so its
shape controls the memory. A worker's stages i and 2p - 1 - i of a V have lifespans with nearly the same sum on all
workers, which is why the V halves the memory that one stage on each worker needs.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from diffusionpipe.costs import StageCosts
from diffusionpipe.ir import Action, Op, Schedule, compute_action
from diffusionpipe.schedules.building.shapes import wave
from diffusionpipe.schedules.building.split_work import SplitWork, costs_of_stages, peaks, schedule_of_work
from diffusionpipe.schedules.building.squeeze import best_squeezed
from diffusionpipe.units import Seconds

Block: TypeAlias = Sequence[Mapping[tuple[int, Op], int]]
"""For each worker, (stage, op) -> the slot of time in which this F or I starts for micro-batch 0."""

V_PERIOD = 6
"""The number of slots that one micro-batch takes on a worker of a V: F, I and W of two stages."""


def v_block(num_workers: int, *, hops: tuple[int, int, int, int], waits: tuple[int, int, int]) -> Block:
    """The block in which a micro-batch goes down and up a V with its F, and down and up again with its I.

    `hops` are the slots between neighbouring workers on the four legs; `waits` are idle slots where the way turns
    round: at the last worker, at worker 0 between F and I, and at the last worker again.

    >>> for worker in v_block(2, hops=(1, 1, 1, 1), waits=(0, 0, 0)):
    ...     print(*(f"{stage}{op}: {slot}" for (stage, op), slot in worker.items()))
    0F: 0 3F: 3 3I: 4 0I: 7
    1F: 1 2F: 2 2I: 5 1I: 6
    """
    legs: list[Sequence[int]] = []
    turn = 0
    for hop, wait in zip(hops, (0, *waits), strict=True):
        legs.append(_leg(num_workers, len(legs), turn + wait, hop))
        turn = max(legs[-1]) + 1  # the next leg begins after the last slot of this one
    return [
        {
            (worker, Op.F): legs[0][worker],
            (2 * num_workers - 1 - worker, Op.F): legs[1][worker],
            (2 * num_workers - 1 - worker, Op.I): legs[2][worker],
            (worker, Op.I): legs[3][worker],
        }
        for worker in range(num_workers)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class VShape:
    """The hops and waits of a `v_block` that does not overlap with its repetitions, and the block's lifespan."""

    hops: tuple[int, int, int, int]
    waits: tuple[int, int, int]
    lifespan: int
    """Slots from the start of F to the start of I, summed over a worker's two stages, on the worker with the most."""


@lru_cache(maxsize=16)  # a search of orders asks once for each level of memory
def v_shapes(num_workers: int) -> tuple[VShape, ...]:
    """All shapes of a V's block with hops of at most 6 slots and waits below 6, the longest lifespan first.

    Cost: some 0.05 s, for any number of workers.
    """
    return tuple(sorted(_shapes(num_workers, (), (), ()), key=lambda shape: -shape.lifespan))


def _shapes(
    num_workers: int, hops: tuple[int, ...], waits: tuple[int, ...], legs: tuple[Sequence[int], ...]
) -> Iterator[VShape]:
    """The shapes that begin with these hops, waits and legs: slots of each worker, one leg after the other."""
    match hops, waits:
        case (down, up, back, home), (_, last, first, again):
            # F down, F up, I up, I down.
            spans = [turn + end - start - middle for start, middle, turn, end in zip(*legs, strict=True)]
            yield VShape(hops=(down, up, back, home), waits=(last, first, again), lifespan=max(spans))
            return
    turn = max(legs[-1]) + 1 if legs else 0
    for wait in range(V_PERIOD) if legs else (0,):  # nothing waits before the first leg
        for hop in range(1, V_PERIOD + 1) if num_workers > 1 else (1,):  # with one worker there is no way to stretch
            leg = _leg(num_workers, len(legs), turn + wait, hop)
            # Modulo the period slots repeat every V_PERIOD workers.
            near = range(min(num_workers, V_PERIOD))
            if all((leg[worker] - other[worker]) % V_PERIOD for other in legs for worker in near):
                yield from _shapes(num_workers, (*hops, hop), (*waits, wait), (*legs, leg))


def _leg(num_workers: int, number: int, start: int, hop: int) -> Sequence[int]:
    """The slot of each worker on one of the four legs, by worker; legs 0 and 2 lead from worker 0 to the last.

    `number`: of the leg. `start`: its first slot. `hop`: the slots between neighbouring workers.
    """
    slots = range(start, start + hop * num_workers, hop)
    return slots[::-1] if number % 2 else slots


def repeated(block: Block, num_microbatches: int) -> list[list[Action]]:
    """Each worker's order when a V's block is repeated every 6 slots; each W takes the first free slot after its I."""
    return [_repeated(worker, num_microbatches, V_PERIOD) for worker in block]


def _repeated(worker: Mapping[tuple[int, Op], int], num_microbatches: int, period: int) -> list[Action]:
    taken = {
        slot + i * period: compute_action(stage, op, i)
        for (stage, op), slot in worker.items()
        for i in range(num_microbatches)
    }
    assert len(taken) == len(worker) * num_microbatches, "a block and its repetitions do not overlap"
    order: list[Action] = []
    waiting: deque[Action] = deque()
    slot = 0
    while taken or waiting:
        # The slots that F and I leave free belong to the W that wait, in the order of their I.
        if slot in taken:
            action = taken.pop(slot)
            order.append(action)
            if action.op is Op.I:
                waiting.append(compute_action(action.stage, Op.W, action.microbatch))
        elif waiting:
            order.append(waiting.popleft())
        slot += 1
    return order


def v_schedule(
    name: str,
    pattern: Callable[[int], Sequence[Sequence[Action]]],
    num_microbatches: int,
    microbatch_size: int,
    *,
    costs: StageCosts | Sequence[StageCosts],
    latency: Seconds,
) -> Schedule:
    """The schedule over a V that squeezing makes, with these costs, of the orders that `pattern` gives.

    `pattern`: number of micro-batches -> the order of each worker.

    No worker gets more memory than the pattern's fullest worker needs with many micro-batches.

    Raises:
        ConfigError: there are costs for another number of stages.
    """
    work = v_work(pattern, num_microbatches, costs=costs, latency=latency)
    return schedule_of_work(name, work, best_squeezed(work, [pattern(num_microbatches)]), microbatch_size)


def v_work(
    pattern: Callable[[int], Sequence[Sequence[Action]]],
    num_microbatches: int,
    *,
    costs: StageCosts | Sequence[StageCosts],
    latency: Seconds,
) -> SplitWork:
    """The work of a V whose workers may hold as much as the pattern's fullest worker with 2 p + 2 micro-batches.

    `pattern`: number of micro-batches -> the order of each worker.

    Raises:
        ConfigError: there are costs for another number of stages.
    """
    num_workers = len(pattern(1))
    stages = costs_of_stages(costs, 2 * num_workers)
    return SplitWork(
        workers=wave(num_workers, 2),
        num_microbatches=num_microbatches,
        costs=stages,
        latency=latency,
        # Enough micro-batches for the pattern to come into its stride.
        limits=(max(peaks(stages, pattern(2 * num_workers + 2))),) * num_workers,
    )
