"""Several workers for one stage, each with a part of every micro-batch's samples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

from diffusionpipe.errors import ConfigError, ScheduleError
from diffusionpipe.ir import Edge, Op, Pipeline, Placement, Schedule, Share, Stage


def replicate(schedule: Schedule, replicas: Sequence[int], of_worker: Sequence[int] = ()) -> Schedule:
    """The schedule in which stage s is `replicas[s]` stages with equal shares, on workers of their own.

        replicas (2, 1)      worker 0: stage 0, samples 0:1/2 of each micro-batch ---+--> worker 2: stage 2, all
                             worker 1: stage 1, samples 1/2:1                     ---+

    `of_worker`: the number of copies of each worker that holds no stage, by worker; 1 by default. It has no effect for
    workers that hold stages.

    Stages and workers get new numbers, the replicas of stage 0 first. Orders are copied. Edges lead between all
    replicas whose shares meet.

    Raises:
        ScheduleError: the schedule has explicit messages, frozen work or reductions already.
        ConfigError: the numbers do not fit the stages, the workers or the micro-batches.
    """
    if any(action.op not in (Op.F, Op.B, Op.I, Op.W) for _, action in schedule.actions()):
        raise ScheduleError(["replicate a schedule of compute actions, before all other passes but connect"])
    placement = schedule.placement
    _check_numbers(placement, replicas)
    copies = _Copies(
        replicas=tuple(replicas),
        first_stage=tuple(accumulate(replicas, initial=0)),
        first_worker=tuple(accumulate(_per_worker(placement, replicas, of_worker), initial=0)),
    )
    stages = tuple(
        Stage(
            worker=copies.first_worker[stage.worker] + k,
            weights=stage.weights,
            share=_part(stage.share, k, replicas[old]),
        )
        for old, stage in enumerate(placement.stages)
        for k in range(replicas[old])
    )
    pipelines = tuple(_copy_pipeline(pipeline, copies, stages) for pipeline in placement.pipelines)
    orders = tuple(
        tuple(replace(action, stage=copies.first_stage[action.stage] + k) for action in order)
        for worker, order in enumerate(schedule.orders)
        for k in range(copies.first_worker[worker + 1] - copies.first_worker[worker])
    )
    return replace(schedule, placement=Placement(stages=stages, pipelines=pipelines), orders=orders)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    replicas: tuple[int, ...]
    first_stage: tuple[int, ...]
    """The index of the first replica of each old stage, by old stage."""
    first_worker: tuple[int, ...]
    """The first copy of each old worker, by old worker, and then the number of all new workers."""

    def of(self, stage: int) -> range:
        """The indices of the replicas of an old stage."""
        return range(self.first_stage[stage], self.first_stage[stage] + self.replicas[stage])


def _part(share: Share, k: int, num_parts: int) -> Share:
    width = (share.stop - share.start) / num_parts
    return Share(share.start + k * width, share.start + (k + 1) * width)


def _copy_pipeline(pipeline: Pipeline, copies: _Copies, stages: Sequence[Stage]) -> Pipeline:
    edges = tuple(
        Edge(producer=producer, consumer=consumer, tensors=edge.tensors, gradients=edge.gradients)
        for edge in pipeline.edges
        for producer in copies.of(edge.producer)
        for consumer in copies.of(edge.consumer)
        if stages[producer].share.overlaps(stages[consumer].share)
    )
    return replace(pipeline, stages=tuple(new for old in pipeline.stages for new in copies.of(old)), edges=edges)


def _per_worker(placement: Placement, replicas: Sequence[int], of_worker: Sequence[int] = ()) -> list[int]:
    idle = [*of_worker, *[1] * (placement.num_workers - len(of_worker))]
    return [
        max((replicas[i] for i, stage in enumerate(placement.stages) if stage.worker == worker), default=count)
        for worker, count in enumerate(idle)
    ]


def _check_numbers(placement: Placement, replicas: Sequence[int]) -> None:
    if len(replicas) != len(placement.stages):
        raise ConfigError(f"{len(replicas)} numbers of replicas for {len(placement.stages)} stages; give one per stage")
    if min(replicas) < 1:
        raise ConfigError(f"replicas {tuple(replicas)}: every stage needs at least 1")
    of_worker = _per_worker(placement, replicas)
    for i, stage in enumerate(placement.stages):
        if replicas[i] != of_worker[stage.worker]:
            raise ConfigError(
                f"the stages on worker {stage.worker} need equal numbers of replicas; got {tuple(replicas)}"
            )
    for pipeline in placement.pipelines:
        for stage_id in pipeline.stages:
            share, parts = placement.stages[stage_id].share, replicas[stage_id]
            # Each replica handles size x (width of the share) / parts samples, which must be a whole number.
            unit = Fraction(parts) / (share.stop - share.start)
            wrong = sorted({size for size in pipeline.microbatches if (size / unit).denominator != 1})
            if wrong:
                sizes = ", ".join(map(str, wrong))
                raise ConfigError(
                    f"micro-batches of {sizes} samples cannot be shared equally by the {parts} replicas of stage "
                    f"{stage_id}; use multiples of {unit.numerator}"
                )
