"""Simulates the training schedule of a layout in full: every rank of a pipeline, every message in its queue."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from diffusionpipe.costs import Costs
from diffusionpipe.holding.memory import MemoryUse
from diffusionpipe.ir import Mesh, Op, Schedule, Timeline
from diffusionpipe.planner.assembly.build import build_train_schedule
from diffusionpipe.planner.assembly.layout import Blocks, Filler, Layout, Pricing
from diffusionpipe.planner.pricing.layer_table import checkpointed_layers
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import costs_of, update_time
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.simulator import simulate
from diffusionpipe.timing.memory import peak_memory
from diffusionpipe.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A training schedule with its predicted times, costs and memory, simulated in full."""

    train: Schedule
    blocks: Blocks
    mesh: Mesh
    costs: Costs
    timeline: Timeline
    memory: tuple[MemoryUse, ...]
    """Memory of each worker at its peak."""
    overflow: Bytes
    """Bytes that the fullest device lacks; negative: bytes that are left."""
    exposed: Seconds
    """Seconds of the iteration in which frozen work runs and no worker does anything else."""
    update: Seconds
    """Seconds of clipping, optimizer and average on the worker with most to update; 0 if not in the profile."""

    @property
    def iteration(self) -> Seconds:
        """The seconds of one run of the schedule, without the update."""
        return self.timeline.makespan

    @property
    def step(self) -> Seconds:
        """The seconds from one batch to the next: the iteration and the update after it."""
        return self.iteration + self.update


def pricing_of(setting: Setting) -> Pricing:
    """The function that prices schedules with a setting's costs, as `build_plan` takes it."""

    def price(schedule: Schedule, blocks: Blocks, mesh: Mesh) -> Costs:
        return costs_of(schedule, blocks, mesh, setting)

    return price


def propose(setting: Setting, layout: Layout, filler: Filler | None = None) -> Proposal:
    """The training schedule of a layout, simulated in full, with its times and memory.

    Raises:
        ConfigError: the layout does not fit the model or the batch.
    """
    train, blocks = build_train_schedule(setting.graph, layout, pricing=pricing_of(setting), filler=filler)
    return predict(setting, train, blocks, layout.mesh)


def proposals(setting: Setting, filler: Filler | None) -> Callable[[Candidate], Proposal]:
    """A function from a candidate to the simulation of its plan.

    Candidates whose layouts are equal, because they differ only in their hosts, share a plan, which is simulated once.
    """
    made = cache(partial(propose, setting, filler=filler))
    return lambda candidate: made(candidate.layout(setting))


def predict(setting: Setting, train: Schedule, blocks: Blocks, mesh: Mesh) -> Proposal:
    """The simulated times and the memory of a training schedule.

    Raises:
        ScheduleError: the schedule gets stuck.
        ConfigError: the cluster has fewer devices than the mesh.
    """
    costs = costs_of(train, blocks, mesh, setting)
    timeline = simulate(train, costs)
    backbone = tuple(name for block in blocks[:-1] for name in block)
    memory = peak_memory(
        train,
        timeline,
        blocks,
        profile=setting.profile,
        ledger=setting.ledger,
        checkpointed=checkpointed_layers(setting.workload, backbone),
        mesh=mesh,
    )
    devices = setting.cluster.devices[: mesh.num_ranks]
    overflow = max(memory[mesh.place(rank)[1]].total - device.memory for rank, device in enumerate(devices))
    return Proposal(
        train=train,
        blocks=blocks,
        mesh=mesh,
        costs=costs,
        timeline=timeline,
        memory=memory,
        overflow=overflow,
        exposed=exposed_frozen_time(timeline),
        update=update_time(train, blocks, setting.profile, mesh),
    )


def exposed_frozen_time(timeline: Timeline) -> Seconds:
    """The seconds in which some worker runs frozen work and none trains, reduces or gathers."""
    frozen = [(s.start, s.end) for s in timeline.spans if s.action.op is Op.ENCODE]
    ops = {Op.F, Op.B, Op.I, Op.W, Op.REDUCE_GRAD, Op.UNSHARD}
    trained = [(s.start, s.end) for s in timeline.spans if s.action.op in ops]
    # The part of the union that trained work does not cover.
    return _length(frozen + trained) - _length(trained)


def _length(intervals: Sequence[tuple[Seconds, Seconds]]) -> Seconds:
    """The length of the union of the intervals, in seconds."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
