"""Draws latents of pictures whose denoising steps are computed at the same time; see `parallel_in_time`."""

import logging
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from diffusionpipe.errors import RecipeError
from diffusionpipe.models.opening.folder import family_of, reads_estimate
from diffusionpipe.timing.in_time import blocks_of
from diffusionpipe.trainer.inference.denoise import (
    Predict,
    SamplingSettings,
    Spacing,
    build_scheduler,
    drawn_noise,
    guided,
    set_times,
)
from diffusionpipe.trainer.inference.parallel_in_time import BlockRanks, check_scheduler, draw_in_time, walk_of

logger = logging.getLogger(__name__)


def check_in_time(folder: Path, settings: SamplingSettings) -> None:
    """Refuses a model or a scheduler whose steps cannot be computed at the same time, before weights are read.

    It passes where the settings ask for steps in turn.

    Raises:
        RecipeError: names the reason.
    """
    if settings.tolerance is None:
        return
    if family_of(folder).call is not None:
        raise RecipeError(
            f"parallel in time: diffusers' own pipeline draws from {folder}, step by step; leave out --parallel-in-time"
        )
    if reads_estimate(folder):
        raise RecipeError(
            "parallel in time: the model reads the estimate of the step before (self-conditioning); leave out "
            "--parallel-in-time"
        )
    check_scheduler(build_scheduler(settings.scheduler, settings.scheduler_class))


def check_ranks(settings: SamplingSettings, ranks: int) -> None:
    """Refuses more ranks than there are blocks of denoising steps.

    Raises:
        RecipeError: there are too many ranks.
    """
    count = len(blocks_of(settings.steps))
    if ranks > count:
        raise RecipeError(
            f"{ranks} ranks cannot share the {count} blocks of {settings.steps} denoising steps; use --ranks {count} "
            "at most"
        )


def latents_in_time(
    predict: Predict,
    settings: SamplingSettings,
    *,
    num_samples: int,
    latent_shape: tuple[int, ...],
    device: torch.device,
    spacing: Spacing,
    crew: BlockRanks,
    model: str = "",
    on_step: Callable[[int, int], None] | None = None,
) -> Tensor:
    """The latents of new samples on every rank, (num_samples, *latent_shape), with steps computed at the same time.

    `crew`: the ranks that share the blocks of steps. `predict` and noise are as in `denoise.draw`.

    Raises:
        RecipeError: the scheduler's steps cannot be computed at the same time.
    """
    assert settings.tolerance is not None
    scheduler = build_scheduler(settings.scheduler, settings.scheduler_class)
    set_times(scheduler, settings.scheduler, settings.steps, spacing)
    walk = walk_of(scheduler)
    first = drawn_noise("sampling", settings, num_samples, latent_shape, model).to(device)
    first = first * getattr(scheduler, "init_noise_sigma", 1.0)

    def predicted(sample: Tensor, step: int) -> Tensor:
        prediction = predict(torch.cat([sample] * settings.copies), walk.timesteps[step])
        assert prediction is not None
        return guided(prediction.to(sample.dtype), settings, sample.shape[1])[:, : sample.shape[1]]

    begun = perf_counter()
    refined = draw_in_time(walk, predicted, first, tolerance=settings.tolerance, crew=crew, on_tick=on_step)
    if crew.rank == 0:
        logger.info(
            "refinements=%d drawing_s=%.2f evaluations_in_turn=%d in_place_of=%d evaluations=%d on_this_rank=%d",
            refined.refinements,
            perf_counter() - begun,
            refined.in_turn,
            len(walk.timesteps),
            refined.total,
            refined.on_this_rank,
        )
        if refined.in_turn >= len(walk.timesteps):
            logger.warning(
                "%d refinements took as long as %d steps in turn; raise the tolerance, or leave out --parallel-in-time",
                refined.refinements,
                len(walk.timesteps),
            )
    return refined.sample
