"""The memory that the ranks of a schedule hold, counted item by item.

A rank's stages hold layers: their parameters count with all that belongs to each [1], shared ones once. Activations and
message buffers are followed through time (`timing.held`, `timing.buffers`), and count as at the moment when their sum
is largest [2]. The hungriest trained layer counts with what it needs while it runs, as if that were at this moment;
frozen layers count beside the activations and messages of their own moment [3]. Rows of raw inputs and of the frozen
part's outputs are held for the whole iteration, and twice where the next batch is encoded meanwhile [4].
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from diffusionpipe.costs import ModelGraph, Profile
from diffusionpipe.holding import Ledger, Workload
from diffusionpipe.holding.memory import MemoryUse, copies_of, use_of, workspace_of
from diffusionpipe.holding.sharding import owners_on_workers
from diffusionpipe.ir import Action, Mesh, Op, Range, Schedule, Sharded, Timeline
from diffusionpipe.ir.ranges import merged
from diffusionpipe.timing.buffers import Moving, moving_through
from diffusionpipe.timing.encoding import held_by_fills
from diffusionpipe.units import Bytes, Seconds

_Times = Mapping[Action, tuple[Seconds, Seconds]]
"""ENCODE action -> (start, end) of its fill, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """The schedule and model that are counted; `blocks`: the layers of each block, the frozen part's last."""

    schedule: Schedule
    blocks: Sequence[Sequence[str]]
    profile: Profile
    ledger: Ledger
    again: frozenset[str]
    """The names of the layers that are recomputed in the backward."""
    mesh: Mesh

    @property
    def workload(self) -> Workload:
        """The settings of training that cost memory or time beside the model."""
        return self.ledger.workload

    @property
    def graph(self) -> ModelGraph:
        """The graph of the model in the case's profile."""
        return self.profile.graph

    def trained(self, worker: int) -> Iterator[tuple[int, Sequence[str]]]:
        """(stage, names of its layers) of each trained stage of a worker."""
        placement = self.schedule.placement
        for index, stage in enumerate(placement.stages):
            if stage.worker == worker and not placement.is_frozen(index):
                yield index, self.blocks[stage.weights]

    def encoded(self, worker: int) -> Iterator[tuple[int, Sequence[str], int]]:
        """(encoder stage, names of the layers, number of samples) of each fill of a worker."""
        stages = self.schedule.placement.stages
        for fill in self.schedule.fills:
            stage = stages[fill.stage]
            if stage.worker == worker:
                layers = self.blocks[stage.weights][fill.layers.start : fill.layers.stop]
                yield fill.stage, layers, len(fill.samples)


def peak_memory(
    schedule: Schedule,
    timeline: Timeline,
    blocks: Sequence[Sequence[str]],
    *,
    profile: Profile,
    ledger: Ledger,
    checkpointed: Iterable[str] = (),
    mesh: Mesh | None = None,
) -> tuple[MemoryUse, ...]:
    """The memory of each worker at its peak, item by item, by worker.

    Activations come from the timeline, whose costs must count them. Where messages are explicit their buffers are
    followed through time; else two of the largest per worker are counted, which is what `communicate` allows for.

    Args:
        schedule: the schedule that is counted.
        timeline: its simulated times.
        blocks: the layers of each block, the frozen part's last.
        profile: the costs of the layers.
        ledger: the bytes of parameters, under the workload of the training.
        checkpointed: the layers that are recomputed in the backward.
        mesh: the plan's; where its groups hold something in parts, the fullest one counts. None: one group.
    """
    case = _Case(
        schedule=schedule,
        blocks=blocks,
        profile=profile,
        ledger=ledger,
        again=frozenset(checkpointed),
        mesh=mesh or Mesh(pipeline=schedule.num_workers),
    )
    sizes = {tensor.name: tensor.num_bytes for tensor in profile.graph.tensors}
    moving = moving_through(schedule, timeline, sizes, _handed(case))
    times = {span.action: (span.start, span.end) for span in timeline.spans if span.action.op is Op.ENCODE}
    return tuple(_use(case, worker, moved, times) for worker, moved in enumerate(moving))


def _handed(case: _Case) -> dict[int, frozenset[str]]:
    """Stage -> names of the tensors that its recomputed layers write and only layers of other workers read."""
    graph, workers = case.graph, range(case.schedule.num_workers)
    read = [
        {name for _, layers in case.trained(worker) for layer in layers for name in graph.layer(layer).reads}
        for worker in workers
    ]
    return {
        stage: frozenset(
            name for layer in case.again.intersection(layers) for name in graph.layer(layer).writes
        ).difference(read[worker])
        for worker in workers
        for stage, layers in case.trained(worker)
    }


def _use(case: _Case, worker: int, moving: Moving, times: _Times) -> MemoryUse:
    graph, workload, ledger = case.graph, case.workload, case.ledger
    trained = {name for _, layers in case.trained(worker) for name in layers}
    encoded = {name for _, layers, _ in case.encoded(worker) for name in layers}
    # Without the bytes of frozen layers that are on their way to the device while fills run.
    kept, staged = ledger.resting_parts(case.blocks[-1])
    names = graph.parameters_of(trained | encoded.intersection(kept))
    staged = staged if encoded else 0
    activations, messages = moving.peak
    # The fullest moment while fills run may be another than the peak of activations. The bytes beyond that peak count
    # as workspace, so the items add up to the larger of both.
    workspace = max(_workspace(case, worker), _encoding(case, worker, moving, times) - activations - messages)
    frozen_outputs = _frozen_outputs(case, worker)

    def use(
        names: Collection[str], *, others: Collection[str] = (), copies: Bytes = 0, gathered: Bytes = 0
    ) -> MemoryUse:
        return use_of(  # [1]
            ledger.held(names).plus(ledger.unowned(others)),
            gathered=gathered,
            frozen=ledger.frozen_bytes(names) + staged,
            copies=copies,
            activations=activations,  # [2]
            messages=messages,
            workspace=workspace,
            frozen_outputs=frozen_outputs,
        )

    copies = sum(copies_of(name, case.profile, workload, case.again) for name in trained)
    if case.mesh.sharded is Sharded.NONE:
        return use(names, copies=copies)
    owners = owners_on_workers(case.schedule, case.blocks, graph, case.mesh).get(worker, {})
    # Parameters that several workers hold, such as tied ones, have no owner: each copy holds them whole.
    shared = names - owners.keys()
    own: list[set[str]] = [set(shared) for _ in range(case.mesh.parts)]
    for name in names & owners.keys():
        own[owners[name]].add(name)
    if case.mesh.sharded is Sharded.OPTIMIZER:
        # Weights are whole on every copy, so the others' count without their states. The fullest copy decides.
        return max((use(held, others=names - held, copies=copies) for held in own), key=lambda part: part.total)
    parts = (use(held, gathered=more) for held, more in zip(own, _gathered(case, worker, owners), strict=True))
    return max(parts, key=lambda part: part.total)


def _gathered(case: _Case, worker: int, owners: Mapping[str, int]) -> list[Bytes]:
    """The most bytes of gathered weights and of others' gradients that a worker holds at a time, by part.

    Gathered weights are the ones that other parts own, and narrow copies of its own. Gradients count until the
    gradients of the next block are on their way too. `owners`: name of a parameter -> the part that owns it.
    """
    sizes = [_gathered_sizes(case, layers, owners) for layers in case.blocks]
    held = [0] * case.mesh.parts
    for state in _gathered_blocks(case.schedule, worker):
        for part in range(case.mesh.parts):
            held[part] = max(held[part], sum(sizes[block][is_gradient][part] for block, is_gradient in state))
    return held


def _gathered_sizes(
    case: _Case, layers: Sequence[str], owners: Mapping[str, int]
) -> tuple[Sequence[Bytes], Sequence[Bytes]]:
    """(bytes of a block's gathered weights, bytes of its gradients that other parts own), each by part.

    `layers`: the names of the block's layers. `owners`: name of a parameter -> the part that owns it.
    """
    names, ledger = case.graph.parameters_of(layers), case.ledger
    all_weights = all_gradients = 0
    own_weights, own_gradients = [0] * case.mesh.parts, [0] * case.mesh.parts
    for parameter in case.graph.parameters:
        if parameter.name not in names:
            continue
        part = owners.get(parameter.name)
        travels = ledger.gathered(parameter, case.profile.precision)
        # Narrower on its way than at rest: then a rank holds a narrow copy even of the parameters that it owns.
        is_copied = travels < ledger.stored(parameter)
        all_weights += travels if is_copied or part is not None else 0
        if part is None:
            continue
        own_weights[part] += 0 if is_copied else travels
        gradient = ledger.trained[parameter.name].gradients if parameter.is_trainable else 0
        all_gradients += gradient
        own_gradients[part] += gradient
    return [all_weights - own for own in own_weights], [all_gradients - own for own in own_gradients]


def _gathered_blocks(schedule: Schedule, worker: int) -> Iterable[tuple[tuple[int, bool], ...]]:
    """Every different set of blocks of which a worker holds other ranks' parts at the same time.

    A block is (its id, True for gradients or False for weights).
    """
    whole: set[int] = set()
    pending: set[int] = set()
    sent: set[int] = set()
    states = dict[tuple[tuple[int, bool], ...], None]()
    for action in schedule.orders[worker]:
        block = schedule.placement.stages[action.stage].weights
        match action.op:
            case Op.UNSHARD:
                whole.add(block)
            case Op.RESHARD:
                whole.discard(block)
            case Op.REDUCE_GRAD:
                # The block before stops being sent now.
                pending, sent = pending - {block}, {block}
            case Op.B | Op.I | Op.W:
                pending.add(block)
        states[(*((b, False) for b in whole), *((b, True) for b in (*pending, *sent)))] = None
    return states


def _workspace(case: _Case, worker: int) -> Bytes:
    """The most bytes of temporary memory that one trained layer of the worker needs while it runs [3]."""
    placement, profile = case.schedule.placement, case.profile
    needs = [0]
    for index, layers in case.trained(worker):
        # The largest micro-batch: a layer's needs grow with its samples.
        samples = len(placement.stages[index].share.samples(max(placement.pipeline_of(index).microbatches)))
        needs += [workspace_of(name, samples, profile, case.workload, case.again) for name in layers]
    return max(needs)


def _encoding(case: _Case, worker: int, moving: Moving, times: _Times) -> Bytes:
    """The most bytes of activations, messages and frozen layers that a worker holds while fills run and between [3].

    `moving`: the worker's activations and messages. `times`: of its fills.
    """
    stages, schedule, most = case.schedule.placement.stages, case.schedule, 0
    fills: dict[int, list[Action]] = defaultdict(list)
    for action in schedule.orders[worker]:
        if action.op is Op.ENCODE:
            fills[action.stage].append(action)
    workspace = _workspace(case, worker)
    for stage, actions in fills.items():
        own = [schedule.fills[action.slot] for action in actions if action.slot is not None]
        held = held_by_fills(case.profile, case.blocks[stages[stage].weights], own)
        spans = [times[action] for action in actions]
        # Trained stages read the outputs of the last fill, which count as frozen outputs.
        following = [start for start, _ in spans[1:]] + [spans[-1][1]]
        for (running, left), (start, end), following_start in zip(held, spans, following, strict=True):
            most = max(most, moving.most(start, end) + running)
            if left:
                # A trained layer may run between the two fills.
                most = max(most, moving.most(end, following_start) + left + workspace)
    return most


def _frozen_outputs(case: _Case, worker: int) -> Bytes:
    """The bytes of the rows of frozen outputs and raw inputs that a worker holds.

    They are the frozen outputs that its stages read and, for the samples that it encodes, all raw inputs and outputs.
    """
    placement, graph, blocks = case.schedule.placement, case.graph, case.blocks
    rows: dict[str, list[Range]] = defaultdict(list)
    encoded = {
        name
        for index, stage in enumerate(placement.stages)
        if not placement.is_frozen(index)
        for name in graph.frozen_outputs(blocks[stage.weights])
    } | {*graph.inputs}
    for index, stage in enumerate(placement.stages):
        if stage.worker != worker:
            continue
        pipeline = placement.pipeline_of(index)
        own = [placement.rows(index, microbatch) for microbatch in pipeline.numbers]
        names = encoded if placement.is_frozen(index) else graph.frozen_outputs(blocks[stage.weights])
        for name in names:
            rows[name] += own
    held = sum(graph.tensor(name).num_bytes * sum(map(len, merged(parts))) for name, parts in rows.items())
    return held * (2 if any(p.is_ahead for p in placement.pipelines) else 1)  # [4]
