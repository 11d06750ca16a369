"""Draws samples: the denoising loop over any predictor, and the predictor that runs through the pipeline.

    latents ──> [two copies for guidance] ──> predict ──> guided prediction ──> scheduler.step ──> latents
                                                 │
                       one process: layers in order; or a forward-only schedule over all stages

In a pipeline every worker goes through the same time steps. The workers that read the noisy latents hold them and step
the scheduler; the workers of the last stage send them the prediction. Where adapters alone are trained, the denoiser's
first layers are frozen and belong to no stage: the workers that read their outputs run them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from diffusionpipe.costs import Backbone
from diffusionpipe.errors import ModelError, RecipeError
from diffusionpipe.ir import Range
from diffusionpipe.models.objectives.flow_shift import is_flow_scheduler, shift_of
from diffusionpipe.models.objectives.noise_levels import FLOWS, refuse_unknown
from diffusionpipe.runtime.comm.transport import Pending, Transport
from diffusionpipe.runtime.engine.worker import Worker
from diffusionpipe.trainer.data.randomness import generator, normal
from diffusionpipe.trainer.inference.transfers import ends_of, transfers
from diffusionpipe.trainer.model.scheduler import refuse_unknown_times

Predict = Callable[[Tensor | None, Tensor], Tensor | None]
"""A function `predict(noisy, timestep)` that returns the prediction for every row on ranks that hold latents, else
None."""

FeedBack = Callable[[Tensor, Tensor, Tensor], None]
"""A function `feed_back(prediction, noisy, timestep)` that sets the estimate which a denoiser reads at the next step.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """The steps, guidance, seed and scheduler with which samples are drawn."""

    steps: int
    """The number of denoising steps."""
    guidance: float
    """The scale of classifier-free guidance."""
    seed: int
    """The seed of all noise."""
    scheduler: Mapping[str, object]
    """The configuration of a diffusers scheduler, with its class under "_class_name"."""
    scheduler_class: str | None = None
    """Another class of scheduler to use with that configuration; None: its own class."""
    embedded_guidance: float | None = None
    """The guidance that a distilled model reads; None for other models."""
    noise_level: int | None = None
    """The time step whose noise super-resolution adds to the small pictures; None for other models."""
    unguided: float = 1.0
    """The scale with which there is no guidance; diffusers' pipelines do not agree on it."""

    tolerance: float | None = None
    """The mean change of a refinement below which steps that are computed at the same time end; None: steps in turn."""

    @property
    def is_guided(self) -> bool:
        """Whether each sample takes two rows, with and without its condition."""
        return self.guidance != self.unguided

    @property
    def copies(self) -> int:
        """The number of rows of a sample: two with guidance, else one."""
        return 2 if self.is_guided else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Spacing:
    """The facts about a model by which diffusers' pipeline spaces its time steps."""

    num_tokens: int | None = None
    """The number of tokens of a sample; None for a denoiser without tokens."""
    has_even_sigmas: bool = False
    """Whether a flow's scheduler gets evenly spaced noise levels, as in `LayerGraph`."""


class Scheduler(Protocol):
    """The methods of diffusers' schedulers that the drawing calls."""

    timesteps: Tensor
    """The time of each denoising step, in order."""

    def set_timesteps(self, num_inference_steps: int, **extra: object) -> None:
        """Chooses `num_inference_steps` time steps and sets `timesteps` to them."""

    def step(self, model_output: Tensor, timestep: Tensor, sample: Tensor, **extra: object) -> tuple[Tensor, ...]:
        """The sample after one denoising step, as a tuple of one, from the denoiser's output at `timestep`."""
        ...


def build_scheduler(config: Mapping[str, object], class_name: str | None = None) -> Scheduler:
    """The diffusers scheduler with this configuration, of its own class or of the class `class_name`.

    Raises:
        RecipeError: diffusers has no such scheduler, the configuration does not make one, or it does not suit the
            model's predictions and times.
    """
    import diffusers

    if not isinstance(config.get("_class_name"), str):
        raise RecipeError("scheduler_config.json: _class_name does not name a scheduler; restore the model's own file")
    own = str(config["_class_name"])
    name = class_name or own
    scheduler_class = getattr(diffusers, name, None)
    source = "" if class_name else "scheduler_config.json: "
    if scheduler_class is None:
        raise RecipeError(
            f"{source}diffusers has no scheduler {name!r}; use e.g. DDIMScheduler or DPMSolverMultistepScheduler"
        )
    try:
        refuse_unknown(name, source)
    except ModelError as error:
        raise RecipeError(str(error)) from error
    if name != own and (name in FLOWS) != is_flow_scheduler(config):  # they read each other's models wrongly
        raise RecipeError(f"the model samples with a scheduler like {own}, which {name} cannot replace")
    if config.get("use_dynamic_shifting") and "mu" not in signature(scheduler_class.set_timesteps).parameters:
        raise RecipeError(
            f"{name} cannot shift times by the number of tokens, as the model's scheduler does; use {own}, or set "
            "objective.shift to a number"
        )
    # A scheduler may want more in each step than a prediction, e.g. another model's.
    taken = signature(scheduler_class.step).parameters
    variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    needed = [key for key, one in taken.items() if one.default is Parameter.empty and one.kind not in variable]
    if others := set(needed) - {"self", "model_output", "timestep", "sample"}:
        raise RecipeError(f"{name} cannot be drawn with: its steps also need {', '.join(sorted(others))}; use another")
    try:
        scheduler: Scheduler = scheduler_class.from_config(dict(config))
    except Exception as error:  # a wrong value leads to anything
        raise RecipeError(f"scheduler_config.json does not make a {name}: {type(error).__name__}: {error}") from error
    return scheduler


def set_times(scheduler: Scheduler, config: Mapping[str, object], num_steps: int, spacing: Spacing) -> None:
    """Lets the scheduler choose its time steps, as diffusers' pipelines do.

    `config`: the configuration from which the scheduler is made.

    Raises:
        ModelError: the configuration shifts in a way that is not supported.
        RecipeError: the scheduler cannot make `num_steps` steps.
    """
    extra: dict[str, object] = {}
    if spacing.has_even_sigmas and "sigmas" in signature(scheduler.set_timesteps).parameters:
        extra["sigmas"] = np.linspace(1.0, 1 / num_steps, num_steps)
    if config.get("use_dynamic_shifting"):
        shift = shift_of(config)
        shift.factor(spacing.num_tokens)  # refuses a shift that is not supported
        assert shift.dynamic is not None
        assert spacing.num_tokens is not None
        extra["mu"] = shift.dynamic.mu(spacing.num_tokens)
    try:
        scheduler.set_timesteps(num_steps, **extra)
        refuse_unknown_times(scheduler)
    except Exception as error:  # a wrong value of the configuration leads to anything
        why = f"{type(error).__name__}: {error}; use fewer steps, or another scheduler"
        name = type(scheduler).__name__
        raise RecipeError(f"scheduler_config.json: {name} cannot make {num_steps} denoising steps: {why}") from error


def draw(
    predict: Predict,
    settings: SamplingSettings,
    *,
    num_samples: int,
    latent_shape: tuple[int, ...],
    device: torch.device,
    holds_latents: bool = True,
    spacing: Spacing = Spacing(),
    feed_back: FeedBack | None = None,
    model: str = "",
    on_step: Callable[[int, int], None] | None = None,
) -> Tensor | None:
    """The latents of new samples, (num_samples, *latent_shape); None on ranks that hold no latents.

    The rows that `predict` gets are all samples with their conditions and then, if guided, the same samples without.
    The noise of sample i depends on (seed, i) and, with several models, on the name of the `model`. `feed_back` is
    called with every guided prediction, one row for each sample. `on_step(done, total)` shows progress.
    """
    scheduler = build_scheduler(settings.scheduler, settings.scheduler_class)
    set_times(scheduler, settings.scheduler, settings.steps, spacing)
    noise = step_noise(settings, model)
    latents: Tensor | None = None
    if holds_latents:
        first = drawn_noise("sampling", settings, num_samples, latent_shape, model).to(device)
        # Schedulers by noise levels begin with more than unit variance.
        latents = first * getattr(scheduler, "init_noise_sigma", 1.0)
    scale = getattr(scheduler, "scale_model_input", None)
    for number, timestep in enumerate(scheduler.timesteps, start=1):
        rows: Tensor | None = None
        if latents is not None:
            # The same ones divide by it before each prediction.
            scaled = latents if scale is None else scale(latents, timestep)
            rows = torch.cat([scaled] * settings.copies)  # (num_rows, ...)
        prediction = predict(rows, timestep)
        if latents is not None:
            assert prediction is not None
            result = guided(prediction.to(latents.dtype), settings, latents.shape[1])
            # The variance channels of a denoiser are dropped where the scheduler does not read them.
            if not _has_learned_variance(scheduler):
                result = result[:, : latents.shape[1]]
            if feed_back is not None:
                feed_back(result[:, : latents.shape[1]], scaled, timestep)
            latents = _step(scheduler, result, timestep, latents, noise)
        if on_step is not None:
            on_step(number, len(scheduler.timesteps))
    return latents


def drawn_noise(
    purpose: str, settings: SamplingSettings, num_samples: int, shape: tuple[int, ...], model: str = ""
) -> Tensor:
    """Standard normal noise, (num_samples, *shape), keyed by purpose, seed, sample and the name of the `model`."""
    return normal(
        seed=settings.seed,
        purpose=f"{model}/{purpose}" if model else purpose,
        step=0,
        positions=range(num_samples),
        shape=shape,
    )


def step_noise(settings: SamplingSettings, model: str = "") -> torch.Generator:
    """A random generator of torch for a scheduler that draws noise, seeded by the settings and the `model`'s name."""
    seed = settings.seed
    if model:
        seed = int(generator(seed=seed, purpose=f"{model}/steps", step=0, position=0).integers(2**63))
    return torch.Generator().manual_seed(seed)


def _has_learned_variance(scheduler: Scheduler) -> bool:
    """Whether the scheduler reads the variance that a denoiser states in further channels."""
    reads = "variance_type" in signature(type(scheduler)).parameters
    kind = getattr(scheduler, "config", {}).get("variance_type")
    return reads and kind in ("learned", "learned_range")


def guided(prediction: Tensor, settings: SamplingSettings, channels: int) -> Tensor:
    """The guided prediction, with a row for each sample.

    `prediction`: the rows with condition and then the rows without; without guidance it is returned unchanged.

    It is classifier-free guidance (Ho & Salimans, 2021, https://arxiv.org/abs/2207.12598), as diffusers scales it.
    Channels beyond the latents' `channels`, which state variances, come from the prediction with the condition.
    """
    if not settings.is_guided:
        return prediction
    with_condition, without = (half[:, :channels] for half in prediction.chunk(2))
    result = without + settings.guidance * (with_condition - without)
    if prediction.shape[1] == channels:
        return result
    return torch.cat([result, prediction.chunk(2)[0][:, channels:]], dim=1)


def _step(
    scheduler: Scheduler, prediction: Tensor, timestep: Tensor, latents: Tensor, noise: torch.Generator
) -> Tensor:
    """The latents after one step of the scheduler.

    `noise`: the generator for schedulers that draw noise, in the same state on all ranks.
    """
    extra = {"generator": noise} if "generator" in signature(scheduler.step).parameters else {}
    return scheduler.step(prediction, timestep, latents, return_dict=False, **extra)[0]


class PipelinePredictor:
    """A function that predicts with a denoiser through the pipeline's sampling schedule.

    Every worker calls it in the same order.
    """

    def __init__(
        self,
        worker: Worker,
        transport: Transport,
        backbone: Backbone,
        *,
        conditions: Mapping[str, Tensor],
        num_rows: int,
        device: torch.device,
        lead: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None,
        is_everywhere: bool = False,
        size: int = 0,
    ) -> None:
        """Writes the conditions into the store of this rank's stages.

        `conditions`: the tensors that the stages read beside latents and time, by name, (num_rows, ...) each. `lead`: a
        function that returns the outputs of the denoiser's frozen layers for this rank's stages, from the times and, if
        this rank has them, the noisy latents. `is_everywhere`: every worker holds latents and gets the prediction, not
        only workers that need them. `size`: the index of the samples' size.
        """
        self._backbone = backbone
        self._executor = worker.sample(backbone.name)
        self._transport = transport
        self._num_rows = num_rows
        self._device = device
        self._lead = lead
        self._model = worker.of_sizes[size]
        store = self._executor.store
        store.sizes = (size,) * len(store.cells)  # each row has this size, whichever the last training step had
        placement = self._executor.schedule.placement
        self._pipeline = placement.pipelines[0]
        self._rank_of = {w: worker.plan.mesh.rank(worker.place.group, w) for w in range(worker.plan.mesh.pipeline)}
        self._worker = worker.place.worker
        self._holders, self._writers = ends_of(worker, backbone)
        if is_everywhere:
            self._holders = tuple(range(worker.plan.mesh.pipeline))
        for name, value in conditions.items():
            if name in self._executor.store:
                self._executor.store.write(name, Range(0, num_rows), value)
        if self.reads_estimate:
            self.remember(self._empty(str(backbone.estimate), num_rows).zero_())  # no step has made an estimate yet

    @property
    def reads_estimate(self) -> bool:
        """Whether this worker's stages read the denoiser's own estimate of the clean sample."""
        return str(self._backbone.estimate) in self._executor.store

    def remember(self, estimate: Tensor) -> None:
        """Writes an estimate of the clean samples, (samples, ...), into the store for the next step.

        It is repeated for all rows of a sample.
        """
        copies = self._num_rows // len(estimate)
        self._executor.store.write(
            str(self._backbone.estimate), Range(0, self._num_rows), torch.cat([estimate] * copies)
        )

    @property
    def capacity(self) -> int:
        """The number of rows that one run of the schedule takes."""
        return self._pipeline.num_samples

    @property
    def holds_latents(self) -> bool:
        """Whether this worker has the noisy latents, because it reads or shows them."""
        return self._worker in self._holders

    @property
    def shows(self) -> bool:
        """Whether this is the worker that decodes and keeps the pictures."""
        return self._worker == self._holders[0]

    def __call__(self, noisy: Tensor | None, timestep: Tensor) -> Tensor | None:
        """The prediction for every row, (num_rows, ...), on workers that hold latents; None on the others.

        `noisy`: the noisy latents; None on workers that hold none. `timestep`: the time of all rows. The other rows of
        the schedule are padding.
        """
        store, rows = self._executor.store, Range(0, self._num_rows)
        latents, times = self._backbone.noisy, self._backbone.timesteps
        if noisy is not None and latents in store:
            store.write(latents, rows, noisy)
        if times in store:
            for view in store.views(times, Range(0, self.capacity)):
                view.fill_(timestep)
        if self._lead is not None:
            given = {times: self._empty(times, self._num_rows).fill_(timestep)}
            if noisy is not None:
                given[latents] = noisy.to(getattr(torch, self._model.tensor(latents).dtype))
            for name, value in self._lead(given).items():
                store.write(name, rows, value)
        outputs = self._executor.run()
        return self._exchange({(o.rows.start, o.rows.stop): o.value for o in outputs})

    def _exchange(self, outputs: Mapping[tuple[int, int], Tensor]) -> Tensor | None:
        """The rows of the prediction, brought from the last stage's workers to workers that hold latents; else None.

        `outputs`: the rows that this worker has predicted, by (first, end).
        """
        works: list[Pending] = []
        sent = {rows: value.contiguous() for rows, value in outputs.items()}
        prediction: Tensor | None = None
        if self.holds_latents:
            prediction = self._empty(str(self._backbone.prediction), self.capacity)
            for start, stop in self._writers.get(self._worker, ()):
                prediction[start:stop] = sent[start, stop]
        for writer, holder, start, stop in transfers(self._writers, self._holders):
            if writer == self._worker:
                works.append(self._transport.send(sent[start, stop], self._rank_of[holder]))
            elif holder == self._worker:
                assert prediction is not None
                works.append(self._transport.recv(prediction[start:stop], self._rank_of[writer]))
        for work in works:
            work.wait()
        return None if prediction is None else prediction[: self._num_rows]

    def _empty(self, name: str, num_rows: int) -> Tensor:
        spec = self._model.tensor(name)
        return torch.empty((num_rows, *spec.shape), dtype=getattr(torch, spec.dtype), device=self._device)
