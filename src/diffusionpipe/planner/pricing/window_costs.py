"""Prices the actions and counts the memory of ranks in training without a flush."""

from collections.abc import Sequence
from dataclasses import replace

from diffusionpipe.costs import Costs
from diffusionpipe.holding.memory import MemoryUse
from diffusionpipe.ir import Mesh, Schedule
from diffusionpipe.ir.versions import batches_held, versions_held
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import costs_of, time_to_update, trained_parameters, worker_speeds
from diffusionpipe.timing.held import forwards_held
from diffusionpipe.units import Bytes, Seconds


def window_costs(
    unrolled: Schedule,
    blocks: Sequence[Sequence[str]],
    mesh: Mesh,
    setting: Setting,
    *,
    batches: int,
    encoding: Seconds,
) -> Costs:
    """The costs of the actions of `unrolled`, a window that is unrolled to `batches` batches.

    There is no end of an iteration, so the work that a rank does once for a batch counts as parts of its backwards: its
    update, the gradient sum, for which the update waits, and, if the window has no fills, `encoding` seconds of frozen
    work on a device of speed 1. Weights are cast in every forward, because each may read another version.
    """
    profile, speeds = setting.profile, worker_speeds(setting.cluster, mesh)
    costs, placement, stages = costs_of(unrolled, blocks, mesh, setting), unrolled.placement, []
    for index, (own, stage) in enumerate(zip(placement.stages, costs.stages, strict=True)):
        if placement.is_frozen(index):
            stages.append(stage)
            continue
        layers, forwards = blocks[own.weights], placement.num_forwards(index)
        update = time_to_update(trained_parameters(setting.graph, layers), profile, setting.cluster.num_ranks)
        once = encoding / speeds[own.worker] + update + (costs.reduces[index] if costs.reduces else 0.0)
        casts = sum(
            setting.workload.cast_time(profile.layer(name)) for name in layers if name not in setting.table.checkpointed
        )
        # `costs_of` has one cast for all forwards in equal parts; here each forward has a whole one.
        forward = stage.forward + casts / speeds[own.worker] * (1 - 1 / forwards)
        stages.append(replace(stage, forward=forward, backward=stage.backward + once * batches / forwards))
    return replace(costs, stages=tuple(stages), reduces=())


def window_memory(window: Schedule, uses: Sequence[MemoryUse], rows: Sequence[Bytes]) -> tuple[MemoryUse, ...]:
    """The memory of each worker in training without a flush: with all versions, copies and batches in flight.

    `uses`: the memory of each worker with one version and the narrow copies of one forward. `rows`: the bytes of the
    frozen outputs of one batch on each worker.
    """
    held, forwards, batches = versions_held(window), forwards_held(window), batches_held(window)
    versions = {stage.worker: held[stage.weights] for stage in window.placement.stages if stage.weights in held}
    return tuple(
        replace(
            use,
            parameters=use.parameters * versions[worker],
            copies=use.copies * forwards[worker],  # each forward casts the weights that it reads
            frozen_outputs=outputs * batches,
        )
        for worker, (use, outputs) in enumerate(zip(uses, rows, strict=True))
    )
