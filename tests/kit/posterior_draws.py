"""The draws from the posteriors of pictures in a run: moments, noise and latents, as the layer that draws has them."""

from typing import NamedTuple
from unittest import mock

from kit.cached_runs import train_in_small_shards
from torch import Tensor

from diffusionpipe.models.parts import autoencoder
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.trainer.recipe import Recipe


class PosteriorDraw(NamedTuple):
    """One draw, of one picture in one step."""

    moments: Tensor
    """Mean and logarithm of the variance, (2 C, H, W)."""
    noise: Tensor
    """(C, H, W)."""
    latents: Tensor
    """(C, H, W), before they are scaled."""


def posterior_draws(job: Job, recipe: Recipe, resume: str | None = None) -> list[PosteriorDraw]:
    """The draws on this rank while it trains, in their order."""
    found: list[PosteriorDraw] = []
    draw = autoencoder.posterior_sample

    def noted(moments: Tensor, posterior_noise: Tensor) -> Tensor:
        latents = draw(moments, posterior_noise)
        rows = zip(moments.clone(), posterior_noise.clone(), latents.clone(), strict=True)
        found.extend(PosteriorDraw(*row) for row in rows)
        return latents

    with mock.patch.object(autoencoder, "posterior_sample", noted):
        train_in_small_shards(job, recipe, resume)
    return found
