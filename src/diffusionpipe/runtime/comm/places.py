"""The places of a plan's ranks, and the stages that they hold."""

from dataclasses import dataclass

from diffusionpipe.holding.groups import holders
from diffusionpipe.ir import Plan, Range, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlace:
    """A rank with its two coordinates in the plan's mesh: worker (pipeline axis) and data-parallel group."""

    rank: int
    worker: int
    """Coordinate on the pipeline axis."""
    group: int
    """Coordinate on the data-parallel axis."""


def place_of(plan: Plan, rank: int) -> MeshPlace:
    """The worker and the data-parallel group of a rank in the plan's mesh."""
    group, worker = plan.mesh.place(rank)
    return MeshPlace(rank=rank, worker=worker, group=group)


def holders_of(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Trained block id -> all ranks that hold its weights, ascending."""
    return holders(plan.train.placement, plan.mesh)


def trained_blocks(plan: Plan, rank: int) -> tuple[int, ...]:
    """The ids of the trained blocks whose weights a rank holds."""
    return tuple(block for block, ranks in holders_of(plan).items() if rank in ranks)


def trained_layers(plan: Plan, rank: int) -> tuple[str, ...]:
    """The names of the layers of all trained blocks that a rank holds."""
    return tuple(name for block in trained_blocks(plan, rank) for name in plan.blocks[block])


def channels_of(plan: Plan) -> set[tuple[int, int]]:
    """All (source, destination) pairs of ranks between which the plan's schedules send messages."""
    pairs = {
        (stages[message.source].worker, stages[message.destination].worker)
        for schedule in plan.phases.values()
        for stages in (schedule.placement.stages,)
        for message in schedule.messages
    }
    rank, groups = plan.mesh.rank, range(plan.mesh.data_parallel)
    return {(rank(group, source), rank(group, destination)) for group in groups for source, destination in pairs}


def encoded_rows(schedule: Schedule, worker: int) -> Range | None:
    """The samples of the pipeline's batch that this worker encodes, as a range of rows; None if it encodes none."""
    placement = schedule.placement
    for index, stage in enumerate(placement.stages):
        if stage.worker == worker and placement.is_frozen(index):
            return placement.rows(index, 0)
    return None
