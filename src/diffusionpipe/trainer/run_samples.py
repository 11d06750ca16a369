"""The samples that a run draws while it trains: what they show, and how they are drawn."""

import torch

from diffusionpipe.models.folder import family_of
from diffusionpipe.trainer.conditions import Wish, raw_conditions
from diffusionpipe.trainer.guidance import drawn_guidance
from diffusionpipe.trainer.members import Model
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.trainer.sampling import SamplingSettings, build_scheduler
from diffusionpipe.trainer.scheduler import sampling_scheduler
from diffusionpipe.trainer.session import Session
from diffusionpipe.trainer.stand_in import Order, check_pipeline


def check_sampling(session: Model) -> None:
    """Refuse before the first step what could not be drawn later.

    Raises:
        RecipeError: the prompts or labels do not suit the model, or there is no such scheduler.
    """
    if session.recipe.sampling.every is not None:
        settings = sampling_settings(session)
        raw_conditions(wish_of(session.recipe), session.graph, session.folder, settings)
        build_scheduler(settings.scheduler, settings.scheduler_class)
        if family_of(session.folder).call is not None:
            check_pipeline(
                Order(
                    folder=session.folder,
                    settings=settings,
                    num_samples=1,
                    latents=session.model.tensor("noisy").shape,
                    resolution=session.recipe.data.resolution,
                    device=torch.device("cpu"),
                )
            )


def wish_of(recipe: Recipe) -> Wish:
    """What the run draws: its prompts or labels."""
    drawn = recipe.sampling
    return Wish(prompts=drawn.prompts, labels=drawn.labels, negatives=drawn.negatives)


def sampling_settings(session: Session | Model) -> SamplingSettings:
    """How the run draws samples: with the scheduler that its export will have."""
    recipe = session.recipe
    guidance = drawn_guidance(recipe, session.folder)
    return SamplingSettings(
        steps=recipe.sampling.steps,
        guidance=guidance.scale,
        embedded_guidance=guidance.embedded,
        unguided=guidance.unguided,
        seed=recipe.training.seed if recipe.sampling.seed is None else recipe.sampling.seed,
        scheduler=sampling_scheduler(session.folder, session.prediction, recipe.objective.shift),
        scheduler_class=recipe.sampling.scheduler,
    )
