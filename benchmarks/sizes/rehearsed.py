"""Steps of several sizes on processes in which waits stand for compute; messages have their real sizes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter

import torch.distributed as dist

from diffusionpipe.costs import Costs, Profile, TensorSpec
from diffusionpipe.holding.sizes import at_size
from diffusionpipe.ir import Plan
from diffusionpipe.planner.from_profile import setting_of
from diffusionpipe.planner.pricing.stage_costs import costs_of
from diffusionpipe.runtime.engine.equipment import Equipment
from diffusionpipe.runtime.engine.executor import Executor
from diffusionpipe.runtime.job.local_ranks import LocalRanks
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.runtime.rehearsals.rehearsal import DeviceClock, VirtualRun, virtual_equipment


def rehearsed_times(ranks: LocalRanks, plan: Plan, profile: Profile, steps: Sequence[tuple[int, ...]]) -> list[float]:
    """The seconds of each step."""
    setting = setting_of(profile, plan.mesh, plan.batch)
    costs = [
        costs_of(plan.train, plan.blocks, plan.mesh, replace(setting, profile=at_size(profile, number)))
        for number in range(len(profile.sizes))
    ]
    specs = {tensor.name: tensor for tensor in profile.graph.tensors}
    found = ranks.run(rehearse_sizes, plan, costs, specs, [size.crossing for size in profile.sizes], steps)
    return [max(end for _, end in step) - min(start for start, _ in step) for step in zip(*found, strict=True)]


def rehearse_sizes(
    job: Job,
    plan: Plan,
    costs: Sequence[Costs],
    specs: dict[str, TensorSpec],
    crossing: Sequence[float],
    steps: Sequence[tuple[int, ...]],
) -> list[tuple[float, float]]:
    """Start and end of each step on this rank; one step comes before, unmeasured."""
    rank, clock = job.membership.rank, DeviceClock()
    own, *others = _equipments(plan, costs, specs, crossing, rank, clock)
    executor = Executor(plan.train, plan.mesh.place(rank)[1], own, others=others)
    store, times = executor.store, []
    held = store.num_bytes
    for rows in (steps[0], *steps):
        store.sizes = tuple(rows[cell.start] for cell in store.cells)
        dist.barrier()
        start = perf_counter()
        clock.begin()
        executor.run()
        times.append((start, perf_counter()))
    assert store.num_bytes == held, "rows have their places once"
    return times[1:]


def _equipments(
    plan: Plan,
    costs: Sequence[Costs],
    specs: dict[str, TensorSpec],
    crossing: Sequence[float],
    rank: int,
    clock: DeviceClock,
) -> Iterator[Equipment]:
    """The parts of the rank for each size; they share the transport of the first."""
    first = None
    for own, part in zip(costs, crossing, strict=True):
        tensors = {
            name: replace(spec, shape=tuple(round(side * part) for side in spec.shape)) for name, spec in specs.items()
        }
        run = VirtualRun(schedule=plan.train, costs=own, tensors=tensors, mesh=plan.mesh, inputs=("pixels",))
        made = virtual_equipment(run, rank, clock)
        first = first or made
        yield replace(first, stages=made.stages, tensors=made.tensors)
