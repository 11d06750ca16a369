"""Schedules of one model become schedules of a model with several backbones, and these run one after the other.

    first    0F0 0B0          in turn    0F0 0B0 2F0 2B0
             1F0 1B0                     1F0 1B0 3F0 3B0
    second   0F0 0B0
             1F0 1B0

Blocks are numbered through like stages: the first backbone's blocks, then the second one's.
"""

from collections.abc import Sequence
from dataclasses import replace

from diffusionpipe.ir import Action, Edge, Pipeline, Placement, Schedule, Stage


def of_backbone(schedule: Schedule, model: str, first_block: int) -> Schedule:
    """The schedule as backbone `model` has it: its pipelines get that name, its blocks begin at `first_block`."""
    placement = schedule.placement
    stages = tuple(replace(stage, weights=stage.weights + first_block) for stage in placement.stages)
    pipelines = tuple(replace(pipeline, model=model) for pipeline in placement.pipelines)
    return replace(schedule, placement=Placement(stages=stages, pipelines=pipelines))


def one_by_one(name: str, schedules: Sequence[Schedule]) -> Schedule:
    """The schedule in which every worker runs its orders of these compute-only schedules one after the other.

    >>> from diffusionpipe.schedules.families.one_f_one_b import one_f_one_b
    >>> both = [of_backbone(one_f_one_b(2, 1), model, block) for model, block in (("first", 0), ("second", 2))]
    >>> for order in one_by_one("in turn", both).orders:
    ...     print(*order)
    0F0 0B0 2F0 2B0
    1F0 1B0 3F0 3B0
    """
    stages: list[Stage] = []
    pipelines: list[Pipeline] = []
    orders: list[list[Action]] = [[] for _ in range(max(schedule.num_workers for schedule in schedules))]
    for schedule in schedules:
        first = len(stages)
        stages += schedule.placement.stages
        pipelines += [_moved(pipeline, first) for pipeline in schedule.placement.pipelines]
        for order, actions in zip(orders, schedule.orders, strict=False):  # a schedule may have fewer workers
            order += [replace(action, stage=action.stage + first) for action in actions]
    return Schedule(
        name=name,
        placement=Placement(stages=tuple(stages), pipelines=tuple(pipelines)),
        orders=tuple(map(tuple, orders)),
    )


def alone(schedule: Schedule, model: str) -> Schedule:
    """The part of a compute-only schedule that belongs to the backbone `model`, with blocks and stages from 0 on.

    >>> from diffusionpipe.schedules.several.opposed import opposed
    >>> for order in alone(opposed(2, (1, 1)), "second").orders:
    ...     print(*order)
    1F0 1B0
    0F0 0B0
    """
    placement = schedule.placement
    kept = sorted(stage for pipeline in placement.pipelines if pipeline.model == model for stage in pipeline.stages)
    number = {stage: index for index, stage in enumerate(kept)}
    first_block = min(placement.stages[stage].weights for stage in kept)
    stages = tuple(replace(s, weights=s.weights - first_block) for s in (placement.stages[stage] for stage in kept))
    pipelines = tuple(_moved(p, -kept[0]) for p in placement.pipelines if p.model == model)
    assert kept == list(range(kept[0], kept[0] + len(kept))), "the stages of a backbone are numbered through"
    orders = [[replace(a, stage=number[a.stage]) for a in order if a.stage in number] for order in schedule.orders]
    return replace(
        schedule,
        placement=Placement(stages=stages, pipelines=pipelines),
        orders=tuple(map(tuple, orders)),
    )


def _moved(pipeline: Pipeline, by: int) -> Pipeline:
    edges = tuple(_moved_edge(edge, by) for edge in pipeline.edges)
    return replace(pipeline, stages=tuple(stage + by for stage in pipeline.stages), edges=edges)


def _moved_edge(edge: Edge, by: int) -> Edge:
    return replace(edge, producer=edge.producer + by, consumer=edge.consumer + by)
