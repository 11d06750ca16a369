"""A model's real edges in place of the generator's chain."""

from collections.abc import Sequence
from dataclasses import replace

from diffusionpipe.errors import ConfigError, ScheduleError
from diffusionpipe.ir import Edge, Schedule


def connect_blocks(schedule: Schedule, edges: Sequence[Edge]) -> Schedule:
    """The schedule whose pipelines have these edges between blocks, as edges between their stages.

    `edges` name blocks; each goes to every pipeline that holds both of its blocks.

    Pipelines of several backbones hold different blocks, and no edge leads from one to the other. An edge that leads
    back, to the same block or one before it, begins at the pipeline's probe; without a probe nothing flows over it.

    Raises:
        ScheduleError: the messages are explicit already.
        ConfigError: a pipeline holds one end of an edge and not the other.
    """
    stages = schedule.placement.stages
    for number, pipeline in enumerate(schedule.placement.pipelines):
        # In forward order: a block's place in it says whether an edge leads ahead or back.
        home = {stages[stage].weights: stage for stage in pipeline.stages}
        touching = [edge for edge in edges if edge.producer in home or edge.consumer in home]
        missing = {block for edge in touching for block in (edge.producer, edge.consumer)} - set(home)
        if missing:
            raise ConfigError(f"pipeline {number} holds no block {min(missing)}; its blocks are {sorted(home)}")
        place = {block: at for at, block in enumerate(home)}
        ahead = [edge for edge in touching if place[edge.producer] < place[edge.consumer]]
        back = [edge for edge in touching if place[edge.producer] >= place[edge.consumer]]
        own = [replace(edge, producer=home[edge.producer], consumer=home[edge.consumer]) for edge in ahead]
        for probe in (other for other in schedule.placement.pipelines if other.probes(pipeline)):
            at = {stages[stage].weights: stage for stage in probe.stages}
            own += [replace(edge, producer=at[edge.producer], consumer=home[edge.consumer]) for edge in back]
        # A probe trains nothing, so no gradients return over its edges.
        if pipeline.is_probe:
            own = [replace(edge, gradients=()) for edge in own]
        schedule = connect(schedule, own, pipeline=number)
    return schedule


def connect(
    schedule: Schedule,
    edges: Sequence[Edge],
    *,
    microbatches: Sequence[int] | None = None,
    model: str | None = None,
    pipeline: int = 0,
) -> Schedule:
    """The schedule with these edges between the stages of one pipeline; the orders stay as they are.

        chain   0 --> 1 --> 2          U-Net   0 --> 1 --> 2
                                               |___________^  skip, straight to its reader

    `microbatches` are the samples of each of the pipeline's micro-batches, `model` is its name; None keeps them. Where
    the pipeline gets more or fewer samples, pipelines whose samples follow its own in the batch move on or back.

    Raises:
        ScheduleError: the messages are explicit already.
        ConfigError: an edge names a stage outside of the pipeline, or the number of micro-batches differs.
    """
    if schedule.has_communication:
        raise ScheduleError(["connect a schedule before its messages are made explicit"])
    old = schedule.placement.pipelines[pipeline]
    sources = {s for p in schedule.placement.pipelines if p is old or p.probes(old) for s in p.stages}
    outside = [e for e in edges if e.producer not in sources or e.consumer not in old.stages]
    if outside:
        pairs = ", ".join(f"{e.producer}->{e.consumer}" for e in outside)
        raise ConfigError(f"edges {pairs} leave the pipeline; its stages are {', '.join(map(str, old.stages))}")
    sizes = old.microbatches if microbatches is None else tuple(microbatches)
    if len(sizes) != len(old.microbatches):
        raise ConfigError(f"{len(sizes)} micro-batch sizes for a schedule of {len(old.microbatches)} micro-batches")
    new = replace(old, edges=tuple(edges), microbatches=sizes, model=old.model if model is None else model)
    end = old.first_sample + old.num_samples
    pipelines = [
        replace(p, first_sample=p.first_sample + new.num_samples - old.num_samples) if p.first_sample >= end else p
        for p in schedule.placement.pipelines
    ]
    pipelines[pipeline] = new
    return replace(schedule, placement=replace(schedule.placement, pipelines=tuple(pipelines)))
