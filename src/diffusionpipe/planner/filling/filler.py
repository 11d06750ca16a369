"""Makes the filler of a setting, which `build_plan` and the search call: fills within each device's memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from diffusionpipe.holding.memory import MemoryUse
from diffusionpipe.ir import Mesh, Schedule
from diffusionpipe.passes import PlacedFill, insert_fills
from diffusionpipe.planner.assembly.layout import Filler, Unfilled
from diffusionpipe.planner.assembly.queued import are_waiting, timed_in_queues
from diffusionpipe.planner.filling.fills import FillOptions, FillPlan, FrozenLayers, frozen_layers, plan_fills
from diffusionpipe.planner.filling.spreading import spread_fills
from diffusionpipe.planner.filling.windows import window_fills
from diffusionpipe.planner.pricing.encoders import Needs, Room, kept_for_others, needs_of
from diffusionpipe.planner.pricing.layer_table import checkpointed_layers
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import costs_of, worker_speeds
from diffusionpipe.simulator import simulate
from diffusionpipe.timing.buffers import moving_through
from diffusionpipe.timing.memory import peak_memory
from diffusionpipe.units import Bytes, Seconds

MOST_PLACED = 3
"""The most times that fills are placed if they lack memory; each is a simulation, fewer miss plans that would fit."""


def filler_of(setting: Setting) -> Filler:
    """The filler that places the setting's frozen work in bubbles, within each device's memory.

    At most `setting.workload.encode_chunk` samples go through the layers together. If memory is short, fewer samples
    do, or only some workers hold the frozen layers and encode for the others (see `Needs`). Fills that still lack
    memory are placed again, as if devices had less of it. In a window all workers may encode, and memory is not looked
    at. Times of layers are kept between calls.
    """
    frozen = frozen_layers(setting.profile)

    def fill(unfilled: Unfilled) -> Mapping[int, Sequence[PlacedFill]]:
        if unfilled.schedule.lead:
            speeds = worker_speeds(setting.cluster, unfilled.mesh)
            chunk = setting.workload.encode_chunk
            options = FillOptions(speeds=speeds, max_chunk=chunk, overhead=setting.fill_start)
            return window_fills(unfilled.schedule, unfilled.costs, frozen, options)
        packed = _packed(setting, unfilled, frozen)
        spread = spread_fills(setting, unfilled, frozen) if unfilled.schedule.num_workers == 1 else ()
        ways = [packed, {0: spread}] if spread else [packed]
        # Where neither fits, the one that lacks less memory; else the faster one.
        return min(ways, key=lambda way: _judged(setting, unfilled, way)) if len(ways) > 1 else packed

    return fill


def _judged(setting: Setting, unfilled: Unfilled, fills: Mapping[int, Sequence[PlacedFill]]) -> tuple[Bytes, Seconds]:
    """(most bytes by which the iteration with these fills exceeds a device's memory, its simulated seconds)."""
    frozen = len(unfilled.blocks) - 1
    outputs = {i: setting.graph.frozen_outputs(layers) for i, layers in enumerate(unfilled.blocks[:frozen])}
    schedule = insert_fills(unfilled.schedule, fills, block=frozen, outputs=outputs)
    timeline = simulate(schedule, costs_of(schedule, unfilled.blocks, unfilled.mesh, setting))
    rooms = _memories(setting, unfilled.mesh)
    uses = _peaks(setting, replace(unfilled, schedule=schedule, timeline=timeline))
    return max(0, *(use.total - room for use, room in zip(uses, rooms, strict=True))), timeline.makespan


def _packed(setting: Setting, unfilled: Unfilled, frozen: FrozenLayers) -> Mapping[int, Sequence[PlacedFill]]:
    """Worker -> its fills in one iteration, placed so that they fit in memory or lack the least of it.

    Hosts are chosen as if each encoded an equal part of the batch. A host that waits longer encodes more, and holds
    more outputs for the others. So fills that lack memory are placed again, as if devices had less memory by the lack.
    """
    room, tried, less = _room(setting, unfilled), list[tuple[Bytes, Seconds, FillPlan]](), 0
    while True:
        hosts, chunk = room.hosts_and_chunk(less)
        plan = _placed(setting, unfilled, frozen, hosts, chunk)
        if not tried and room.is_enough(chunk, plan.shares):
            return plan.fills
        lacked, seconds = _judged(setting, unfilled, plan.fills)
        is_known = any(plan.fills == other.fills for _, _, other in tried)
        tried.append((lacked, seconds, plan))
        if lacked == 0 or is_known or len(tried) == MOST_PLACED:
            return min(tried, key=lambda one: one[:2])[2].fills
        less += lacked


def fill_plan(setting: Setting, unfilled: Unfilled, frozen: FrozenLayers) -> FillPlan:
    """The fill plan of one iteration, with times and bound; its fills fit in memory if hosts encode equal shares."""
    return _placed(setting, unfilled, frozen, *hosts_and_chunk(setting, unfilled))


def _placed(
    setting: Setting, unfilled: Unfilled, frozen: FrozenLayers, hosts: tuple[int, ...] | None, chunk: int
) -> FillPlan:
    """The fill plan in which these hosts encode (None for all workers), with at most `chunk` samples in a fill."""
    speeds = worker_speeds(setting.cluster, unfilled.mesh)
    options = FillOptions(speeds=speeds, max_chunk=chunk, workers=hosts, overhead=setting.fill_start)
    return plan_fills(_queued(unfilled), unfilled.costs, frozen, options)


def _queued(unfilled: Unfilled) -> Schedule:
    """The schedule, with explicit messages if these wait for each other, so that it has the waits of the plan.

    If no message waits it stays without messages, which would only make graphs larger.
    """
    if not any(unfilled.costs.tensor_bytes.values()):  # nothing is sent, so nothing can wait
        return unfilled.schedule
    queued, explicit = timed_in_queues(unfilled.schedule, unfilled.costs)
    return explicit if are_waiting(queued, unfilled.timeline.makespan) else unfilled.schedule


def hosts_and_chunk(setting: Setting, unfilled: Unfilled) -> tuple[tuple[int, ...] | None, int]:
    """(workers that can hold the frozen layers beside this iteration, None for all; the most samples of a fill)."""
    return _room(setting, unfilled).hosts_and_chunk()


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoomForFills:
    """The memory that an iteration leaves for its fills, and the memory that they need."""

    needs: Needs
    ways: tuple[Sequence[Room], Sequence[Room]]
    """The room for fills on each worker, counted cautiously and less cautiously: the result of `_rooms`."""
    others: Sequence[Bytes]
    """Bytes that a worker holds for each sample only because it encodes it, by worker."""
    batch: int
    """Samples of the batch of one pipeline."""

    def hosts_and_chunk(self, less: Bytes = 0) -> tuple[tuple[int, ...] | None, int]:
        """(workers that hold the frozen layers, None for all; the most samples of a fill), by `Needs.hosts_and_chunk`.

        `less`: bytes that are subtracted from the memory of each worker.
        """
        ways = [[(free - less, unused) for free, unused in way] for way in self.ways]
        return self.needs.hosts_and_chunk(ways, self.others, self.batch)

    def is_enough(self, chunk: int, shares: Sequence[int]) -> bool:
        """Whether each worker has room to encode its share of the samples, counted cautiously.

        `chunk`: the most samples of a fill. `shares`: the samples that each worker encodes.
        """
        cautious = zip(self.ways[0], self.others, shares, strict=True)
        return all(
            share == 0 or self.needs.of(chunk, 2 * share * other, unused) <= free
            for (free, unused), other, share in cautious
        )


def _room(setting: Setting, unfilled: Unfilled) -> _RoomForFills:
    graph, stages = setting.graph, unfilled.schedule.placement.stages
    batch, num_workers = unfilled.schedule.placement.num_samples, unfilled.schedule.num_workers
    own: list[set[str]] = [set() for _ in range(num_workers)]
    for stage in stages:
        own[stage.worker].update(graph.frozen_outputs(unfilled.blocks[stage.weights]))
    others = [kept_for_others(graph, names) for names in own]
    return _RoomForFills(needs=needs_of(setting, batch), ways=_rooms(setting, unfilled), others=others, batch=batch)


def _rooms(setting: Setting, unfilled: Unfilled) -> tuple[list[Room], list[Room]]:
    """(room for fills on each worker counted cautiously, room counted with no message waiting), by worker.

    A room is (bytes free while activations peak, more bytes that are unused while the worker waits). Fills run while
    the worker would wait, beside the activations of that moment: so they may use the workspace, and the bytes by which
    the activations are below their peak. Messages are not explicit yet, so the cautious way counts two that wait; the
    full simulation of the plan shows how many there are.
    """
    uses, memories = _peaks(setting, unfilled), _memories(setting, unfilled.mesh)
    # What is read from the frozen part is held twice where it is encoded ahead.
    free = [memory - use.total - use.frozen_outputs for memory, use in zip(memories, uses, strict=True)]
    waiting = _held_in_waits(unfilled)
    unused = [use.workspace + use.activations - held for use, held in zip(uses, waiting, strict=True)]
    cautious = list(zip(free, unused, strict=True))
    return cautious, [(one + use.messages, more) for one, more, use in zip(free, unused, uses, strict=True)]


def _peaks(setting: Setting, unfilled: Unfilled) -> tuple[MemoryUse, ...]:
    """The memory of each worker at its peak, item by item, by worker."""
    backbone = tuple(name for block in unfilled.blocks[:-1] for name in block)
    return peak_memory(
        unfilled.schedule,
        unfilled.timeline,
        unfilled.blocks,
        profile=setting.profile,
        ledger=setting.ledger,
        checkpointed=checkpointed_layers(setting.workload, backbone),
        mesh=unfilled.mesh,
    )


def _memories(setting: Setting, mesh: Mesh) -> list[Bytes]:
    """The memory of each worker's smallest device over all data-parallel groups, in bytes, by worker."""
    groups, devices = range(mesh.data_parallel), setting.cluster.devices
    return [min(devices[mesh.rank(group, worker)].memory for group in groups) for worker in range(mesh.pipeline)]


def _held_in_waits(unfilled: Unfilled) -> list[Bytes]:
    """The most bytes of activations that each worker holds while it waits, by worker; 0 if it never waits."""
    found = []
    for worker, moving in enumerate(moving_through(unfilled.schedule, unfilled.timeline, {})):
        spans = sorted((s.start, s.end) for s in unfilled.timeline.spans if s.worker == worker)
        waits = ((end, start) for (_, end), (start, _) in pairwise(spans) if end < start)
        found.append(max((moving.most(*wait) for wait in waits), default=0))
    return found
