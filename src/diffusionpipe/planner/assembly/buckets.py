"""Cuts stages into buckets, so that the first gradients are reduced while the last ones are computed."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise

from diffusionpipe.errors import ScheduleError
from diffusionpipe.ir import Action, Edge, Op, Placement, Schedule, Stage


def subdivide(schedule: Schedule, parts: int, *, is_breadth_first: bool = False) -> Schedule:
    """The schedule with every stage cut into `parts` stages on the same worker, run one after the other.

        parts = 2      F0         becomes   0F0 1F0
                       B0                   1B0 0B0    after 1B0 of the last micro-batch the gradients of block 1
                                                       are complete; their reduction runs beside 0B0

    Forwards, and backwards, of several micro-batches that follow each other go through all parts one micro-batch
    after the other or, breadth first, through one part after the other, which needs each part's weights only once:

        F0 F1   becomes   0F0 1F0 0F1 1F1,   breadth first   0F0 0F1 1F0 1F1

    Stage s becomes stages s x parts, ..., s x parts + parts - 1, which hold the blocks of the same numbers. The
    result has only edges from each stage to the next; `connect` replaces them by the model's. Apply it right after the
    generator.

    Raises:
        ScheduleError: the orders hold something else than compute actions.
    """
    if any(action.op not in (Op.F, Op.B, Op.I, Op.W) for _, action in schedule.actions()):
        raise ScheduleError(["subdivide a schedule of F, B, I and W, before all other passes"])
    if parts == 1:
        return schedule
    old = schedule.placement
    stages = tuple(
        Stage(worker=stage.worker, weights=stage.weights * parts + part, share=stage.share)
        for stage in old.stages
        for part in range(parts)
    )
    pipelines = tuple(
        replace(
            pipeline,
            stages=(numbers := tuple(stage * parts + part for stage in pipeline.stages for part in range(parts))),
            edges=tuple(Edge(producer=a, consumer=b) for a, b in pairwise(numbers)),
        )
        for pipeline in old.pipelines
    )
    alike = _runs if is_breadth_first else _singly
    orders = tuple(tuple(a for run in alike(order) for a in _parts(run, parts)) for order in schedule.orders)
    return replace(schedule, placement=Placement(stages=stages, pipelines=pipelines), orders=orders)


def _singly(order: Sequence[Action]) -> list[list[Action]]:
    return [[action] for action in order]


def _runs(order: Sequence[Action]) -> list[list[Action]]:
    """The actions of an order in runs: neighbours with the same stage and the same op are in one run."""
    return [list(run) for _, run in groupby(order, key=lambda action: (action.stage, action.op))]


def _parts(run: Sequence[Action], parts: int) -> list[Action]:
    # Gradients come from the last part first.
    numbers = range(parts) if run[0].op is Op.F else range(parts - 1, -1, -1)
    return [replace(action, stage=action.stage * parts + part) for part in numbers for action in run]


def bucket_starts(weights: Sequence[int], parts: int) -> tuple[int, ...]:
    """The index of the first layer of each of `parts` contiguous buckets, so that their gradients are about equal.

    `weights`: the size of each layer's gradients.

    Every bucket has at least one layer; bucket k ends at the first layer where its part of all weights is reached.

    >>> bucket_starts([4, 0, 1, 3, 8], 2)
    (0, 4)
    """
    total, running = sum(weights), list(accumulate(weights, initial=0))
    starts = [0]
    for part in range(1, parts):
        # Each bucket after this one needs a layer of its own.
        earliest, latest = starts[-1] + 1, len(weights) - (parts - part)
        cut = next((i for i in range(earliest, latest) if running[i] * parts >= total * part), latest)
        starts.append(cut)
    return tuple(starts)
