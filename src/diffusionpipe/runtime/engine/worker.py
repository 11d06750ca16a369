"""One rank's part of a plan: its layers, its gradients and an executor for each schedule."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.costs import ModelGraph
from diffusionpipe.holding.storage import storage_of
from diffusionpipe.ir import Edge, Op, Plan, PlanPhase, Range, Schedule, sampling_phase
from diffusionpipe.ir.cells import Cutting
from diffusionpipe.ir.versions import predictions_held, versions_held
from diffusionpipe.models.graphs.graph import Layer, LayerGraph, layer_parameters
from diffusionpipe.models.graphs.run import needed_layers
from diffusionpipe.runtime.comm.places import MeshPlace, encoded_rows, holders_of, place_of, trained_blocks
from diffusionpipe.runtime.comm.transport import Transport
from diffusionpipe.runtime.compute.casts import Casts
from diffusionpipe.runtime.compute.frozen import Encoder, SizedEncoder
from diffusionpipe.runtime.compute.runs import GIVEN, KEYS, runs_of
from diffusionpipe.runtime.compute.stage import LayerStage, Precision
from diffusionpipe.runtime.compute.store import RowStore
from diffusionpipe.runtime.engine.equipment import Equipment
from diffusionpipe.runtime.engine.executor import Executor, cells_of
from diffusionpipe.runtime.engine.sharder import Sharder
from diffusionpipe.runtime.engine.windows import WindowExecutor
from diffusionpipe.runtime.machine.upload import Upload
from diffusionpipe.runtime.recording.layer_watch import LayerWatch
from diffusionpipe.runtime.weights.bringing import Brought, BroughtLayer
from diffusionpipe.runtime.weights.gradients import BlockGradients, Reducible
from diffusionpipe.runtime.weights.host_weights import host_weights_of
from diffusionpipe.runtime.weights.node_memory import NodeMemory
from diffusionpipe.runtime.weights.owned import Divided
from diffusionpipe.runtime.weights.versions import BlockVersions


@dataclass(kw_only=True)
class Worker:
    """One rank's part of a plan: its parameters, their gradients, and an executor for each phase. Mutable."""

    place: MeshPlace
    plan: Plan
    of_sizes: tuple[ModelGraph, ...]
    """The description of the model for each size of samples; plans are made for the first."""
    parameters: dict[str, nn.Parameter]
    """Trained parameters that this rank updates by canonical name, in the model's order: its blocks' parameters or,
    where updates are divided over data-parallel groups, its part of them."""
    owned: frozenset[str]
    """The names of the parameters that count on this rank when every parameter of the job is counted on one rank."""
    gradients: Mapping[int, Reducible]
    """Block id -> the gradients of its trained parameters."""
    executors: dict[str, Executor]
    """An executor for each phase of the plan; the prologue's and the training's share a store."""
    window: WindowExecutor | None
    """The executor that trains without a flush, in place of the prologue's and the training's; None: with a flush."""
    versions: Mapping[int, BlockVersions]
    """The versions of each block's weights in training without a flush, by block."""
    encoded: Range | None
    """The rows of the pipeline's batch that this rank encodes when it trains; None if it encodes none."""
    casts: Casts
    """Copies of its trained layers' weights; there are some only while an executor runs under autocast."""
    frozen_weights: Mapping[str, BroughtLayer]
    """The frozen layers' weights that are elsewhere while they do not run, by layer; for all executors."""
    resident: tuple[Brought, ...]
    """The weights of blocks that stay here between two steps, and come from their owners after each."""
    watch: LayerWatch
    """The watch that is called for each layer of its stages and fills; it is off at first."""
    upload: Upload
    """An object that copies raw inputs to the device."""
    cut: "CutExecutors | None" = None
    """The executors for steps of micro-batches of unequal tokens; None: all steps have the plan's micro-batches."""
    kept: tuple[str, ...] = ()
    """The names of the frozen layers' tensors that may be put in with a batch to train on."""
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    """Name of a raw input that may be fed as uint8 -> the values of its 256 levels, on the device."""

    @property
    def model(self) -> ModelGraph:
        """The description of the model for the size of samples that plans are made for."""
        return self.of_sizes[0]

    @property
    def train(self) -> Executor:
        """The executor of training with a flush; it also encodes the next step's batch if the plan works ahead."""
        return self.executors[PlanPhase.TRAIN]

    @property
    def training(self) -> Executor | WindowExecutor:
        """The executor that trains: `window` in training without a flush, else `train`."""
        return self.window or self.train

    @property
    def prologue(self) -> Executor | None:
        """The executor that encodes the first batch if `train` encodes ahead; None if there is none."""
        return self.executors.get(PlanPhase.PROLOGUE)

    @property
    def validate(self) -> Executor:
        """The executor that computes the losses of validation."""
        return self.executors[PlanPhase.VALIDATE]

    def sample(self, backbone: str = "") -> Executor:
        """The executor that computes a backbone's predictions, by the backbone's name."""
        return self.executors[sampling_phase(backbone)]

    @property
    def encodes_ahead(self) -> bool:
        """Whether `train` encodes the next iteration's batch."""
        return self.window is None and self.prologue is not None

    def feed(self, executor: Executor, inputs: Mapping[str, Tensor]) -> None:
        """Put the raw inputs of the samples that this rank encodes into an executor's store: name -> (samples, ...).

        Where steps are cut by their own sizes, the next training iteration runs the schedule for these.
        """
        if self.cut is not None and executor is self.train:
            executor = self.executors[PlanPhase.TRAIN] = self.cut.executor(*_counts(inputs, len(self.of_sizes)))
        self._feed(executor.store, encoded_rows(executor.schedule, self.place.worker), inputs)

    def feed_batch(self, batch: int, inputs: Mapping[str, Tensor]) -> None:
        """Put the raw inputs of a batch that is about to begin into its store, where there is no flush."""
        assert self.window is not None
        self._feed(self.window.store(batch), self.encoded, inputs)

    def _feed(self, store: RowStore, rows: Range | None, inputs: Mapping[str, Tensor]) -> None:
        sizes, parts = runs_of(inputs)
        if sizes is not None:
            # All rows of a cell have one size, so its first row says which.
            store.sizes = tuple(sizes[cell.start] for cell in store.cells)
        if rows is not None:
            start = rows.start
            store.given = {}
            for part in parts:
                stop = start + len(next(iter(part.values()))) if sizes is not None else rows.stop
                for row, marks in enumerate(part[GIVEN].tolist() if GIVEN in part else ()):
                    store.given[start + row] = frozenset(compress(self.kept, marks))
                # The two marks describe rows; no layer reads them.
                with self.upload.brought({name: part[name] for name in part if name not in (GIVEN, KEYS)}) as brought:
                    store.feed(Range(start, stop), brought, self.tables)
                start = stop

    def reset_gradients(self) -> None:
        """Forget the gradients of the last step."""
        for block in self.gradients.values():
            block.reset()

    def bring_weights(self) -> None:
        """Bring this rank's copies of the weights up to date from their owners, for a reader between two steps.

        Only where a rank updates a part and holds all; elsewhere it does nothing. Training brings them itself. All
        ranks that share a block call it.
        """
        # All transfers are started before the first is waited for.
        for weights in self.resident:
            weights.prepare()
        for weights in self.resident:
            weights.present()


def build_worker(
    graph: LayerGraph,
    model: ModelGraph,
    plan: Plan,
    rank: int,
    transport: Transport,
    *,
    device: torch.device,
    precision: Precision | None = None,
    divided: Mapping[int, Divided] | None = None,
    node: NodeMemory | None = None,
    others: Sequence[ModelGraph] = (),
    cutting: Cutting | None = None,
    kept: Sequence[str] = (),
) -> Worker:
    """Make a rank's worker: its stages, encoders, gradients and executors for each phase of the plan.

    The layers' parameters must be real (not meta) and on `device`. `others`: the descriptions of `graph.others`, the
    same model for further sizes of samples. `kept`: the tensors of frozen layers that may be put in with a batch to
    train on.

    Frozen layers that the plan's storage keeps on the host must be real, wherever they are, and move there. `node`: the
    memory that ranks of a machine share, for weights on the host; None: memory of the rank's own. `cutting`: cuts steps
    into micro-batches of unequal tokens, in place of the plan's; the plan fills nothing ahead then. `divided`: the
    blocks of a plan with owners that `Sharder` made already; None: they are made here.

    Raises:
        ConfigError: there is too little host memory for the frozen weights, or it cannot be page-locked.
    """
    place = place_of(plan, rank)
    precision = precision or Precision()
    if plan.mesh.parts > 1 and divided is None:
        sharder = Sharder(graph=graph, model=model, plan=plan, rank=rank, transport=transport, precision=precision)
        divided = {block: sharder.divide(block) for block in trained_blocks(plan, rank)}
    # The last block of a plan is the frozen part.
    hosted = storage_of(plan.encoders).hosted(plan.blocks[-1])
    held = _held(graph, plan, rank, transport, divided if plan.mesh.parts > 1 else None)
    parts = _Parts(
        graph=graph,
        model=model,
        others=tuple(zip(graph.others, others, strict=True)),
        kept=tuple(kept),
        plan=plan,
        place=place,
        precision=precision,
        transport=transport,
        device=device,
        gradients=held.gradients,
        divided=divided or {},
        casts=Casts(),
        frozen_weights=host_weights_of(graph, hosted, device, node) if hosted else {},
        watch=LayerWatch(device),
    )
    versions = _versions(plan, held)
    executors = parts.executors()
    return Worker(
        place=place,
        plan=plan,
        of_sizes=(model, *others),
        parameters=held.parameters,
        owned=held.owned,
        gradients=held.gradients,
        executors=executors,
        window=parts.window(versions) if plan.train.lead else None,
        versions=versions,
        encoded=encoded_rows(plan.encoding, place.worker),
        casts=parts.casts,
        frozen_weights=parts.frozen_weights,
        resident=tuple(block for block in parts.divided.values() if block.stays),
        watch=parts.watch,
        upload=Upload(device),
        cut=CutExecutors(cutting, partial(parts.recut, executors[PlanPhase.TRAIN])) if cutting is not None else None,
        kept=tuple(kept),
    )


_MOST_CUTS = 64
"""The most executors that `CutExecutors` keeps; they share stages and rows, and have instructions of their own."""


class CutExecutors:
    """The executors of steps whose micro-batches depend on the sizes of their samples. Mutable: it keeps some."""

    def __init__(self, cutting: Cutting, make: Callable[[Schedule], Executor]) -> None:
        self._cutting, self._make = cutting, make
        self._kept: dict[tuple[int, ...], Executor] = {}

    def executor(self, *counts: int) -> Executor:
        """The executor for a batch with this number of samples of each size; made at the first call.

        Of more than 64 kinds of batch the executor that was made first is dropped.
        """
        if counts not in self._kept:
            if len(self._kept) >= _MOST_CUTS:
                del self._kept[next(iter(self._kept))]
            self._kept[counts] = self._make(self._cutting(counts))
        return self._kept[counts]


def _counts(inputs: Mapping[str, Tensor], num_sizes: int) -> tuple[int, ...]:
    """The number of rows of each size in a batch, by the number of the size."""
    sizes, _ = runs_of(inputs)
    assert sizes is not None, "steps that are cut by tokens say the size of every row"
    return tuple(map(sizes.count, range(num_sizes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """The trained parameters that a rank holds; the first three fields are fields of `Worker`."""

    parameters: dict[str, nn.Parameter]
    owned: frozenset[str]
    gradients: Mapping[int, Reducible]
    of_block: Mapping[int, tuple[nn.Parameter, ...]]
    """Block id -> the values of `parameters` that belong to it."""


def _held(
    graph: LayerGraph, plan: Plan, rank: int, transport: Transport, divided: Mapping[int, Divided] | None
) -> _Held:
    parameters: dict[str, nn.Parameter] = {}
    owned: set[str] = set()
    gradients: dict[int, Reducible] = {}
    of_block: dict[int, tuple[nn.Parameter, ...]] = {}
    holders = {block: ranks for block, ranks in holders_of(plan).items() if rank in ranks}
    trained = {
        block: {name: p for name, p in layer_parameters(graph, plan.blocks[block]).items() if p.requires_grad}
        for block in holders
    }
    # What several blocks train is summed once, with the block whose gradients are summed last: all is complete then.
    summed_with = {name: block for block in _in_order_of_sums(plan, rank, holders) for name in trained[block]}
    for block, ranks in holders.items():
        # Where one rank alone holds the blocks nothing is summed, and each block may list the parameter.
        own = {name: p for name, p in trained[block].items() if len(ranks) == 1 or summed_with[name] == block}
        if divided is not None:
            gradients[block] = divided[block]
            own = {name: p for name, p in own.items() if name in divided[block].owned}
        else:
            gradients[block] = BlockGradients(tuple(own.values()), ranks, transport)
        parameters |= own
        of_block[block] = tuple(own.values())
        # Without owners a parameter counts on the first of its holders, so that norms count it once.
        if divided is not None or ranks[0] == rank:
            owned |= own.keys()
    return _Held(parameters=parameters, owned=frozenset(owned), gradients=gradients, of_block=of_block)


def _in_order_of_sums(plan: Plan, rank: int, blocks: Collection[int]) -> list[int]:
    """The blocks in the order in which the rank sums their gradients; all ranks that hold them have the same order."""
    stages, order = plan.train.placement.stages, plan.train.orders[place_of(plan, rank).worker]
    place = {stages[action.stage].weights: i for i, action in enumerate(order) if action.op is Op.REDUCE_GRAD}
    # Blocks without a sum come first, so a block with one takes over their common parameters.
    return sorted(blocks, key=lambda block: place.get(block, -1))


def _versions(plan: Plan, held: _Held) -> dict[int, BlockVersions]:
    """The versions of each block that the rank holds, by block, in training without a flush; else {}."""
    if not plan.train.lead:
        return {}
    predicted = predictions_held(plan.train)
    return {
        block: BlockVersions(held.of_block[block], count, predicted.get(block, 0))
        for block, count in versions_held(plan.train).items()
        if block in held.of_block
    }


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """Makes a rank's executors: the stages and the encoder of each phase."""

    graph: LayerGraph
    model: ModelGraph
    others: tuple[tuple[LayerGraph, ModelGraph], ...]
    """The graph and the description of the model for each further size of samples."""
    kept: tuple[str, ...]
    """The names of the frozen layers' tensors that may be put in with a batch to train on."""
    plan: Plan
    place: MeshPlace
    precision: Precision
    transport: Transport
    device: torch.device
    gradients: Mapping[int, Reducible]
    divided: Mapping[int, Divided]
    casts: Casts
    frozen_weights: Mapping[str, BroughtLayer]
    watch: LayerWatch

    def executors(self) -> dict[str, Executor]:
        """Phase of the plan -> its executor; without a flush there is none for training and the prologue."""
        found: dict[str, Executor] = {}
        for phase, schedule in self.plan.phases.items():  # the training's before the prologue's, which fills its store
            if self.plan.train.lead and phase in (PlanPhase.TRAIN, PlanPhase.PROLOGUE):
                continue
            store = found[PlanPhase.TRAIN].first_store if phase == PlanPhase.PROLOGUE else None
            own, *others = self.sized_equipment(phase)
            found[phase] = Executor(schedule, self.place.worker, own, store=store, others=others)
        return found

    def sized_equipment(self, phase: str) -> list[Equipment]:
        """The parts with which this rank runs a phase, for each size of samples."""
        own = self.equipment(phase)
        if not self.others:
            return [own]
        sized = [own, *(replace(own, **one.parts_of_size(phase)) for one in self._of_sizes if one is not self)]
        encoders = [each.encoder for each in sized if isinstance(each.encoder, Encoder)]
        encoder = SizedEncoder(encoders) if encoders else None
        return [replace(each, encoder=encoder) for each in sized]

    @cached_property
    def _trained(self) -> list[Equipment]:
        return self.sized_equipment(PlanPhase.TRAIN)

    def recut(self, first: Executor, schedule: Schedule) -> Executor:
        """The executor of a training schedule with other micro-batches; it shares the rows of the first one."""
        own, *others = self._trained
        store = first.store.in_cells(cells_of(schedule))
        return Executor(schedule, self.place.worker, own, store=store, others=others)

    @property
    def _of_sizes(self) -> "tuple[_Parts, ...]":
        """A maker of parts for each size of samples; the first is this one."""
        return (self, *(replace(self, graph=graph, model=model, others=()) for graph, model in self.others))

    def parts_of_size(self, phase: str) -> dict[str, Any]:
        """The fields of a phase's `Equipment` that depend on the size of samples, by name."""
        own = self.equipment(phase)
        return {"stages": own.stages, "tensors": own.tensors, "encoder": own.encoder}

    def window(self, versions: Mapping[int, BlockVersions]) -> WindowExecutor:
        """The executor that trains without a flush."""
        encoding = (self.plan.prologue, self.equipment(PlanPhase.PROLOGUE)) if self.plan.prologue else None
        return WindowExecutor(self.plan.train, self.place.worker, self.equipment(PlanPhase.TRAIN), versions, encoding)

    def equipment(self, phase: str) -> Equipment:
        """The parts with which this rank runs a phase, for samples of this size."""
        schedule = self.plan.phases[phase]
        # The prologue only encodes: its other stages are there to receive.
        stages = {} if phase == PlanPhase.PROLOGUE else self.stages(schedule, self._results(phase))
        # Sharded blocks bring their copies; those of one version would not do for another one.
        is_endless = phase == PlanPhase.TRAIN and self.plan.train.lead > 0
        has_own = all(block.stays for block in self.divided.values())
        # Copies for a whole iteration need weights that do not change in it: not windows, which update between
        # forwards.
        has_casts = self.precision.autocast is not None and has_own and not is_endless
        kept = self.kept if phase in (PlanPhase.TRAIN, PlanPhase.PROLOGUE) else ()
        # A cache may keep tensors between the parts of a layer; the model's description has only tensors between
        # layers.
        between = [spec for layer in self.graph.layers for spec in layer.between]
        return Equipment(
            stages=stages,
            tensors={spec.name: spec for spec in (*between, *self.model.tensors)},
            transport=self.transport,
            device=self.device,
            rank_of_worker=lambda worker: self.plan.mesh.rank(self.place.group, worker),
            encoder=self.encoder(schedule, kept),
            raw_inputs=(*self.model.inputs, *kept),
            gradients=self.gradients,
            brought=self.divided,
            loss_scale=1.0 / self.plan.batch if phase == PlanPhase.TRAIN else 1.0,
            preparations={i: self.preparation(schedule, i, stage) for i, stage in stages.items()} if has_casts else {},
            cleanup=self.casts.drop,
        )

    def preparation(self, schedule: Schedule, index: int, stage: LayerStage) -> Callable[[], None]:
        """A function that casts the weights of a stage, once they have come from their owners."""
        block = self.divided.get(schedule.placement.stages[index].weights)
        if block is None:
            return stage.cast

        def cast() -> None:
            block.present()
            stage.cast()

        return cast

    def _layers(self, block: int) -> list[Layer]:
        names = frozenset(self.plan.blocks[block])
        return [layer for layer in self.graph.layers if layer.name in names]

    def _results(self, phase: str) -> set[str]:
        """The names of a phase's results: a backbone's prediction when it samples, else the losses of all backbones."""
        drawn = {backbone.result for backbone in self.model.backbones if phase == sampling_phase(backbone.name)}
        return drawn or {backbone.loss for backbone in self.model.backbones}

    def stages(self, schedule: Schedule, results: set[str]) -> dict[int, LayerStage]:
        """Stage id -> its module, for this worker's trained stages.

        A module's outputs are the tensors that other stages read of it, and its tensors among `results`.
        """
        stages: dict[int, LayerStage] = {}
        for index, stage in enumerate(schedule.placement.stages):
            if stage.worker == self.place.worker and not schedule.placement.is_frozen(index):
                layers = self._layers(stage.weights)
                wanted = {name for edge in _edges(schedule) if edge.producer == index for name in edge.tensors}
                # A probe runs blocks for the estimate alone; nothing reads its losses.
                shown = set() if schedule.placement.pipeline_of(index).is_probe else results
                outputs = tuple(name for layer in layers for name in layer.writes if name in wanted | shown)
                stages[index] = LayerStage(
                    # A phase may need a part of the block's layers: drawing ends with the prediction, before the loss.
                    needed_layers(layers, outputs, given=()),
                    self.graph.components,
                    outputs=outputs,
                    checkpointed=self.plan.checkpointed,
                    precision=self.precision,
                    casts=self.casts,
                    watch=self.watch,
                )
        return stages

    def encoder(self, schedule: Schedule, kept: tuple[str, ...]) -> Encoder | None:
        """The object that runs the frozen part, if this worker encodes in this schedule; else None."""
        # A worker has at most one frozen stage.
        for index, stage in enumerate(schedule.placement.stages):
            if stage.worker == self.place.worker and schedule.placement.is_frozen(index):
                frozen = (edge for edge in _edges(schedule) if schedule.placement.is_frozen(edge.producer))
                return Encoder(
                    self._layers(stage.weights),
                    self.graph.components,
                    outputs={name for edge in frozen for name in edge.tensors},
                    fills=[
                        schedule.fills[action.slot]
                        for action in schedule.orders[self.place.worker]
                        if action.op is Op.ENCODE and action.slot is not None and action.stage == index
                    ],
                    kept=kept,
                    precision=self.precision,
                    weights=self.frozen_weights,
                    watch=self.watch,
                )
        return None


def _edges(schedule: Schedule) -> list[Edge]:
    return [edge for pipeline in schedule.placement.pipelines for edge in pipeline.edges]
