"""The samples that a run draws while it trains: their contents, and how they are drawn."""

import torch

from diffusionpipe.models.opening.folder import family_of
from diffusionpipe.trainer.inference.cascade_drawing import check_chain, links
from diffusionpipe.trainer.inference.conditions import (
    SampleRequest,
    check_noise_level,
    is_steered,
    raw_conditions,
    steering_pictures,
)
from diffusionpipe.trainer.inference.denoise import SamplingSettings, build_scheduler, set_times
from diffusionpipe.trainer.inference.diffusers_pipeline import Order, check_pipeline
from diffusionpipe.trainer.inference.drawing import spacing_of
from diffusionpipe.trainer.inference.known_pixels import known_of
from diffusionpipe.trainer.model.guidance import drawn_guidance
from diffusionpipe.trainer.model.members import Member, RecipeModels, clip_of, folder_of, learns_variance
from diffusionpipe.trainer.model.scheduler import sampling_scheduler
from diffusionpipe.trainer.recipe import Recipe


def check_sampling(session: RecipeModels) -> None:
    """Refuses samples that could not be drawn later, before the first step; passes where the recipe draws none.

    Raises:
        RecipeError: the prompts, labels or level of noise do not suit a model, there is no such scheduler, or one of
            several models does not read the pictures that the model before draws.
        DataError: a picture has no conditioning picture, or cannot be decoded.
    """
    if session.recipe.sampling.every is None:
        return
    check_chain(links(session.members))
    for member in session.members:
        settings = sampling_settings(member)
        check_noise_level(member.folder, settings)
        raw_conditions(request_of(session.recipe), member.graph, member.folder, settings)
        scheduler = build_scheduler(settings.scheduler, settings.scheduler_class)
        if family_of(member.folder).call is not None:
            backbone = next(one for one in session.model.backbones if one.name == member.name)
            check_pipeline(
                Order(
                    folder=member.folder,
                    variant=member.recipe.model.variant,
                    settings=settings,
                    num_samples=1,
                    latents=session.model.tensor(backbone.noisy).shape,
                    resolution=member.recipe.data.resolution,
                    clip=clip_of(member.recipe),
                    device=torch.device("cpu"),
                )
            )
        else:
            set_times(scheduler, settings.scheduler, settings.steps, spacing_of(member.graph))


def request_of(recipe: Recipe, rate: float | None = None) -> SampleRequest:
    """The samples that the run draws: its prompts, for a ControlNet with the validation data's pictures, or its labels.

    `rate`: the frames per second of clips.

    Raises:
        DataError: a picture of the validation data has no conditioning picture.
        RecipeError: the numbers of pictures, masks and prompts differ, or a file is missing.
    """
    drawn, data = recipe.sampling, recipe.data.validation
    is_first_steered = is_steered(folder_of(recipe.alone(recipe.backbones[0])))
    return SampleRequest(
        prompts=drawn.prompts,
        labels=drawn.labels,
        negatives=drawn.negatives,
        conditions=steering_pictures(data, len(drawn.prompts)) if is_first_steered and data is not None else (),
        known=known_of(drawn.images, drawn.masks, len(drawn.prompts)) if drawn.every is not None else (),
        frame_rate=rate,
    )


def sampling_settings(member: Member) -> SamplingSettings:
    """The steps, guidance, seed and scheduler with which the run draws from one of its models.

    The scheduler is the same as in the model's export.

    Raises:
        RecipeError: a key of guidance has no effect on the model.
    """
    recipe = member.recipe
    guidance = drawn_guidance(recipe, member.folder)
    return SamplingSettings(
        steps=recipe.sampling.steps,
        guidance=guidance.scale,
        embedded_guidance=guidance.embedded,
        unguided=guidance.unguided,
        seed=recipe.training.seed if recipe.sampling.seed is None else recipe.sampling.seed,
        scheduler=sampling_scheduler(
            member.folder,
            member.prediction,
            recipe.objective.shift,
            has_learned_range=learns_variance(recipe, member.folder),
        ),
        scheduler_class=recipe.sampling.scheduler,
        noise_level=None if member.low is None else recipe.sampling.noise_level,
    )
