"""The samples that a run draws while it trains: what they show, and how they are drawn."""

from diffusionpipe.models.pipeline_defaults import check_drawn
from diffusionpipe.trainer.conditions import Wish, raw_conditions
from diffusionpipe.trainer.guidance import drawn_guidance
from diffusionpipe.trainer.members import Model
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.trainer.sampling import SamplingSettings, build_scheduler
from diffusionpipe.trainer.scheduler import sampling_scheduler
from diffusionpipe.trainer.session import Session


def check_sampling(session: Model) -> None:
    """Refuse before the first step what could not be drawn later.

    Raises:
        RecipeError: the prompts or labels do not suit the model, or there is no such scheduler.
    """
    if session.recipe.sampling.every is not None:
        check_drawn(session.folder)
        settings = sampling_settings(session)
        raw_conditions(wish_of(session.recipe), session.graph, session.folder, settings)
        build_scheduler(settings.scheduler, settings.scheduler_class)


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
        seed=recipe.training.seed if recipe.sampling.seed is None else recipe.sampling.seed,
        scheduler=sampling_scheduler(session.folder, session.prediction, recipe.objective.shift),
        scheduler_class=recipe.sampling.scheduler,
    )
