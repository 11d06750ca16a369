"""Names layouts in tables, logs and pictures: of candidates, and of plans that were read from a file."""

from dataclasses import dataclass

from diffusionpipe.holding.storage import storage_of
from diffusionpipe.ir import Op, Plan, Schedule, Sharded
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.schedules.building.branches import GRAPHPIPE, depths

DATA_PARALLEL = "data parallel"
SHARDED = "sharded data parallel"


def name_of(candidate: Candidate) -> str:
    """The name of a candidate's layout: its schedule, or "data parallel" or "sharded data parallel" for copies."""
    if candidate.workers > 1:
        return candidate.schedule
    return SHARDED if candidate.sharded is Sharded.ALL else DATA_PARALLEL


def sizes_of(candidate: Candidate) -> str:
    """A candidate's sizes in words, e.g. "4 stages (1,1,2,4 replicas) x 2 groups, 16 micro-batches"."""
    return _in_words(
        _Sizes(
            stages=candidate.stages,
            workers=candidate.workers,
            replicas=candidate.replicas,
            groups=candidate.arrangement.data_parallel,
            is_side_by_side=candidate.arrangement.adjacent > 1,
            microbatches=candidate.counts,
            buckets=candidate.buckets,
            in_a_row=_in_a_row(candidate.orders) if candidate.schedule == GRAPHPIPE and candidate.orders else None,
            has_owners=candidate.sharded is Sharded.OPTIMIZER,
        )
    )


def name_of_plan(plan: Plan) -> str:
    """The name of a plan's layout: its schedule, "one device", "data parallel" or "sharded data parallel"."""
    if plan.mesh.pipeline * plan.mesh.data_parallel == 1:
        return "one device"
    if plan.mesh.pipeline > 1 and len({one.blocks for one in stages_of_plan(plan)}) > 1:
        return plan.train.name
    return SHARDED if plan.mesh.sharded is Sharded.ALL else DATA_PARALLEL


def sizes_of_plan(plan: Plan) -> str:
    """A plan's sizes in words, e.g. "4 stages x 2 groups, 16 micro-batches", as `sizes_of` writes them."""
    of_backbone: dict[str, list[PlannedStage]] = {}
    directions: dict[str, int] = {}
    for one in stages_of_plan(plan):
        if one.direction == directions.setdefault(one.backbone, one.direction):  # others hold the same blocks
            of_backbone.setdefault(one.backbone, []).append(one)
    blocks = [dict.fromkeys(one.blocks for one in stages) for stages in of_backbone.values()]
    workers = [{one.worker for one in stages} for stages in of_backbone.values()]
    is_shared = all(own == workers[0] for own in workers)  # else each is on devices of its own
    rows = list(of_backbone.values())[: 1 if is_shared else None]
    replicas = tuple(
        sum(one.blocks == block for one in stages) for stages, own in zip(rows, blocks, strict=False) for block in own
    )
    words = _in_words(
        _Sizes(
            stages=tuple(len(own) for own in blocks),
            workers=len(replicas) if max(replicas) > 1 else plan.mesh.pipeline,
            replicas=replicas,
            groups=plan.mesh.data_parallel,
            is_side_by_side=plan.mesh.adjacent > 1,
            microbatches=_microbatches(plan),
            buckets=max(len(one.blocks) for stages in rows for one in stages),
            in_a_row=_in_a_row(plan.train) if plan.train.name == GRAPHPIPE else None,
            has_owners=plan.mesh.sharded is Sharded.OPTIMIZER,
        )
    )
    return words + storage_of(plan.encoders).words


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """One trained stage of a plan on one worker, all its buckets together."""

    direction: int
    """The number of the trained pipeline that it belongs to; 0 if there is one."""
    backbone: str
    """The name of the backbone that it belongs to; "" if there is one."""
    worker: int
    blocks: tuple[int, ...]
    """The numbers of its blocks: several if its gradients are summed, or parameters gathered, bucket by bucket."""
    share: str
    """The part of every micro-batch's samples, e.g. "0:1/2"; "" for all of them."""


def stages_of_plan(plan: Plan) -> tuple[PlannedStage, ...]:
    """The trained stages of a plan in forward order, pipeline by pipeline.

    If each worker holds neighbouring stages of a pipeline alone, these count as the buckets of one stage. In other
    plans a worker has several stages.
    """
    placement = plan.train.placement
    trained = [p for p in placement.pipelines if Op.ENCODE not in p.ops and not p.is_probe]
    found = []
    for direction, pipeline in enumerate(trained):
        own: dict[int, list[int]] = {}
        for stage in pipeline.stages:
            own.setdefault(placement.stages[stage].worker, []).append(stage)
        runs = {worker: [placement.stages[stage].weights for stage in stages] for worker, stages in own.items()}
        are_buckets = all(blocks == list(range(blocks[0], blocks[0] + len(blocks))) for blocks in runs.values())
        groups = list(own.values()) if are_buckets else [[stage] for stage in pipeline.stages]
        for group in groups:
            first = placement.stages[group[0]]
            found.append(
                PlannedStage(
                    direction=direction,
                    backbone=pipeline.model,
                    worker=first.worker,
                    blocks=tuple(placement.stages[stage].weights for stage in group),
                    share="" if str(first.share) == "0:1" else str(first.share),
                )
            )
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """The sizes of a layout that its words name."""

    stages: tuple[int, ...]
    """Stages of each backbone."""
    workers: int
    replicas: tuple[int, ...]
    groups: int
    is_side_by_side: bool
    microbatches: tuple[int, ...]
    """Micro-batches of each backbone."""
    buckets: int
    has_owners: bool
    """Whether the copies hold the optimizer's states in parts."""
    in_a_row: int | None
    """The number of stages on the longest path, if stages on branches run at the same time; else None."""


def _in_a_row(schedule: Schedule) -> int:
    """The number of workers on the longest path of a micro-batch; replicas of a stage count as one."""
    stages = schedule.placement.stages
    trained = next(pipeline for pipeline in schedule.placement.pipelines if Op.ENCODE not in pipeline.ops)
    # Of replicas the first one counts.
    first = {stages[stage].weights: stages[stage].worker for stage in reversed(trained.stages)}
    own = [edge for edge in trained.edges if edge.producer in trained.stages]
    pairs = ((first[stages[edge.producer].weights], first[stages[edge.consumer].weights]) for edge in own)
    edges = {(one, other) for one, other in pairs if one != other}
    return max(depths(edges, schedule.num_workers))


def _in_words(sizes: _Sizes) -> str:
    words, has_stages = [], sizes.workers > 1
    if has_stages:
        # More stages than workers: each has several.
        is_wound = len(sizes.stages) == 1 and sizes.workers < sizes.stages[0]
        words.append(f"{_each(sizes)} stages" + (f" on {sizes.workers} ranks" if is_wound else ""))
        if sizes.in_a_row is not None:
            words.append(f"({sizes.in_a_row} in a row)")
        if max(sizes.replicas) > 1:
            words.append(f"({','.join(map(str, sizes.replicas))} replicas)")
    copies = sizes.groups * (1 if has_stages else sizes.replicas[0])
    if copies > 1:
        words.append(f"x {copies} groups" if has_stages else f"{copies} copies")
    text = " ".join(words) or "one device"
    if has_stages and sizes.is_side_by_side:
        text += " side by side"
    if not has_stages and sizes.replicas[0] > 1:
        text += " that share the encoders" + (f", {sizes.replicas[0]} each" if sizes.groups > 1 else "")
    if max(sizes.microbatches) > 1:
        text += f", {' + '.join(map(str, sizes.microbatches))} micro-batches"
    text += f", {sizes.buckets} buckets" if sizes.buckets > 1 else ""
    return text + (", optimizer states in parts" if sizes.has_owners else "")


def _each(sizes: _Sizes) -> str:
    """The number of stages as a text, e.g. "4"; for backbones on workers of their own "3 + 5"."""
    stages = sizes.stages
    is_same = len(stages) == 1 or set(stages) == {sizes.workers}
    return str(stages[0]) if is_same else " + ".join(map(str, stages))


def _microbatches(plan: Plan) -> tuple[int, ...]:
    """The number of micro-batches of each backbone of a plan."""
    found: dict[str, int] = {}
    for pipeline in plan.train.placement.pipelines:
        if Op.ENCODE not in pipeline.ops and not pipeline.is_probe:
            found[pipeline.model] = found.get(pipeline.model, 0) + len(pipeline.microbatches)
    return tuple(found.values())
