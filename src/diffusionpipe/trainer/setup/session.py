"""The state of a rank before the first step: the plan, its part of the model, the optimizer, the average."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from diffusionpipe.costs import ModelGraph
from diffusionpipe.costs.graph import as_fraction
from diffusionpipe.errors import ConfigError, RecipeError
from diffusionpipe.holding.rest import RESTS
from diffusionpipe.holding.storage import storage_of
from diffusionpipe.ir import Op, Plan, Schedule
from diffusionpipe.models.base.self_conditioning import is_conditioned
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.objectives.objective import Prediction
from diffusionpipe.models.parameters.lora_start import StartedAdapters
from diffusionpipe.runtime.comm.places import channels_of, encoded_rows, holders_of
from diffusionpipe.runtime.comm.transport import ProcessTransport, Transport
from diffusionpipe.runtime.compute.stage import Precision
from diffusionpipe.runtime.engine.executor import cells_of
from diffusionpipe.runtime.engine.sharder import Sharder
from diffusionpipe.runtime.engine.worker import Worker, build_worker
from diffusionpipe.runtime.job.agreement import on_all
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.runtime.machine.heap import disable_malloc_trim
from diffusionpipe.runtime.weights.node_memory import NodeMemory
from diffusionpipe.trainer.checkpoints.training_state import TrainingState
from diffusionpipe.trainer.data.batches.batch import level_tables
from diffusionpipe.trainer.model.loading import Weights, load_weights
from diffusionpipe.trainer.model.lora import frozen_dtype_of
from diffusionpipe.trainer.model.members import (
    Member,
    RecipeModels,
    autocast_of,
    class_embeddings_of,
    gradient_dtype_of,
    only,
    open_model,
    parameter_dtype,
    rounding_of,
    sources_of,
    started_of,
    trained_dtype,
)
from diffusionpipe.trainer.model.parameter_groups import ParameterGroups, parameter_groups
from diffusionpipe.trainer.model.scheduler import shift_contradiction
from diffusionpipe.trainer.optim.ema import Ema
from diffusionpipe.trainer.optim.in_backward import InBackward
from diffusionpipe.trainer.optim.optimizer import RankOptimizer, build_optimizer
from diffusionpipe.trainer.optim.read_weights import ReadWeights
from diffusionpipe.trainer.optim.staleness_rates import fading_staleness
from diffusionpipe.trainer.recipe import Recipe, planned
from diffusionpipe.trainer.recipe.in_backward_check import ONE_COPY, ONE_MICROBATCH, WHOLE_BACKWARDS
from diffusionpipe.trainer.recipe.schema import Measure
from diffusionpipe.trainer.recipe.size_rules import run_of
from diffusionpipe.trainer.recipe.weights_check import SHARDED
from diffusionpipe.trainer.setup.planning import Planning, agree_on_plan, check_plan_fits

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Session:
    """All that one rank needs to train: plan, worker, optimizer, average; steps change their contents."""

    recipe: Recipe
    job: Job
    members: tuple[Member, ...]
    """The models, in the order of sampling."""
    graph: LayerGraph
    """The layer graph of all models."""
    model: ModelGraph
    """The description of `graph`, without torch."""
    others: tuple[ModelGraph, ...]
    """The descriptions of the model for further sizes of samples."""
    plan: Plan
    transport: Transport
    """Carries messages and sums between the ranks."""
    worker: Worker
    """Runs this rank's part of the plan's schedules, and holds its parameters."""
    groups: ParameterGroups
    """The group of each trained parameter of all ranks."""
    optimizer: RankOptimizer | None
    """The optimizer of this rank's parameters; None on a rank without any."""
    ema: Ema | ReadWeights | None
    """The average of this rank's parameters; None if the run has no average."""
    in_backward: InBackward | None
    """Steps the parameters within the backward; None: they are stepped after it."""

    @property
    def folder(self) -> Path:
        """The diffusers folder of the only model; it fails where there are several models."""
        return only(self.members).folder

    @property
    def prediction(self) -> Prediction:
        """The quantity that the only model predicts; it fails where there are several models."""
        return only(self.members).prediction

    @property
    def state(self) -> TrainingState:
        """The parameters, optimizer and average of this rank, from which a checkpoint is made; they are not copied."""
        return TrainingState(
            model=self.worker.parameters,
            trainable=self.worker.parameters,
            optimizer=self.optimizer,
            ema=self.ema,
        )

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.job.membership.rank == 0

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions in a step's batch of the samples that this rank encodes, by row; () if it encodes none."""
        return self.encoded_positions(self.plan.encoding)

    @property
    def group_positions(self) -> tuple[int, ...]:
        """The positions in a step's batch of all samples of this rank's group, by row."""
        return self._positions

    def encoded_positions(self, schedule: Schedule) -> tuple[int, ...]:
        """The positions in a step's batch of the samples that this rank encodes in one of the plan's schedules.

        By row; () if it encodes none.
        """
        rows = encoded_rows(schedule, self.worker.place.worker)
        return self.positions_of(rows.start, rows.stop) if rows is not None else ()

    def positions_of(self, start: int, stop: int) -> tuple[int, ...]:
        """The positions in a step's batch of the rows from `start` up to `stop` of this rank's group."""
        return self._positions[start:stop]

    @cached_property
    def _positions(self) -> tuple[int, ...]:
        """The positions in a step's batch of the samples of this rank's group, by row.

        Conditioned samples, which read an estimate, come last, in the micro-batches that are probed.
        """
        share = as_fraction(self.recipe.objective.self_conditioning)
        size = self.plan.batch // self.plan.mesh.data_parallel
        first = self.worker.place.group * size
        # Sorting is stable: samples without an estimate stay in order, and then those with one.
        return tuple(sorted(range(first, first + size), key=lambda position: is_conditioned(position, share)))


def _check_runs(plan: Plan, recipe: Recipe) -> None:
    """Refuse a plan whose micro-batches would hold samples of several sizes. Raises ConfigError."""
    if not recipe.data.has_sizes or recipe.data.batching is Measure.TOKENS:
        return
    run, rows = run_of(recipe), plan.batch // plan.mesh.data_parallel
    cells = [len(cell) for cell in cells_of(plan.train)]
    if rows % max(cells) or any(run % cell for cell in cells):
        raise ConfigError(
            f"data.same_size: {run} samples in a row have one size, and micro-batches of {max(cells)} do not lie "
            f"within them; set it to a multiple of {max(cells)}, or use other pipeline.microbatches"
        )


def _check_in_backward(plan: Plan, recipe: Recipe) -> None:
    """Refuse a plan whose gradients are not final in a backward, for `optimizer.in_backward`. Raises RecipeError."""
    if not recipe.optimizer.in_backward:
        return
    trained = [one for one in plan.train.placement.pipelines if Op.B in one.ops]
    is_one = all(len(one.microbatches) == 1 for one in trained)
    holders = max((len(ranks) for ranks in holders_of(plan).values()), default=1)
    asked = ((not is_one, ONE_MICROBATCH), (holders > 1, ONE_COPY), (plan.train.splits_backwards, WHOLE_BACKWARDS))
    for is_asked, why in asked:
        if is_asked:
            raise RecipeError(f"optimizer.in_backward: {why}")


def _in_backward(
    recipe: Recipe, worker: Worker, optimizer: RankOptimizer | None, device: torch.device
) -> InBackward | None:
    if optimizer is None or not recipe.optimizer.in_backward:
        return None
    return InBackward(list(worker.parameters.values()), optimizer, device)


def open_session(
    recipe: Recipe, job: Job, planning: Planning, opened: RecipeModels | None = None, kept: Sequence[str] = ()
) -> Session:
    """All that this rank needs to train by a recipe: it plans, loads the weights and connects the ranks.

    Every rank calls it.

    Args:
        recipe: the recipe of the run; with `opened` the recipe there is used.
        job: the job.
        planning: the functions that make a plan.
        opened: the models of the recipe; None to open them here.
        kept: the names of tensors of frozen layers that batches may bring from a cache.

    Raises:
        ConfigError: something in the recipe, the model or the sizes does not fit, or weights cannot be read.
    """
    # Pages that the C library returns cost a fault each when the next tensors take them.
    if job.device.type == "cpu":
        disable_malloc_trim()
    opened = opened or open_model(recipe, job)
    recipe = opened.recipe
    graph, model = opened.graph, opened.model
    for member in opened.members if job.membership.rank == 0 else ():
        shift = member.recipe.objective.shift
        warning = shift_contradiction(member.folder, member.graph, member.prediction, shift)
        if warning is not None:
            logger.warning("%s%s", f"{member.name}: " if member.name else "", warning)
    # Before planning, which may measure for minutes.
    sources = on_all(lambda: {name: path for one in opened.members for name, path in sources_of(one).items()})
    # A checkpoint has the adapters of a resumed run, whose file may be gone.
    started = StartedAdapters() if planning.is_resumed else on_all(lambda: started_of(opened))
    embeddings = {name: value for one in opened.members for name, value in class_embeddings_of(one).items()}
    for text in started.said if job.membership.rank == 0 else ():
        logger.warning("lora.start: %s", text)
    plan = agree_on_plan(opened, recipe, job, planning)
    check_plan_fits(plan, opened, job, planning)
    _check_runs(plan, recipe)
    _check_in_backward(plan, recipe)
    is_cut = recipe.data.batching is Measure.TOKENS
    cutting = planning.make_cutting((model, *opened.others), plan) if is_cut else None
    recipe = planned(recipe, plan.checkpointed, sum(map(len, plan.blocks[:-1])))
    # The recipe's own check sees stated sizes only; a search may have chosen shards.
    if plan.mesh.shard > 1 and trained_dtype(recipe) is not None:
        raise RecipeError(f"training.weights: {SHARDED}")
    fading_staleness(recipe.learning_rate.by_staleness, plan.train)  # it may refuse, before anything long starts
    transport = ProcessTransport(job.device, summing=tuple(holders_of(plan).values()))
    precision = Precision(device=job.device.type, autocast=autocast_of(recipe))
    weights = Weights(
        graph=graph,
        model=model,
        sources=sources,
        dtype=parameter_dtype(recipe),
        frozen_dtype=frozen_dtype_of(recipe),
        trained_dtype=trained_dtype(recipe),
        gradient_dtype=gradient_dtype_of(recipe),
        seed=recipe.training.seed,
        started={**started.values, **embeddings},
    )
    rank = job.membership.rank
    sharder = Sharder(graph=graph, model=model, plan=plan, rank=rank, transport=transport, precision=precision)
    # The ranks of a machine share one copy of the weights that are kept in host memory.
    node = NodeMemory(rank) if storage_of(plan.encoders).brings and job.membership.world_size > 1 else None
    divided = load_weights(weights, plan, sharder, job.device, planning.screen, node)
    with planning.screen.work("connecting the ranks"):
        # NCCL makes a communicator at its first use, for which both ends must be there.
        transport.warm_up(channels_of(plan))
    worker = build_worker(
        graph,
        model,
        plan,
        rank,
        transport,
        device=job.device,
        precision=precision,
        divided=divided,
        node=node,
        others=opened.others,
        kept=kept,
        cutting=cutting,
    )
    worker.tables = level_tables(graph.inputs, job.device)
    groups = parameter_groups(recipe, model)
    optimizer = build_optimizer(
        recipe.optimizer.name,
        worker.parameters,
        recipe.optimizer.learning_rate,
        recipe.optimizer.arguments,
        groups.group,
        rounding_of(recipe),
    )
    # Before a checkpoint is loaded: states then come in the form that they are kept in.
    if optimizer is not None:
        optimizer.rest(RESTS[recipe.optimizer.states])
    return Session(
        recipe=recipe,
        job=job,
        members=opened.members,
        graph=graph,
        model=model,
        others=opened.others,
        plan=plan,
        transport=transport,
        worker=worker,
        optimizer=optimizer,
        groups=groups,
        ema=groups.average(worker.parameters, optimizer),
        in_backward=_in_backward(recipe, worker, optimizer, job.device),
    )
