"""What a rank holds in memory while it runs a schedule, item by item."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from math import prod

from diffusionpipe.costs import ModelGraph, Profile, Workload
from diffusionpipe.costs.memory import MemoryUse
from diffusionpipe.costs.sharding import gathered_bytes, owners_on_workers, stored_bytes
from diffusionpipe.ir import Op, Range, Schedule, Timeline
from diffusionpipe.ir.ranges import merged
from diffusionpipe.timing.buffers import moving_of
from diffusionpipe.units import Bytes


def peak_memory(
    schedule: Schedule,
    timeline: Timeline,
    blocks: Sequence[Sequence[str]],
    *,
    profile: Profile,
    workload: Workload,
    checkpointed: Iterable[str] = (),
    shard: int = 1,
) -> tuple[MemoryUse, ...]:
    """What each worker holds at its peak; `timeline` is the simulated one of this schedule.

    `shard`: over so many data-parallel groups the trained blocks are in parts; then the fullest of them counts.

    Activations come from the timeline, whose costs must count them. Where messages are explicit their buffers are
    followed through time; else two of the largest per worker are counted, which is what `communicate` allows for.
    An output of the frozen part is held for the whole iteration, twice where the schedule encodes ahead.
    """
    moving = moving_of(schedule, timeline, profile)
    again = frozenset(checkpointed)
    uses = []
    for worker in range(schedule.num_workers):
        static = _static(schedule, worker, blocks, profile=profile, workload=workload, again=again, shard=shard)
        activations, messages = moving[worker]
        uses.append(
            MemoryUse(
                **static,
                activations=activations,
                messages=messages,
                workspace=_workspace(schedule, worker, blocks, profile, workload, again),
                frozen_outputs=_frozen_outputs(schedule, worker, blocks, profile),
            )
        )
    return tuple(uses)


def _static(
    schedule: Schedule,
    worker: int,
    blocks: Sequence[Sequence[str]],
    *,
    profile: Profile,
    workload: Workload,
    again: frozenset[str],
    shard: int,
) -> dict[str, Bytes]:
    """Parameters and all that stands beside each; what two blocks of the worker share counts once."""
    placement, graph = schedule.placement, profile.graph
    encoded, trained = set[str](), set[str]()
    for index, stage in enumerate(placement.stages):
        if stage.worker == worker and placement.is_frozen(index):
            encoded |= _encoded_layers(schedule, index, blocks)
        elif stage.worker == worker:
            trained.update(blocks[stage.weights])
    if workload.offload_frozen:
        names = graph.parameters_of(trained)
        staged = offloaded_bytes(graph, blocks[-1], workload) if encoded else 0
    else:
        names, staged = graph.parameters_of(trained | encoded), 0
    if shard == 1:
        copies = sum(profile.copies(name, workload) for name in trained - again)
        return _bytes_of(names, staged, profile, workload) | {"copies": copies}
    owners = owners_on_workers(schedule, blocks, graph, shard).get(worker, {})
    found = []
    for part in range(shard):
        others = frozenset(name for name, owner in owners.items() if owner != part)
        gathered = _gathered(schedule, worker, blocks, others, profile=profile, workload=workload)
        found.append(_bytes_of(names - others, staged, profile, workload) | {"gathered": gathered})
    return max(found, key=lambda sizes: sum(sizes.values()))


def offloaded_bytes(graph: ModelGraph, layers: Collection[str], workload: Workload) -> Bytes:
    """Bytes on the device of layers whose parameters rest in host memory: the two largest ones."""
    size_of = {p.name: workload.frozen_size(p) for p in graph.parameters}
    sizes = sorted(sum(size_of[name] for name in graph.parameters_of([layer])) for layer in layers)
    return sum(sizes[-2:])


def _bytes_of(names: Collection[str], staged: Bytes, profile: Profile, workload: Workload) -> dict[str, Bytes]:
    held = [p for p in profile.graph.parameters if p.name in names]
    trained = sum(prod(p.shape) for p in held if p.is_trainable)
    return {
        "parameters": trained * workload.parameter_bytes,
        "gradients": trained * workload.gradient_bytes,
        "optimizer": trained * (workload.optimizer_bytes + workload.master_bytes),
        "ema": trained * workload.ema_bytes,
        "backup": trained * workload.backup_bytes,
        "frozen": sum(workload.frozen_size(p) for p in held if not p.is_trainable) + staged,
    }


def _gathered(
    schedule: Schedule,
    worker: int,
    blocks: Sequence[Sequence[str]],
    others: Collection[str],
    *,
    profile: Profile,
    workload: Workload,
) -> Bytes:
    """The most that a worker holds of what others own, and of narrow copies of its own.

    Gradients stay until the next block's are on their way too.
    """
    known = {p.name: p for p in profile.graph.parameters}
    travels = {name: gathered_bytes(p, workload, profile.precision) for name, p in known.items()}
    weights, gradients = [], []
    for layers in blocks:
        whole_block = [known[name] for name in profile.graph.parameters_of(layers)]
        foreign = [p for p in whole_block if p.name in others]
        copied = {p.name for p in whole_block if travels[p.name] < stored_bytes(p, workload)}
        weights.append(sum(travels[p.name] for p in whole_block if p.name in others or p.name in copied))
        gradients.append(sum(prod(p.shape) for p in foreign if p.is_trainable) * workload.gradient_bytes)
    whole: set[int] = set()
    pending: set[int] = set()
    sent: set[int] = set()
    peak = 0
    for action in schedule.orders[worker]:
        block = schedule.placement.stages[action.stage].weights
        match action.op:
            case Op.UNSHARD:
                whole.add(block)
            case Op.RESHARD:
                whole.discard(block)
            case Op.REDUCE_GRAD:
                pending, sent = pending - {block}, {block}
            case Op.B | Op.I | Op.W:
                pending.add(block)
        held = sum(weights[b] for b in whole) + sum(gradients[b] for b in pending) + sum(gradients[b] for b in sent)
        peak = max(peak, held)
    return peak


def _encoded_layers(schedule: Schedule, encoder: int, blocks: Sequence[Sequence[str]]) -> set[str]:
    block = blocks[schedule.placement.stages[encoder].weights]
    return {
        name for fill in schedule.fills if fill.stage == encoder for name in block[fill.layers.start : fill.layers.stop]
    }


def _workspace(
    schedule: Schedule,
    worker: int,
    blocks: Sequence[Sequence[str]],
    profile: Profile,
    workload: Workload,
    again: frozenset[str],
) -> Bytes:
    """The most that one layer needs while it runs; a frozen layer also needs what it reads and writes."""
    placement = schedule.placement
    needs = [0]
    for index, stage in enumerate(placement.stages):
        if stage.worker != worker or placement.is_frozen(index):
            continue
        samples = len(stage.share.samples(max(placement.pipeline_of(index).microbatches)))
        for name in blocks[stage.weights]:
            recomputed = profile.recomputed(name, samples, workload) if name in again else 0
            needs.append(recomputed + profile.workspace(name, samples))
    for fill in schedule.fills:
        stage = placement.stages[fill.stage]
        if stage.worker == worker:
            samples = len(fill.samples)
            names = blocks[stage.weights][fill.layers.start : fill.layers.stop]
            needs += [profile.activation(n, samples) + profile.workspace(n, samples) for n in names]
    return max(needs)


def _frozen_outputs(schedule: Schedule, worker: int, blocks: Sequence[Sequence[str]], profile: Profile) -> Bytes:
    """Every tensor that the worker's stages read from the frozen part, and what it encodes for others."""
    placement, graph = schedule.placement, profile.graph
    rows: dict[str, list[Range]] = defaultdict(list)
    is_ahead = any(p.is_ahead for p in placement.pipelines)
    read_by_any = {
        name
        for index, stage in enumerate(placement.stages)
        if not placement.is_frozen(index)
        for name in graph.frozen_outputs(blocks[stage.weights])
    }
    for index, stage in enumerate(placement.stages):
        if stage.worker != worker:
            continue
        pipeline = placement.pipeline_of(index)
        own = [placement.rows(index, microbatch) for microbatch in range(len(pipeline.microbatches))]
        names = read_by_any if placement.is_frozen(index) else graph.frozen_outputs(blocks[stage.weights])
        for name in names:
            rows[name] += own
    held = sum(graph.tensor(name).num_bytes * sum(map(len, merged(parts))) for name, parts in rows.items())
    return held * (2 if is_ahead else 1)
