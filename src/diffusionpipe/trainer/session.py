"""What a rank has ready before the first step: the plan, its part of the model, the optimizer, the average."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch

from diffusionpipe.costs import ModelGraph
from diffusionpipe.errors import CheckpointError, ConfigError, ModelError
from diffusionpipe.ir import Plan, Schedule
from diffusionpipe.models.describe import describe
from diffusionpipe.models.flow_shift import is_flow_scheduler
from diffusionpipe.models.folder import build_graph, resolve_folder, scheduler_config, weight_sources
from diffusionpipe.models.graph import LayerGraph, canonical_names
from diffusionpipe.models.objective import ObjectiveSettings, Prediction, TimeSampling
from diffusionpipe.models.weights import frozen_factors
from diffusionpipe.runtime.heap import keep_heap
from diffusionpipe.runtime.places import channels_of, encoded_rows, holders_of
from diffusionpipe.runtime.process_group import Job
from diffusionpipe.runtime.stage import Precision
from diffusionpipe.runtime.transport import ProcessTransport, Transport
from diffusionpipe.runtime.worker import Sharder, Worker, build_worker
from diffusionpipe.trainer.agreement import on_all
from diffusionpipe.trainer.checkpoints.training_state import TrainingState
from diffusionpipe.trainer.data.dataset import Dataset
from diffusionpipe.trainer.ema import Ema
from diffusionpipe.trainer.guidance import check_guidance
from diffusionpipe.trainer.loading import Weights, load_weights
from diffusionpipe.trainer.lora import frozen_dtype_of, lora_identity, lora_of
from diffusionpipe.trainer.optimizer import build_optimizer
from diffusionpipe.trainer.planning import Planning, agree_on_plan
from diffusionpipe.trainer.recipe import Objective, ObjectiveSection, Recipe
from diffusionpipe.trainer.recipe import Precision as RecipePrecision
from diffusionpipe.trainer.scheduler import shift_contradiction

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a recipe trains, before it has weights or a plan; the same on every rank."""

    recipe: Recipe
    folder: Path
    """The model's diffusers folder."""
    prediction: Prediction
    graph: LayerGraph
    model: ModelGraph
    device: str
    """The kind of device that will train it."""


@dataclass(kw_only=True)
class Session:
    """One rank, ready to train. Mutable: parameters, optimizer and average change with every step."""

    recipe: Recipe
    job: Job
    folder: Path
    """The model's diffusers folder."""
    prediction: Prediction
    graph: LayerGraph
    model: ModelGraph
    plan: Plan
    transport: Transport
    worker: Worker
    optimizer: torch.optim.Optimizer | None
    ema: Ema | None

    @property
    def state(self) -> TrainingState:
        """What a checkpoint holds of this rank."""
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
        """Positions in the step's global batch that this rank encodes."""
        return self.encoded_positions(self.plan.train)

    def encoded_positions(self, schedule: Schedule) -> tuple[int, ...]:
        """Positions in the global batch that this rank encodes in one of the plan's schedules."""
        rows = encoded_rows(schedule, self.worker.place.worker)
        return self.positions_of(rows.start, rows.stop) if rows is not None else ()

    def positions_of(self, start: int, stop: int) -> tuple[int, ...]:
        """Positions in the global batch of rows of this rank's pipeline."""
        offset = self.worker.place.group * (self.plan.batch // self.plan.mesh.data_parallel)
        return tuple(range(offset + start, offset + stop))


def prediction_of(recipe: Recipe, folder: Path) -> Prediction:
    """What the denoiser predicts: as the recipe says or, for "auto", as the folder's scheduler does."""
    if recipe.objective.kind is not Objective.AUTO:
        return Prediction(recipe.objective.kind.value)
    config = scheduler_config(folder)
    if is_flow_scheduler(config):
        return Prediction.FLOW_MATCHING
    kind = str(config.get("prediction_type", "epsilon"))
    if kind not in {"epsilon", "v_prediction"}:
        raise ConfigError(
            f"scheduler_config.json of {folder} says that the model predicts {kind!r}; set objective.kind to what it "
            "predicts"
        )
    return Prediction(kind)


def objective_of(recipe: Recipe, folder: Path) -> ObjectiveSettings:
    """The objective as the recipe and the folder's scheduler state it."""
    return ObjectiveSettings(
        prediction=prediction_of(recipe, folder),
        min_snr_gamma=recipe.objective.snr_gamma,
        time_sampling=TimeSampling(recipe.objective.time_sampling.value),
        shift=recipe.objective.shift,
    )


def build_model(recipe: Recipe, folder: Path, device: str) -> tuple[LayerGraph, ModelGraph]:
    """The model of a recipe on the meta device, and its description as it will run on `device`.

    Raises:
        ConfigError: the folder or the objective is not one that can be trained.
    """
    check_guidance(recipe, folder)
    graph = build_graph(
        folder,
        objective=objective_of(recipe, folder),
        resolution=recipe.data.resolution,
        train=recipe.model.train or None,
        dtype="float64" if recipe.training.precision is RecipePrecision.FLOAT64 else "float32",
        lora=lora_of(recipe),
    )
    _cast(graph, recipe)
    try:
        return graph, describe(graph, autocast=_autocast(recipe), device=device)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error


def _cast(graph: LayerGraph, recipe: Recipe) -> None:
    """Parameters on meta in the dtype in which they will be real, so that the description has it."""
    dtype, narrow = parameter_dtype(recipe), frozen_dtype_of(recipe)
    factors = frozen_factors(graph) if narrow is not None else frozenset()
    for parameter, name in canonical_names(graph.components).items():
        parameter.data = parameter.data.to(narrow if name in factors else dtype)


def parameter_dtype(recipe: Recipe) -> torch.dtype:
    """Parameters, gradients and optimizer: float32, or float64 in tests."""
    return torch.float64 if recipe.training.precision is RecipePrecision.FLOAT64 else torch.float32


def _autocast(recipe: Recipe) -> torch.dtype | None:
    return torch.bfloat16 if recipe.training.precision is RecipePrecision.BFLOAT16 else None


def open_model(recipe: Recipe, job: Job) -> Model:
    """The model of a job's recipe. Every rank calls it.

    Raises:
        ConfigError: on every rank, as `build_model`.
    """
    device = job.device.type

    def build() -> Model:
        folder = resolve_folder(recipe.model.path)
        graph, model = build_model(recipe, folder, device)
        prediction = prediction_of(recipe, folder)
        return Model(recipe=recipe, folder=folder, prediction=prediction, graph=graph, model=model, device=device)

    return on_all(build)


def open_session(recipe: Recipe, job: Job, planning: Planning, opened: Model | None = None) -> Session:
    """Everything that a rank needs to train, from a recipe; `opened` is its model, None to open it here.

    Raises:
        ConfigError: something in the recipe, the model or the sizes does not fit; nothing long has started.
    """
    if job.device.type == "cpu":
        keep_heap()
    opened = opened or open_model(recipe, job)
    folder, graph, model = opened.folder, opened.graph, opened.model
    warning = shift_contradiction(folder, graph, opened.prediction, recipe.objective.shift)
    if warning is not None and job.membership.rank == 0:
        logger.warning("%s", warning)
    plan = agree_on_plan(graph, model, recipe, job, planning)
    transport = ProcessTransport(summing=tuple(holders_of(plan).values()))
    precision = Precision(device=job.device.type, autocast=_autocast(recipe))
    sources = weight_sources(folder, graph)
    if recipe.model.from_scratch:
        trained = {parameter.name.partition(".")[0] for parameter in model.parameters if parameter.is_trainable}
        sources |= dict.fromkeys(trained)
    weights = Weights(
        graph=graph,
        model=model,
        sources=sources,
        dtype=parameter_dtype(recipe),
        frozen_dtype=frozen_dtype_of(recipe),
        seed=recipe.training.seed,
    )
    rank = job.membership.rank
    sharder = Sharder(graph=graph, model=model, plan=plan, rank=rank, transport=transport, precision=precision)
    sharded = load_weights(weights, plan, sharder, job.device, planning.screen)
    with planning.screen.work("connecting the ranks"):
        transport.warm_up(channels_of(plan), job.device)
    worker = build_worker(graph, model, plan, rank, transport, device=job.device, precision=precision, sharded=sharded)
    optimizer = build_optimizer(
        recipe.optimizer.name, worker.parameters, recipe.optimizer.learning_rate, recipe.optimizer.arguments
    )
    decay = recipe.training.ema_decay
    return Session(
        recipe=recipe,
        job=job,
        folder=folder,
        prediction=opened.prediction,
        graph=graph,
        model=model,
        plan=plan,
        transport=transport,
        worker=worker,
        optimizer=optimizer,
        ema=Ema(worker.parameters, decay) if decay is not None else None,
    )


def check_resumed(
    state: Mapping[str, object], identity: Mapping[str, object], num_steps: int, source: str = "the checkpoint"
) -> int:
    """The step to go on with, if the checkpoint's run saw the same data in the same order; `source` is for messages.

    Raises:
        CheckpointError: the run would not be continued but mixed with another, or has gone beyond the recipe's end.
    """
    differing = [
        f"{name} was {state.get(name)!r} and is {value!r}"
        for name, value in identity.items()
        if name in state and state[name] != value  # an older version may not have kept it
    ]
    if differing:
        raise CheckpointError(
            f"{source} belongs to another run: {'; '.join(differing)}. "
            "Resume with the same recipe and data, or start a new run in another run.folder."
        )
    step = state.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise CheckpointError(f"{source}: state.json has the step {str(step)[:100]!r}; it was not written by a run")
    if step > num_steps:
        raise CheckpointError(
            f"{source} is from step {step}, but the recipe ends at step {num_steps}; "
            "resume from an earlier one with --resume STEP, or raise training.steps"
        )
    return step


def run_identity(session: Session, train: Dataset) -> dict[str, object]:
    """What must not change between a run and its continuation; layout, schedule and learning rate may."""
    recipe = session.recipe
    described = repr([(sample.name, sample.text, sample.label) for sample in train.samples])
    return {
        "seed": recipe.training.seed,
        "batch": recipe.training.batch,
        "data": f"{len(train.samples)} pictures, fingerprint {sha256(described.encode()).hexdigest()[:12]}",
        "picture files": f"fingerprint {train.contents}",
        "model": recipe.model.path,
        "lora": lora_identity(recipe),
        "prediction": str(session.prediction),
        "objective": _objective_identity(recipe.objective),
    }


def _objective_identity(objective: ObjectiveSection) -> str:
    """All keys of [objective] but the target, with their values."""
    values = objective.model_dump(mode="json", exclude={"kind"})
    return ", ".join(f"{key} {'none' if value is None else value}" for key, value in values.items())
