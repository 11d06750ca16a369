"""Prices every action of a schedule by a profile, the blocks, the micro-batches and the devices."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import prod

from diffusionpipe.costs import Cluster, Costs, HostTimes, Link, ModelGraph, ParameterSpec, Profile, StageCosts
from diffusionpipe.errors import ConfigError
from diffusionpipe.holding.groups import holders
from diffusionpipe.holding.sharding import owners_on_workers
from diffusionpipe.ir import Edge, Mesh, Op, Schedule, Sharded
from diffusionpipe.ir.action import COMPUTE_OPS
from diffusionpipe.planner.pricing.collectives import all_reduce, rooted
from diffusionpipe.planner.pricing.copied import CopiedProfile, times_with_copies
from diffusionpipe.planner.pricing.layer_table import Load, trained_reads
from diffusionpipe.planner.pricing.meetings import exchanges_of, occupancy
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.timing.prices import price_of
from diffusionpipe.timing.work import Compute
from diffusionpipe.units import Bytes, Seconds

FREE = StageCosts(forward=0, backward=0, input_grad=0, weight_grad=0, activation=0, kept_after_input_grad=0)
"""The costs of an encoder stage besides its fills: nothing."""


def costs_of(schedule: Schedule, blocks: Sequence[Sequence[str]], mesh: Mesh, setting: Setting) -> Costs:
    """The costs of all actions of a schedule whose stage s holds the layers `blocks[stage.weights]`.

    Data-parallel groups run in step, so everywhere the slowest of them counts: a worker has the speed of the slowest
    device at its place in any group, a link is the slowest between its two places. All micro-batches of a pipeline cost
    what its largest costs, and each an equal part of casting the stage's weights, which is done once; of sharded ones
    each rank casts its own part as a part of gathering them. The time that a message takes from the compute of its ends
    (`Link.occupancy`) is added to the forwards and backwards there. A reduction sums a block's trained gradients over
    every rank that holds it.

    Raises:
        ConfigError: the cluster has fewer devices than the mesh.
    """
    if mesh.num_ranks > setting.cluster.num_ranks:
        raise ConfigError(
            f"the layout is for {mesh.num_ranks} ranks, cluster {setting.cluster.name} has "
            f"{setting.cluster.num_ranks}; plan for this cluster"
        )
    placement, graph = schedule.placement, setting.graph
    speeds, links = worker_speeds(setting.cluster, mesh), _links(schedule.num_workers, mesh, setting.cluster)

    def loads(edge: Edge) -> tuple[Load, Load]:
        ahead, back = (sum(graph.tensor(n).num_bytes for n in names) for names in (edge.tensors, edge.gradients))
        return (ahead, len(edge.tensors)), (back, len(edge.gradients))

    meetings = exchanges_of(placement)
    occupied = occupancy(len(placement.stages), meetings, lambda pair: links.get(pair, setting.cluster.intra), loads)
    stages = []
    for index, stage in enumerate(placement.stages):
        if placement.is_frozen(index):
            stages.append(FREE)
            continue
        stages.append(
            block_costs(
                setting,
                blocks[stage.weights],
                len(stage.share.samples(max(placement.pipeline_of(index).microbatches))),
                # Where everything is in parts, casts are a part of gathering (see `gathers`).
                microbatches=placement.num_forwards(index) if mesh.sharded is not Sharded.ALL else None,
                speed=speeds[stage.worker],
                received=_received(schedule, index, setting.graph),
                is_probe=placement.pipeline_of(index).is_probe,
                occupied=occupied[index],
            )
        )
    names = _filled_layers(schedule, blocks)
    costs = Costs(
        stages=tuple(stages),
        host_fills=tuple(sum(setting.profile.layer(name).host.forward for name in own) for own in names),
        reduces=reductions(schedule, blocks, mesh, setting),
        unshards=gathers(schedule, blocks, mesh, setting),
        waking=setting.profile.waking,
        tensor_bytes={
            tensor.name: round(setting.profile.crossing * tensor.num_bytes) for tensor in setting.graph.tensors
        },
        link=setting.cluster.intra,
        links=links,
    )

    def seconds(slot: int) -> Seconds:
        return frozen_time(setting.profile, names[slot], len(schedule.fills[slot].samples))

    return replace(costs, fills=fill_times(schedule, names, speeds, costs, setting.profile, seconds))


def fill_times(
    schedule: Schedule,
    names: Sequence[Sequence[str]],
    speeds: Sequence[float],
    costs: Costs,
    profile: Profile,
    seconds: Callable[[int], Seconds],
) -> tuple[Seconds, ...]:
    """The seconds of each fill on its worker's device, by fill, with waits for weights that come from the host.

    `names` are the layers of each fill, `speeds` the workers' speeds, `costs` the prices of computes. `seconds` gives
    the time of a fill on a device of speed 1 whose weights are there.
    """
    if not isinstance(profile, CopiedProfile):
        stages = schedule.placement.stages
        return tuple(seconds(slot) / speeds[stages[fill.stage].worker] for slot, fill in enumerate(schedule.fills))
    found = [0.0] * len(schedule.fills)
    for order, speed in zip(schedule.orders, speeds, strict=True):
        steps: list[Seconds | list[tuple[str, Seconds]]] = []
        slots = []
        for action in order:
            if action.op is Op.ENCODE and action.slot is not None:
                samples = len(schedule.fills[action.slot].samples)
                steps.append([(name, profile.computing(name, samples) / speed) for name in names[action.slot]])
                slots.append(action.slot)
            elif action.op in COMPUTE_OPS:
                steps.append(price_of(Compute(action.stage, action.op), costs))
        for slot, taken in zip(slots, times_with_copies(steps, profile.arriving), strict=True):
            found[slot] = taken
    return tuple(found)


def _filled_layers(schedule: Schedule, blocks: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """The names of the layers that each fill runs, by fill."""
    stages = schedule.placement.stages
    return [blocks[stages[fill.stage].weights][fill.layers.start : fill.layers.stop] for fill in schedule.fills]


def block_costs(
    setting: Setting,
    layers: Sequence[str],
    samples: float,
    *,
    microbatches: float | None = None,
    speed: float = 1.0,
    received: Collection[str] | None = None,
    is_probe: bool = False,
    occupied: tuple[Seconds, Seconds] = (0.0, 0.0),
) -> StageCosts:
    """The costs of a stage with these layers, for one of `microbatches` micro-batches of `samples` samples.

    Weights are cast once for all micro-batches: a stage does so while it waits for the first of them, and each forward
    counts its part. Recomputed layers cast in every forward. Without a number of micro-batches casts are left out, as
    where copies are gathered. A recomputed layer runs its forward again before its input gradient and keeps only what
    it reads. `received` are the tensors that arrive from other workers, whose buffers are held until the backward;
    None: all that other trained layers write. Tensors of the frozen part are held anyway, and `timing.memory`
    counts them.
    `occupied`: the time that messages take from the forward and from the backward. `is_probe`: the forward keeps
    nothing for a backward.
    """
    table = setting.table
    again = table.checkpointed.intersection(layers)
    span = table.range_of(layers)
    times = table.sums(samples, microbatches).times(*span, is_probe=is_probe)
    outside = trained_reads(setting.graph, layers) if received is None else frozenset(received)
    held = _activation(setting, layers, samples, again=again, received=outside), table.kept(*span, samples)
    return stage_costs(times, speed, occupied, table.host(*span), held=held)


def stage_costs(
    times: tuple[Seconds, Seconds, Seconds],
    speed: float,
    occupied: tuple[Seconds, Seconds],
    host: HostTimes,
    *,
    held: tuple[Bytes, Bytes] = (0, 0),
) -> StageCosts:
    """The costs of a stage whose layers take these (forward, input gradient, weight gradient) seconds at speed 1.

    `occupied`: the time that messages take from its forward and its backward; `host`: its host's time, at any speed.
    `held`: its activation, and the bytes kept after the input gradient.
    """
    forward, input_grad, weight_grad = times
    return StageCosts(
        forward=forward / speed + occupied[0],
        backward=(input_grad + weight_grad) / speed + occupied[1],
        # Messages go with the gradient of the inputs; the weights' own gradient is not sent.
        input_grad=input_grad / speed + occupied[1],
        weight_grad=weight_grad / speed,
        activation=held[0],
        kept_after_input_grad=held[1],
        host=host,
    )


def frozen_time(profile: Profile, layers: Collection[str], samples: float) -> Seconds:
    """The seconds of the forward of these layers for `samples` samples on the profile's device."""
    return sum(profile.forward(name, samples) for name in layers)


def update_time(schedule: Schedule, blocks: Sequence[Sequence[str]], profile: Profile, mesh: Mesh) -> Seconds:
    """The seconds of the update of the worker that has most to update, on devices like the profiled one.

    If each parameter has an owner, a worker updates about an equal part of its parameters in each group.
    """
    placement = schedule.placement
    held: dict[int, set[str]] = {}
    for index, stage in enumerate(placement.stages):
        if not placement.is_frozen(index):
            held.setdefault(stage.worker, set()).update(blocks[stage.weights])
    most = max((trained_parameters(profile.graph, layers) for layers in held.values()), default=0)
    return time_to_update(most / mesh.parts, profile, mesh.num_ranks)


def time_to_update(num_parameters: float, profile: Profile, num_ranks: int) -> Seconds:
    """The seconds in which ranks agree and one of them updates `num_parameters`; 0 if the profile has no update."""
    if not profile.update:
        return 0.0
    # The agreement is a sum of a few bytes, so its latency alone counts.
    agreement = profile.reduce.latency if profile.reduce is not None and num_ranks > 1 else 0.0
    return agreement + profile.update * num_parameters


def trained_parameters(graph: ModelGraph, layers: Collection[str]) -> int:
    """The number of trained numbers in the parameters of these layers; a tied parameter counts once."""
    return sum(prod(p.shape) for p in _parameters(graph, layers) if p.is_trainable)


def frozen_parameters(graph: ModelGraph, layers: Collection[str]) -> int:
    """The number of frozen numbers in the parameters of these layers; a tied parameter counts once."""
    return sum(prod(p.shape) for p in _parameters(graph, layers) if not p.is_trainable)


def _parameters(graph: ModelGraph, layers: Collection[str]) -> list[ParameterSpec]:
    names = graph.parameters_of(layers)
    return [p for p in graph.parameters if p.name in names]


def _activation(
    setting: Setting, layers: Sequence[str], samples: float, *, again: frozenset[str], received: Collection[str]
) -> Bytes:
    """The bytes that a stage keeps from the forward to the backward of one micro-batch.

    A layer's own bytes include its outputs. Outputs of a recomputed layer are held if any layer reads them, as input of
    the next one or until they are sent. `again`: the recomputed layers. `received`: tensors from other workers.
    """
    profile, graph, wanted = setting.profile, setting.graph, set(layers)
    kept, held = 0, set[str]()
    for layer in graph.layers:
        if layer.name not in wanted:
            continue
        held.update(name for name in layer.reads if name in received)
        if layer.name in again:
            held.update(graph.read_tensors.intersection(layer.writes))
        else:
            kept += profile.activation(layer.name, samples)
    return kept + round(samples * sum(graph.tensor(name).num_bytes for name in held))


def worker_speeds(cluster: Cluster, mesh: Mesh) -> tuple[float, ...]:
    """The speed of each worker's slowest device in any data-parallel group, by worker; 1 is the profiled device."""
    groups = range(mesh.data_parallel)
    return tuple(
        min(cluster.devices[mesh.rank(group, worker)].speed for group in groups) for worker in range(mesh.pipeline)
    )


def _links(num_workers: int, mesh: Mesh, cluster: Cluster) -> dict[tuple[int, int], Link]:
    """(source, destination) -> the slowest link between two workers in any group; links within a node are left out."""
    links = {
        (source, destination): cluster.slowest_link(
            (mesh.rank(group, source), mesh.rank(group, destination)) for group in range(mesh.data_parallel)
        )
        for source in range(num_workers)
        for destination in range(num_workers)
        if source != destination
    }
    return {pair: link for pair, link in links.items() if link != cluster.intra}


def _received(schedule: Schedule, stage: int, graph: ModelGraph) -> set[str]:
    """The names of the tensors that a stage reads from trained stages of other workers."""
    placement = schedule.placement
    return {
        name
        for edge in placement.pipeline_of(stage).edges
        if edge.consumer == stage and placement.stages[edge.producer].worker != placement.stages[stage].worker
        for name in edge.tensors
    } - graph.frozen_tensors


def reductions(
    schedule: Schedule, blocks: Sequence[Sequence[str]], mesh: Mesh, setting: Setting
) -> tuple[Seconds, ...]:
    """The seconds of summing each stage's gradients over all ranks with its block, or at their owners, by stage."""
    placement, ledger = schedule.placement, setting.ledger
    if mesh.sharded is not Sharded.NONE:
        gradients = dict.fromkeys(ledger.frozen, 0)  # frozen parameters have no gradients to sum
        gradients |= {name: held.gradients for name, held in ledger.trained.items()}
        return _at_owners(schedule, blocks, mesh, setting, gradients)
    seconds = {}
    for weights, ranks in holders(placement, mesh).items():
        num_bytes = ledger.held(ledger.graph.parameters_of(blocks[weights])).gradients
        seconds[weights] = all_reduce(setting.cluster, num_bytes, ranks)
    return tuple(seconds.get(stage.weights, 0.0) for stage in placement.stages)


def gathers(schedule: Schedule, blocks: Sequence[Sequence[str]], mesh: Mesh, setting: Setting) -> tuple[Seconds, ...]:
    """The seconds in which each stage's block comes from its owners, with casts; () if nothing is in parts."""
    if mesh.sharded is Sharded.NONE:
        return ()
    if mesh.sharded is Sharded.OPTIMIZER:
        trained = {name: held.parameters for name, held in setting.ledger.trained.items()}
        return _at_owners(schedule, blocks, mesh, setting, trained)
    precision = setting.profile.precision
    sizes = {p.name: setting.ledger.gathered(p, precision) for p in setting.graph.parameters}
    seconds = _at_owners(schedule, blocks, mesh, setting, sizes)
    speeds = worker_speeds(setting.cluster, mesh)
    casts = [
        sum(setting.workload.cast_time(setting.profile.layer(name)) for name in blocks[stage.weights])
        / speeds[stage.worker]
        for stage in schedule.placement.stages
    ]
    # Each rank casts its own part.
    return tuple(gather + cast / mesh.shard for gather, cast in zip(seconds, casts, strict=True))


def _at_owners(
    schedule: Schedule, blocks: Sequence[Sequence[str]], mesh: Mesh, setting: Setting, sizes: Mapping[str, Bytes]
) -> tuple[Seconds, ...]:
    """The seconds in which each stage's block is sent from or to its owners, one owner after the other, by stage.

    `sizes`: parameter -> its bytes that are sent.
    """
    placement, graph = schedule.placement, setting.graph
    owners = owners_on_workers(schedule, blocks, graph, mesh)
    seconds = []
    for index, stage in enumerate(placement.stages):
        ranks = [mesh.rank(group, stage.worker) for group in range(mesh.data_parallel)]
        held = [0] * mesh.parts
        for name in () if placement.is_frozen(index) else graph.parameters_of(blocks[stage.weights]):
            if name in owners[stage.worker]:
                held[owners[stage.worker][name]] += sizes[name]
        seconds.append(rooted(setting.cluster, held, ranks))
    return tuple(seconds)
