"""The facts about a run for people: which layers are on which rank, in how many copies and micro-batches."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from diffusionpipe.costs import Cluster, ModelGraph
    from diffusionpipe.ir import Pipeline, Plan, Schedule
    from diffusionpipe.trainer.setup.start import Start


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The facts about a run that are settled before its first step, from its recipe, plan, devices and data."""

    folder: "Path"
    """The run's folder."""
    model_path: str
    """The model's folder or hub id, as the recipe has it."""
    precision: str
    lora_rank: int | None
    """The rank of trained adapters; None without any."""
    versions: str
    """The kind of weights that a schedule reads: "flushed", or without a flush "stashed", "delayed", ..."""
    num_steps: int
    """The number of the last step."""
    model: "ModelGraph"
    plan: "Plan"
    hosts: tuple[str, ...]
    """The name of each rank's machine."""
    devices: tuple[str, ...]
    """The name of each rank's device."""
    data: str
    """The paths of the training data, with commas between."""
    samples: int
    """The number of samples in the training data."""
    conditions: int
    """The number of samples with a conditioning picture."""
    held_out: int | None
    """The number of samples in the validation data; None without any."""
    step: int
    """The number of steps done before this start."""
    checkpoint: "Path | None"
    """The checkpoint from which the run continues; None where it begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLayers:
    """A part of a model: layers that the same ranks hold, with the number of their trained parameters."""

    ranks: tuple[int, ...]
    layers: tuple[str, ...]
    parameters: int
    """The number of trained parameters in the part's layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanShape:
    """A plan's sizes for people: schedule, replicas, micro-batches and their samples."""

    name: str
    """The name of the schedule; "data parallel" or "one device" without a pipeline."""
    replicas: tuple[int, ...]
    """The number of replicas of each stage; () where each stage has one."""
    microbatches: tuple[int, ...]
    """Micro-batches of each model in one copy of the pipeline, over all directions."""
    microbatch_size: str
    """Samples of a micro-batch, e.g. "2", or "1-2"."""


def facts_of(start: "Start") -> RunFacts:
    """The facts about a run that begins, for people."""
    recipe = start.recipe
    return RunFacts(
        folder=recipe.run.folder,
        model_path=recipe.model.path,
        precision=recipe.training.precision.value,
        lora_rank=recipe.lora.rank,
        versions=recipe.pipeline.versions.value,
        num_steps=recipe.training.num_steps,
        model=start.model,
        plan=start.plan,
        hosts=start.hosts,
        devices=start.devices,
        data=str(recipe.data.where),
        samples=start.samples,
        conditions=start.conditions,
        held_out=start.held_out,
        step=start.step,
        checkpoint=start.checkpoint,
    )


def cluster_of_run(folder: "Path") -> "Cluster | None":
    """The cluster in the folder of a measured run; None where the run had only the links of its profile."""
    from diffusionpipe.costs.clusters import load_cluster

    path = folder / "cluster.json"
    return load_cluster(str(path)) if path.exists() else None


def shape_of(plan: "Plan") -> PlanShape:
    """The plan's sizes for people: schedule, replicas, micro-batches and their samples."""
    placement = plan.train.placement
    pipelines = _trained_pipelines(plan.train)
    # Replicas of a stage have the same block of weights.
    held = Counter(placement.stages[stage].weights for stage in pipelines[0].stages)
    replicas = tuple(held[block] for block in sorted(held))
    sizes = sorted({size for pipeline in pipelines for size in pipeline.microbatches})
    name = plan.train.name
    if plan.mesh.pipeline == 1:
        name = "one device" if plan.mesh.num_ranks == 1 else "data parallel"
        name = f"sharded {name}" if plan.mesh.shard > 1 else name
    return PlanShape(
        name=name,
        replicas=replicas if max(replicas) > 1 else (),
        microbatches=microbatches_of(plan.train),
        microbatch_size=f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]}-{sizes[-1]}",
    )


def microbatches_of(schedule: "Schedule") -> tuple[int, ...]:
    """The number of micro-batches of each model in one copy of the pipeline."""
    counts: Counter[str] = Counter()
    for pipeline in _trained_pipelines(schedule):
        counts[pipeline.model] += len(pipeline.microbatches)
    return tuple(counts.values())


def named_microbatches(counts: tuple[int, ...]) -> str:
    """The numbers of micro-batches of one or several models, as a text.

    >>> named_microbatches((1,)), named_microbatches((4, 2))
    ('1 micro-batch', '4 + 2 micro-batches')
    """
    return f"{' + '.join(map(str, counts))} micro-batch{'' if counts == (1,) else 'es'}"


def parts_of(plan: "Plan", model: "ModelGraph") -> tuple[HeldLayers, ...]:
    """The stages of a plan in the model's order: layers, trained parameters, and the ranks that hold them.

    The ranks are those in all copies of the pipeline. Gradient buckets, and blocks that are sharded one by one, are
    parts of a stage and not stages of their own.
    """
    ranks = _ranks_of_blocks(plan)
    trained = {p.name: prod(p.shape) for p in model.parameters if p.is_trainable}
    parts = []
    for same in _blocks_of_parts(plan, ranks):
        layers = tuple(name for block in same for name in plan.blocks[block])
        numbers = sum(trained.get(name, 0) for name in model.parameters_of(layers))
        parts.append(HeldLayers(ranks=ranks[same[0]], layers=layers, parameters=numbers))
    return tuple(parts)


def numbers_of_stages(plan: "Plan") -> dict[int, int]:
    """Stage of the placement that holds trained blocks -> the index of its part in `parts_of`."""
    parts = _blocks_of_parts(plan, _ranks_of_blocks(plan))
    number_of = {block: number for number, same in enumerate(parts) for block in same}
    stages = plan.train.placement.stages
    return {stage: number_of[one.weights] for stage, one in enumerate(stages) if one.weights in number_of}


def ranks_of_worker(plan: "Plan", worker: int) -> tuple[int, ...]:
    """The ranks that are this worker in all copies of the pipeline."""
    return tuple(sorted(plan.mesh.rank(group, worker) for group in range(plan.mesh.data_parallel)))


def ranks_text(ranks: Sequence[int]) -> str:
    """The ranks as a text; three or more at equal distances by the first and the last.

    >>> ranks_text([3]), ranks_text([0, 2]), ranks_text([4, 5, 6, 7]), ranks_text([0, 2, 4, 6])
    ('rank 3', 'ranks 0, 2', 'ranks 4 to 7', 'ranks 0, 2, ..., 6')
    >>> ranks_text([0, 1, 8, 9])
    'ranks 0, 1, 8, 9'
    """
    if len(ranks) < 3:
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    steps = {later - rank for rank, later in pairwise(ranks)}
    if steps == {1}:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    if len(steps) == 1:
        return f"ranks {ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def count_parameters(model: "ModelGraph", *, trained: bool) -> int:
    """The number of elements in the model's trained parameters or, if not `trained`, in the frozen ones."""
    from diffusionpipe.costs.graph import numbers_of

    return numbers_of(model, trained=trained)


def trained_components(model: "ModelGraph") -> tuple[str, ...]:
    """The names of the components with trained parameters."""
    return tuple(sorted({p.name.partition(".")[0] for p in model.parameters if p.is_trainable}))


def _trained_pipelines(schedule: "Schedule") -> "list[Pipeline]":
    from diffusionpipe.ir import Op

    # Encoders train nothing, and a probe runs the blocks of another pipeline.
    return [p for p in schedule.placement.pipelines if Op.ENCODE not in p.ops and not p.is_probe]


def _blocks_of_parts(plan: "Plan", ranks: Mapping[int, tuple[int, ...]]) -> list[list[int]]:
    """The block numbers of each stage, in the model's order; `ranks`: block -> the ranks that hold it."""
    if not _has_one_stage_a_rank(plan):
        return [[block] for block in sorted(ranks)]
    # Neighbouring blocks on the same ranks are one stage, in buckets.
    return [list(same) for _, same in groupby(sorted(ranks), key=lambda block: ranks[block])]


def _ranks_of_blocks(plan: "Plan") -> dict[int, tuple[int, ...]]:
    stages = plan.train.placement.stages
    held: dict[int, set[int]] = {}
    for pipeline in _trained_pipelines(plan.train):
        for stage in pipeline.stages:
            ranks = ranks_of_worker(plan, stages[stage].worker)
            held.setdefault(stages[stage].weights, set()).update(ranks)
    return {block: tuple(sorted(ranks)) for block, ranks in held.items()}


def _has_one_stage_a_rank(plan: "Plan") -> bool:
    """Whether each rank has a single stage, so that all its blocks are buckets of it."""
    from diffusionpipe.schedules import is_published
    from diffusionpipe.schedules.traits import is_chain

    return plan.mesh.pipeline == 1 or (is_published(plan.train.name) and is_chain(plan.train.name))
