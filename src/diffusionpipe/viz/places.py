"""Which of a worker's stages an action belongs to: its direction or chunk, by the order of the stages.

A probe's stages have forwards alone where others also have backwards; they belong to no direction.
"""

from collections import defaultdict
from collections.abc import Sequence

from diffusionpipe.ir import COMPUTE_OPS, Op, Schedule, Span

PROBE = (-1, 1)
"""The (place, number of places) that stands for a stage of a probe."""
OF_MODEL = 0
"""The number of places in a pair whose place is the number of a model among several."""


def places_of_stages(spans: Sequence[Span]) -> dict[int, tuple[int, int]]:
    """Stage -> (its place among the stages that its worker computes, how many these are); encoder stages are left out.

    A probe's stages have `PROBE`.

    Stages are numbered pipeline by pipeline in forward order, so a worker's stages are in the order of directions, and
    within a direction in the order of chunks.
    """
    stages: dict[int, set[int]] = defaultdict(set)
    probes = _probes(spans)
    for span in spans:
        if span.action.op in COMPUTE_OPS and span.action.stage not in probes:
            stages[span.worker].add(span.action.stage)
    places = {stage: (place, len(found)) for found in stages.values() for place, stage in enumerate(sorted(found))}
    return places | dict.fromkeys(probes, PROBE)


def _probes(spans: Sequence[Span]) -> set[int]:
    forward = {span.action.stage for span in spans if span.action.op is Op.F}
    trained = {span.action.stage for span in spans if span.action.op in COMPUTE_OPS and span.action.op is not Op.F}
    return forward - trained if trained else set()  # where nothing is trained, no forward is a probe


def models_of(schedule: Schedule | None) -> tuple[str, ...]:
    """The names of the models that a schedule trains, in order; () without a schedule."""
    trained = schedule.placement.pipelines if schedule is not None else ()
    return tuple(dict.fromkeys(pipeline.model for pipeline in trained if Op.ENCODE not in pipeline.ops))


def hues_of_stages(spans: Sequence[Span], schedule: Schedule | None = None) -> dict[int, tuple[int, int]]:
    """Stage -> (place, number of places) by which `stage_colour` colours it.

    Where every worker has its stages in a row, they are buckets of one and look alike.

    Of several models that train together, by the schedule, all stages of one look alike: (model, `OF_MODEL`).
    """
    places = places_of_stages(spans)
    if schedule is not None and len(models := models_of(schedule)) > 1:
        pipelines = (one for one in schedule.placement.pipelines if one.model in models and Op.ENCODE not in one.ops)
        hues = {stage: (models.index(pipeline.model), OF_MODEL) for pipeline in pipelines for stage in pipeline.stages}
        return {stage: PROBE if place == PROBE else hues[stage] for stage, place in places.items()}
    workers: dict[int, set[int]] = defaultdict(set)
    for span in spans:
        if places.get(span.action.stage, PROBE) != PROBE:
            workers[span.worker].add(span.action.stage)
    if all(max(found) - min(found) + 1 == len(found) for found in workers.values()):
        return {stage: PROBE if place == PROBE else (0, 1) for stage, place in places.items()}
    return places


def is_later(place: int, num_stages: int) -> bool:
    """Whether the stage at `place` is in the second half of its worker's stages: second direction or chunk."""
    return 2 * place >= num_stages > 1
