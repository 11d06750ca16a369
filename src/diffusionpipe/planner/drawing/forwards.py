"""Predicts the time and memory of forwards that keep nothing for a backward: of a validation or a denoising step.

    read from outside     rows of raw inputs and of outputs of frozen layers, of the whole batch, in a store
    running               messages received and not yet read, tensors between the layers of a stage, the workspace of
                          its hungriest layer, and messages sent, or results, of the micro-batches before

Nothing is sent back, so no message says that another one has arrived: a tensor that a worker sends stays until the end,
as results do. So the most that a worker holds depends on its order alone.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from diffusionpipe.costs import Profile
from diffusionpipe.holding.memory import forward_bytes
from diffusionpipe.ir import Mesh, Op, Range, Schedule
from diffusionpipe.ir.ranges import merged
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import costs_of
from diffusionpipe.simulator import simulate
from diffusionpipe.timing.sends import waits_of
from diffusionpipe.units import Bytes, Seconds

Blocks = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardUse:
    """The bytes that one worker holds beside its weights while it runs forwards."""

    layers: tuple[str, ...]
    """The layers that its stages run."""
    read: Bytes
    """Bytes of the rows that the worker's layers read from outside."""
    running: Bytes
    """Bytes of everything else at the peak of the forwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A schedule of forwards whose memory is counted, with its model and the layers that run."""

    profile: Profile
    schedule: Schedule
    blocks: Blocks
    layers: Collection[str]
    """The names of the layers that run; stages leave out all others of their blocks."""

    def own(self, stage: int) -> list[str]:
        """The names of the layers that a stage runs."""
        return [name for name in self.blocks[self.schedule.placement.stages[stage].weights] if name in self.layers]

    def stages(self, worker: int) -> list[int]:
        """The numbers of the worker's stages that are not encoder stages."""
        placement = self.schedule.placement
        return [
            index
            for index, stage in enumerate(placement.stages)
            if stage.worker == worker and not placement.is_frozen(index)
        ]


def forward_time(setting: Setting, schedule: Schedule, blocks: Blocks, mesh: Mesh) -> Seconds:
    """The simulated seconds of a schedule without backwards, in which weights are not cast to narrow copies."""
    kept = replace(setting, profile=_without_backward(setting.profile))
    return simulate(schedule, costs_of(schedule, blocks, mesh, kept)).makespan


def forward_uses(
    profile: Profile, schedule: Schedule, blocks: Blocks, layers: Collection[str]
) -> tuple[ForwardUse, ...]:
    """The memory of each worker in a schedule without backwards, whose stages run only their layers in `layers`."""
    case = _Case(profile=profile, schedule=schedule, blocks=blocks, layers=layers)
    return tuple(_use(case, worker) for worker in range(schedule.num_workers))


def _use(case: _Case, worker: int) -> ForwardUse:
    placement = case.schedule.placement
    stages = case.stages(worker)
    rows: dict[str, list[Range]] = {}
    for stage in stages:
        own = [placement.rows(stage, microbatch) for microbatch in placement.pipeline_of(stage).numbers]
        for name in _read_from_outside(case, stage):
            rows.setdefault(name, []).extend(own)
    graph = case.profile.graph
    return ForwardUse(
        layers=tuple(name for stage in stages for name in case.own(stage)),
        read=sum(graph.tensor(name).num_bytes * sum(map(len, merged(parts))) for name, parts in rows.items()),
        running=_running(case, worker),
    )


def _running(case: _Case, worker: int) -> Bytes:
    """The most bytes that a worker holds at a time while it runs forwards, without the rows read from outside."""
    schedule, placement, graph = case.schedule, case.schedule.placement, case.profile.graph
    layers = {stage: case.own(stage) for stage in case.stages(worker)}
    kept = {stage: _kept(case, stage) for stage in layers}
    waits = waits_of(schedule)
    received: dict[int, Bytes] = {}
    left = most = 0
    for action in schedule.orders[worker]:
        if action.op is Op.RECV_F and action.slot is not None:
            message = schedule.messages[action.slot]
            if not placement.is_frozen(message.source):
                size = sum(graph.tensor(name).num_bytes for name in message.tensors)
                received[action.slot] = len(message.samples) * size
        if action.op is Op.F and action.microbatch is not None:
            num_rows = len(placement.rows(action.stage, action.microbatch))
            needs = forward_bytes(case.profile, layers[action.stage], num_rows)
            # `left`: sent tensors and results stay until the end.
            most = max(most, left + sum(received.values()) + needs)
            left += kept[action.stage] * num_rows
            for slot in waits.get(action, ()):
                received.pop(slot, None)
    return most


def _without_backward(profile: Profile) -> Profile:
    """The profile for runs without backwards: no activations and casts; forwards take their time without gradients."""
    none = (0,) * len(profile.batch_sizes)
    layers = (
        replace(layer, forward=layer.forward_only or layer.forward, cast=0.0, copies=0, activation=none)
        for layer in profile.layers
    )
    return replace(profile, layers=tuple(layers))


def _read_from_outside(case: _Case, stage: int) -> set[str]:
    """The names of the tensors that a stage reads and that no running layer writes: raw inputs and frozen outputs."""
    graph, own = case.profile.graph, case.own(stage)
    made = {name for layer in graph.layers if layer.name in case.layers for name in layer.writes}
    return {name for layer in graph.layers if layer.name in own for name in layer.reads} - made


def _kept(case: _Case, stage: int) -> Bytes:
    """The bytes of one row of all tensors that a stage sends to other stages or leaves as results."""
    graph, own = case.profile.graph, case.own(stage)
    running = [layer for layer in graph.layers if layer.name in case.layers]
    wanted = {name for layer in running if layer.name not in own for name in layer.reads}
    read = {name for layer in running for name in layer.reads}
    written = [name for layer in graph.layers if layer.name in own for name in layer.writes]
    return sum(graph.tensor(name).num_bytes for name in written if name in wanted or name not in read)
