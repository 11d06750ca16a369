"""Draws pictures by diffusers' own pipeline, whose transformer is a stand-in without weights.

Scheduler, guidance and decoding are the pipeline's. It gets numbers of rows in place of states of prompts. The
stand-in finds them in the arguments of each call, and answers with those rows of a prediction by our layers:

    pipeline ── latents, numbers of rows ──> stand-in ── latents of all rows, time ──> predict
       ^                                        │
       └────────── rows of the prediction ──────┘

A pipeline may call its transformer once for each half of guidance. The first of these calls predicts all rows, so both
halves go through the stages together; the second is answered from memory.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.errors import RecipeError
from diffusionpipe.models.base.family import Clip
from diffusionpipe.models.base.pipeline_call import PipelineCall
from diffusionpipe.models.opening.folder import component_config, family_of, is_component, model_index
from diffusionpipe.models.opening.meta import module_on_meta
from diffusionpipe.models.parameters.stored import stored_weights
from diffusionpipe.models.parameters.weights import tensors_of
from diffusionpipe.runtime.machine.error_file import is_shortage
from diffusionpipe.trainer.data.randomness import normal
from diffusionpipe.trainer.inference.decoding import decoded, open_vae
from diffusionpipe.trainer.inference.denoise import Predict, SamplingSettings, build_scheduler

logger = logging.getLogger(__name__)

_MASKS = ("prompt_embeds_mask", "prompt_attention_mask")
"""The names of pipelines' arguments for masks of prompts."""
_POOLED = ("pooled_prompt_embeds",)
"""The names of pipelines' arguments for pooled embeddings of prompts."""


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An order to draw pictures from a diffusers folder: number, size, settings and device."""

    folder: Path
    settings: SamplingSettings
    num_samples: int
    latents: tuple[int, ...]
    """The shape of one sample's latents."""
    resolution: int
    """The side of square pictures, in pixels."""
    device: torch.device
    clip: Clip | None = None
    """The size of samples that are not square pictures of `resolution`; None for such pictures."""
    variant: str | None = None
    """The variant of the folder's weights that is read; see `stored_weights`."""
    needs_pictures: bool = True
    """Whether too little memory to decode the pictures is an error; else the drawing ends without pictures."""
    release: Callable[[], None] = _nothing
    """A function that frees memory which decoding does not need; it is called before the pictures are decoded."""


@dataclass(slots=True)
class _StandIn:
    """A function in place of a transformer's forward, which answers with predictions by our layers."""

    call: PipelineCall
    """The facts about the pipeline's calls of its transformer."""
    order: Order
    predict: Predict
    """The function that predicts for all rows."""
    scheduler: Any
    config: Any
    """The configuration of the transformer."""
    parameters: Mapping[str, Parameter]
    """The parameters of the forward that it replaces, by name."""
    num_steps: int = 0
    """The number of steps that the scheduler has done."""
    seen: Tensor | None = None
    """The latents to which `kept` belongs; None if there is no prediction for this step yet."""
    kept: Tensor = field(default_factory=lambda: torch.empty(0))
    """The prediction for all rows."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any]:
        """The prediction for the rows whose numbers are in the call's arguments, as a tuple of one."""
        named = dict(zip(self.parameters, args, strict=False)) | kwargs
        hidden, text = named[next(iter(self.parameters))], named[self.call.text]
        rows = [int(row.flatten()[0]) for row in text]  # the numbers that `_arguments` has put in place of states
        latents = self.call.reads(hidden, self.order.latents)  # (rows, *latents)
        num_samples = self.order.num_samples
        # Each half of guidance has all samples, so any row of a sample has its latents.
        place = {row % num_samples: index for index, row in enumerate(rows)}
        samples = latents[[place[sample] for sample in range(num_samples)]]
        # The second half of guidance asks with the same latents; a step of the scheduler forgets them.
        if self.seen is None or not torch.equal(samples, self.seen):
            time = self.scheduler.timesteps[self.num_steps]
            copies = 2 if self.order.settings.is_guided else 1
            prediction = self.predict(torch.cat([samples] * copies), time)
            assert prediction is not None, "every rank has the prediction"
            if self.call.scale is None and copies == 2:  # the pipeline does not guide, so the prediction is guided here
                prompted, other = prediction.chunk(2)
                prediction = other + self.order.settings.guidance * (prompted - other)
            self.seen, self.kept = samples, prediction.to(latents.dtype)
        return (self.call.returns(self.kept[rows], self.config),)

    def stepped(self) -> None:
        """Notes that the scheduler has done a step, so that the kept prediction is no longer used."""
        self.num_steps += 1
        self.seen = None


def draw_by_pipeline(
    order: Order, predict: Predict, *, decodes: bool, on_step: Callable[[int, int], None] | None = None
) -> Tensor | None:
    """Pictures (N, H, W, 3) or clips (N, F, H, W, 3) with values in [0, 1] on the CPU, or None.

    Without `decodes` the VAE does not run and the result is None. It is None too, with a warning, if there is no memory
    to decode the pictures and the order does not need them.

    `predict` takes and gives rows as in `denoise.draw`; every rank needs its result. The first noise of sample i
    depends on (seed, i) only.

    Raises:
        RecipeError: the pipeline refuses the size, the number of steps or the scheduler.
    """
    family = family_of(order.folder)
    call, settings = family.call, order.settings
    assert call is not None, "a family that is drawn by its pipeline"
    scheduler: Any = build_scheduler(settings.scheduler, settings.scheduler_class)
    parts = {name: _weightless(order, name) for name in ("vae", family.trainable[0])}
    transformer = parts[family.trainable[0]]
    parameters = signature(transformer.forward).parameters
    stand_in = _StandIn(call, order, predict, scheduler, transformer.config, parameters)
    transformer.forward = stand_in
    decoder = parts["vae"].decode = _Decoder(order)
    _watch(scheduler, stand_in, on_step)
    pipeline = _pipeline(order.folder, {**parts, "scheduler": scheduler})
    arguments = _arguments(pipeline, order, call) | {"output_type": "pt" if decodes else "latent"}
    try:
        pictures = pipeline(**arguments)[0]
    except (ValueError, TypeError, AttributeError, IndexError, RuntimeError, MemoryError) as error:
        if decoder.has_given_up:
            return None
        if stand_in.num_steps or stand_in.seen is not None:  # the pipeline has accepted the order: an error of drawing
            raise
        raise RecipeError(
            f"diffusers' {type(pipeline).__name__} cannot draw with a {type(scheduler).__name__} of "
            f"scheduler_config.json, {settings.steps} steps and {_named(order)}: {error}; change the number of steps "
            "or the scheduler"
        ) from error
    if not decodes:
        return None
    frames: Tensor = pictures[:, 0] if pictures.ndim == 5 and pictures.shape[1] == 1 else pictures  # (N, [F,] 3, H, W)
    return frames.movedim(-3, -1).float().cpu()


def _named(order: Order) -> str:
    """The size of the pictures to draw in words, for messages."""
    if order.clip is None:
        return f"{order.resolution} pixels"
    return str(order.clip)


def check_pipeline(order: Order) -> None:
    """Refuses an order that diffusers' pipeline would refuse; it runs the pipeline without a denoiser, in milliseconds.

    Raises:
        RecipeError: the pipeline refuses the size, the steps or the scheduler.
    """
    draw_by_pipeline(order, lambda noisy, timestep: noisy, decodes=False)


def _weightless(order: Order, name: str) -> Any:
    """A component of the folder on the meta device, which claims to be on the order's device in float32."""
    config = component_config(order.folder, name)
    kind = family_of(order.folder).components[name]
    module: nn.Module = module_on_meta(kind, config, source=order.folder / name / "config.json")
    _read_buffers(module, order, name)
    own = type(module)
    claims = {"device": order.device, "dtype": torch.float32, "__module__": own.__module__}
    # Pipelines ask their parts for device and type, and modules on the meta device would name that.
    module.__class__ = type(own.__name__, (own,), claims)
    return module


def _read_buffers(module: nn.Module, order: Order, name: str) -> None:
    """Puts the stored values of its buffers into the module, e.g. statistics of latents."""
    own = [key for key, _ in module.named_buffers()]
    source = stored_weights(order.folder / name, order.variant) if own else None
    for key, value in tensors_of(name, module, source, own).items() if source else ():
        parent, _, buffer = key.rpartition(".")
        setattr(module.get_submodule(parent), buffer, value.to(order.device))


@dataclass(slots=True)
class _Decoder:
    """A function in place of a VAE's `decode`, which reads the folder's weights when it is called."""

    order: Order
    has_given_up: bool = False
    """Whether there was no memory for pictures, which the order does not need."""

    def __call__(self, latents: Tensor, *times: Tensor | None, **options: Any) -> tuple[Tensor]:
        self.order.release()
        try:
            return (
                decoded(open_vae(self.order.folder, latents.device, self.order.variant), latents, *times, **options),
            )
        except (RuntimeError, MemoryError) as error:
            if is_shortage(error) and not self.order.needs_pictures:
                warn_of_shortage(error)
                self.has_given_up = True
            raise


def warn_of_shortage(error: BaseException) -> None:
    """Logs a warning that there is no memory to decode pictures, and that training continues without them."""
    logger.warning(
        'samples=none reason="no memory to decode them: %s" remedy="use a smaller data.resolution or '
        'leave more memory free"; training continues',
        str(error).splitlines()[0] if str(error) else type(error).__name__,
    )


def _watch(scheduler: Any, stand_in: _StandIn, on_step: Callable[[int, int], None] | None) -> None:
    """Replaces the scheduler's `step` by one that also tells the stand-in and `on_step` of each step."""
    step = scheduler.step

    @wraps(step)  # pipelines look at the signature of `step`
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        stand_in.stepped()
        if on_step is not None:
            on_step(stand_in.num_steps, len(scheduler.timesteps))
        return result

    scheduler.step = watched


def _pipeline(folder: Path, parts: Mapping[str, Any]) -> Any:
    """The folder's pipeline with the components `parts` and without all others, with the folder's settings."""
    import diffusers

    index = model_index(folder)
    call = family_of(folder).call
    own = None if call is None else call.pipeline
    kind = getattr(diffusers, own or str(index["_class_name"]))
    wanted = signature(kind.__init__).parameters
    settings = {key: value for key, value in index.items() if key in wanted and not is_component(value)}
    # Encoders and tokenizers: numbers of rows take the place of their results.
    absent = dict.fromkeys(name for name, p in wanted.items() if name != "self" and p.default is Parameter.empty)
    pipeline = kind(**{**absent, **settings, **parts})
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _arguments(pipeline: Any, order: Order, call: PipelineCall) -> dict[str, Any]:
    """The arguments with which the pipeline is called to draw the order, by name."""
    settings, device, count = order.settings, order.device, order.num_samples
    noise = normal(seed=settings.seed, purpose="sampling", step=0, positions=range(count), shape=order.latents)
    # (2, samples, 1, 1): the numbers of the rows with their conditions, then without.
    rows = torch.arange(2 * count, dtype=torch.float32, device=device).view(2, count, 1, 1)
    masks = torch.ones(count, 1, dtype=torch.int64, device=device)
    taken = signature(type(pipeline).__call__).parameters
    texts = {"prompt_embeds": call.rows(rows[0]), **{name: masks for name in _MASKS if name in taken}}
    texts |= {name: rows[0] for name in _POOLED if name in taken}
    guided = {} if call.scale is None else {call.scale: settings.guidance}
    if settings.is_guided and guided:
        texts["negative_prompt_embeds"] = call.rows(rows[1])
        texts |= {f"negative_{name}": rows[1] for name in _POOLED if name in taken}
        texts |= {f"negative_{name}": masks for name in _MASKS if name in taken}
    clip = order.clip or Clip.square(order.resolution)
    return {
        **texts,
        **({"negative_prompt": None} if "negative_prompt" in taken else {}),
        "latents": call.takes(noise.to(device)),
        "generator": torch.Generator().manual_seed(settings.seed),
        "num_inference_steps": settings.steps,
        "height": clip.height,
        "width": clip.width,
        **guided,
        **call.options,
        **({"num_frames": clip.frames} if "num_frames" in taken else {}),
    }
