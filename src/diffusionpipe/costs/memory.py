"""What a rank holds in memory while it runs a schedule, item by item."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod

from diffusionpipe.costs.graph import ModelGraph
from diffusionpipe.costs.profile import Profile
from diffusionpipe.costs.sharding import gathered_bytes, owners_on_workers, stored_bytes
from diffusionpipe.costs.workload import Workload
from diffusionpipe.ir import Action, Op, Range, Schedule, Span, Timeline
from diffusionpipe.ir.flows import TIMED_OPS
from diffusionpipe.ir.ranges import merged
from diffusionpipe.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of one rank at its peak."""

    parameters: Bytes = 0
    """Trained parameters as the layers read them."""
    gradients: Bytes = 0
    optimizer: Bytes = 0
    """Optimizer state and float32 master weights."""
    ema: Bytes = 0
    backup: Bytes = 0
    """What a post-validated step keeps to be taken back."""
    gathered: Bytes = 0
    """What is there of sharded blocks beside the rank's own part: parameters and narrow copies while they are whole,
    gradients until they are sent."""
    frozen: Bytes = 0
    """Frozen parameters: encoders, whole or the two layers of them that are there at a time, and frozen layers inside
    the trained part."""
    copies: Bytes = 0
    """Weights of trained layers that are not recomputed, once more, as they are read while an iteration runs."""
    activations: Bytes = 0
    """Kept from the forwards for the backwards."""
    messages: Bytes = 0
    """Received and not yet read, and gradients not yet sent, at the moment when these and the activations peak."""
    workspace: Bytes = 0
    """Beyond all that while the hungriest layer runs, a recomputed layer's activations included."""
    frozen_outputs: Bytes = 0
    """Outputs of the frozen layers that wait to be read: of this batch, and of the next one if it is encoded ahead."""

    @property
    def total(self) -> Bytes:
        """All items."""
        return sum(self.items().values())

    def items(self) -> dict[str, Bytes]:
        """The items by name, in order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


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
    moving = _moving(schedule, timeline, profile)
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


def _moving(schedule: Schedule, timeline: Timeline, profile: Profile) -> list[tuple[Bytes, Bytes]]:
    """For each worker activations and message buffers at the moment when their sum is largest."""
    sizes = {tensor.name: tensor.num_bytes for tensor in profile.graph.tensors}
    if not schedule.has_communication:
        two = _two_messages(schedule, sizes)
        return [(timeline.peak_memory(worker), two[worker]) for worker in range(schedule.num_workers)]
    changes: list[dict[Seconds, list[int]]] = [defaultdict(lambda: [0, 0]) for _ in range(schedule.num_workers)]
    held = [0] * schedule.num_workers
    for sample in sorted(timeline.memory, key=lambda sample: sample.time):
        changes[sample.worker][sample.time][0] += sample.held - held[sample.worker]
        held[sample.worker] = sample.held
    for worker, start, end, num_bytes in _buffers(schedule, timeline, sizes):
        changes[worker][start][1] += num_bytes
        changes[worker][end][1] -= num_bytes
    peaks = []
    for change in changes:
        activations = messages = 0
        peak = (0, 0)
        for time in sorted(change):
            activations += change[time][0]
            messages += change[time][1]
            peak = max(peak, (activations, messages), key=sum)
        peaks.append(peak)
    return peaks


def _two_messages(schedule: Schedule, sizes: Mapping[str, Bytes]) -> list[Bytes]:
    placement = schedule.placement
    forward: dict[int, Bytes] = defaultdict(int)
    backward: dict[int, Bytes] = defaultdict(int)
    for pipeline in placement.pipelines:
        for edge in pipeline.edges:
            source, destination = placement.stages[edge.producer], placement.stages[edge.consumer]
            if source.worker == destination.worker or placement.is_frozen(edge.producer):
                continue
            size = max(pipeline.microbatches)
            samples = len(source.share.samples(size).intersection(destination.share.samples(size)))
            forward[destination.worker] += samples * sum(sizes.get(name, 0) for name in edge.tensors)
            backward[source.worker] += samples * sum(sizes.get(name, 0) for name in edge.gradients)
    return [2 * max(forward[worker], backward[worker]) for worker in range(schedule.num_workers)]


def _buffers(
    schedule: Schedule, timeline: Timeline, sizes: Mapping[str, Bytes]
) -> Iterator[tuple[int, Seconds, Seconds, Bytes]]:
    """(worker, from, to, bytes) of received tensors until their reader starts, and of gradients until they are dropped.

    A buffer is taken when its receive is posted. An activation counts among the activations, at its sender and from its
    reader's start on; a frozen output among the frozen outputs.
    """
    placement = schedule.placement
    spans: dict[Action, Span] = {span.action: span for span in timeline.spans}
    readers, makespan = _readers(schedule), timeline.makespan
    dropped, posted = _dropped(schedule, readers), _posted(schedule, spans)
    for slot, reader in readers.items():
        message = schedule.messages[slot]
        num_bytes = len(message.samples) * sum(sizes.get(name, 0) for name in message.tensors)
        yield spans[reader].worker, posted[slot], spans[reader].start, num_bytes
        if message.is_gradient:
            producer = spans[Action(stage=message.source, op=reader.op, microbatch=message.microbatch)]
            end = spans[dropped[slot]].start if slot in dropped else makespan
            yield placement.stages[message.source].worker, producer.end, max(end, producer.end), num_bytes


def _readers(schedule: Schedule) -> dict[int, Action]:
    """The action that waits for each message between trained stages."""
    placement = schedule.placement
    readers = {}
    for slot, message in enumerate(schedule.messages):
        if placement.is_frozen(message.source):
            continue
        backward = Op.B if Op.B in placement.pipeline_of(message.source).ops else Op.I
        op = backward if message.is_gradient else Op.F
        readers[slot] = Action(stage=message.destination, op=op, microbatch=message.microbatch)
    return readers


def _posted(schedule: Schedule, spans: Mapping[Action, Span]) -> dict[int, Seconds]:
    """When each receive is posted: as soon as all that stands before it in the order has been started and computed."""
    posted = {}
    for order in schedule.orders:
        reached: Seconds = 0.0
        for action in order:
            if action.op in (Op.RECV_F, Op.RECV_B) and action.slot is not None:
                posted[action.slot] = reached
            elif action.op in TIMED_OPS:
                reached = spans[action].end
    return posted


def _dropped(schedule: Schedule, readers: Mapping[int, Action]) -> dict[int, Action]:
    """The action at whose start the sender of a message drops it; without one it does so after the iteration.

    A send is known to be over as soon as something has arrived that the receiver sent after it had waited for it.
    """
    stages = schedule.placement.stages
    waited: dict[Action, list[int]] = defaultdict(list)
    for slot, reader in readers.items():
        waited[reader].append(slot)
    dropped = {}
    for order in schedule.orders:
        over: dict[int, list[int]] = defaultdict(list)
        for action in order:
            for slot in waited.get(action, ()):
                over[stages[schedule.messages[slot].source].worker].append(slot)
            sent = action.slot if action.op in (Op.SEND_F, Op.SEND_B) else None
            if sent is not None and sent in readers:
                sender = stages[schedule.messages[sent].destination].worker
                dropped.update(dict.fromkeys(over.pop(sender, ()), readers[sent]))
    return dropped
