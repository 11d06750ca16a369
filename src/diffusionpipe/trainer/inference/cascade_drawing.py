"""Draws with several models, one after the other: each enlarges the pictures that the one before has drawn.

    caption ──> base ──> 8x8 pixels ──> enlarged, noised ──> super-resolution ──> 32x32 pixels

Through the pipelines that train (`draw_in_session`), every model has its own schedule over the same workers, maybe in
the opposite direction. The first worker shows the pictures of each, and brings them to all for the next.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from diffusionpipe.errors import RecipeError
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.trainer.data.sizes.sizes import stated_size
from diffusionpipe.trainer.inference.conditions import SampleRequest
from diffusionpipe.trainer.inference.denoise import SamplingSettings
from diffusionpipe.trainer.inference.drawing import (
    PLAIN,
    Arithmetic,
    Picture,
    decode,
    decoded_if_possible,
    latents_in_session,
    still,
)
from diffusionpipe.trainer.inference.folder_drawing import Source, latents_from_folder
from diffusionpipe.trainer.inference.known_pixels import with_known
from diffusionpipe.trainer.recipe.size_rules import sizes_of

if TYPE_CHECKING:
    from diffusionpipe.trainer.model.members import Member
    from diffusionpipe.trainer.recipe import Recipe
    from diffusionpipe.trainer.setup.session import Session

OnStep = Callable[[int, int], None]


def draw_in_session(
    session: "Session", wish: SampleRequest, settings: Sequence[SamplingSettings], *, on_step: OnStep | None = None
) -> tuple[list[Picture], ...] | None:
    """The pictures of each of the session's models on rank 0; None on other ranks, or without memory for pictures.

    With samples of several sizes only the last model's pictures are returned. Every rank of the job calls it. `wish`:
    the samples to draw. `settings`: one entry for each model. `on_step` is called with the number of denoising steps
    done and the number of all.
    """
    sizes = drawn_sizes(session.recipe, len(wish))
    pictures: dict[int, Picture] = {}
    for size in sorted(set(sizes)):  # in one order on all ranks, which draw together
        places = [place for place, own in enumerate(sizes) if own == size]
        drawn = _drawn_at(session, size, wish.part(places), settings, on_step)
        if len(places) == len(wish):
            return drawn
        if drawn is not None:
            pictures |= dict(zip(places, drawn[-1], strict=True))
    return ([pictures[place] for place in range(len(wish))],) if len(pictures) == len(wish) else None


def drawn_sizes(recipe: "Recipe", count: int) -> list[int]:
    """The index of the size of each of `count` pictures to draw, among the sizes that the model is built for.

    `sampling.sizes` names one size for all pictures, or one for each; without it all have size 0.
    """
    stated, built = recipe.sampling.sizes, sizes_of(recipe.data)
    numbers = [built.index(stated_size(text)) for text in stated]
    return numbers * count if len(numbers) == 1 else numbers or [0] * count


def _drawn_at(
    session: "Session", size: int, wish: SampleRequest, settings: Sequence[SamplingSettings], on_step: OnStep | None
) -> tuple[list[Picture], ...] | None:
    """The pictures of each model in the session, all of the size with index `size`; see `draw_in_session`."""
    drawn: list[list[Picture]] = []
    small: Tensor | None = None
    for index, member in enumerate(session.members):
        own = part_of(on_step, settings, index)
        latents = latents_in_session(session, member, wish, settings[index], small, size=size, on_step=own)
        if session.is_first:
            variant = member.recipe.model.variant
            # The latents are drawn by all ranks; only this one needs memory for pictures.
            pictures = None if latents is None else decoded_if_possible(member.folder, latents, variant)
            drawn.append([] if pictures is None else with_known(pictures, wish.known))
        if index < len(session.members) - 1:
            backbone = next(one for one in session.model.backbones if one.name == member.name)
            small = brought(latents, (len(wish), *session.model.tensor(backbone.noisy).shape), session.job)
    # A model whose pictures found no memory has an empty list.
    return tuple(drawn) if session.is_first and all(drawn) else None


def brought(latents: Tensor | None, shape: Sequence[int], job: Job) -> Tensor:
    """The latents of rank 0, float32, on every rank.

    Every rank calls it, other ranks with None. `shape`: the shape of all latents together.
    """
    if job.membership.rank > 0:
        latents = torch.empty(tuple(shape), dtype=torch.float32, device=job.device)
    assert latents is not None
    latents = latents.float().contiguous()
    dist.broadcast(latents, 0)
    return latents


def draw_from_folders(
    sources: Sequence[Source],
    wish: SampleRequest,
    settings: Sequence[SamplingSettings],
    *,
    device: torch.device,
    arithmetic: Arithmetic = PLAIN,
    on_step: OnStep | None = None,
) -> tuple[list[Picture], ...]:
    """The pictures of each of the models in these folders, drawn one after the other in one process.

    Each model after the first enlarges the pictures of the one before. `settings`: one entry for each model.

    Raises:
        ModelError: a folder is not one of a supported model, or the adapters are not of that model.
        RecipeError: prompts and labels do not suit the model.
    """
    drawn: list[list[Picture]] = []
    latents: Tensor | None = None
    for index, source in enumerate(sources):
        own = part_of(on_step, settings, index)
        small = latents if index else None
        latents = latents_from_folder(
            source, wish, settings[index], small, device=device, arithmetic=arithmetic, on_step=own
        )
        drawn.append(with_known(decode(source.folder, latents, source.variant), wish.known))
    return tuple(drawn)


def part_of(on_step: OnStep | None, settings: Sequence[SamplingSettings], index: int) -> OnStep | None:
    """A function for one model's steps that calls `on_step` with the steps done and the number of all models' steps.

    It is None if `on_step` is. `index`: the index of the model in `settings`.
    """
    if on_step is None or len(settings) == 1:
        return on_step
    before, total = sum(one.steps for one in settings[:index]), sum(one.steps for one in settings)
    return lambda done, _: on_step(before + done, total)


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeMember:
    """A model of a cascade by name, with the sides of the pictures that it draws and reads."""

    name: str
    resolution: int
    """The side in pixels of the pictures that it draws."""
    low: int | None
    """The side in pixels of the small pictures that it reads; None if it reads none."""


def links(members: Sequence["Member"]) -> list[CascadeMember]:
    """The name of each of a run's models and the sides of its pictures, in the order of drawing."""
    return [
        CascadeMember(
            name=member.name,
            resolution=member.recipe.data.resolution,
            low=None if member.low is None else member.low.resolution,
        )
        for member in members
    ]


def check_chain(chain: Sequence[CascadeMember]) -> None:
    """Refuses models that cannot draw one after the other, each from the pictures of the one before.

    Raises:
        RecipeError: names the model that does not read the pictures of the one before.
    """
    if chain[0].low is not None:
        raise RecipeError(
            f"{chain[0].name or 'the model'} draws from small pictures, which another model must draw first; train "
            "both, or draw with diffusers"
        )
    for before, link in pairwise(chain):
        if link.low is None:
            raise RecipeError(
                f"{link.name} does not read the pictures that {before.name} draws, so they cannot draw together; draw "
                'from each export, and set sampling.every to "none"'
            )
        if link.low != before.resolution:
            raise RecipeError(
                f"models.{link.name}.low_resolution: {link.low} are not the {before.resolution} pixels that "
                f"{before.name} draws; remove it, or set it to these"
            )


def shown(drawn: Sequence[list[Picture]]) -> list[Picture]:
    """The pictures for a grid: the pictures of one model, or of several models side by side; of clips some frames.

    `drawn`: the pictures of each model, the last ones the largest. Pictures side by side all have the side of the last
    model's:

        the first model's (squares) | ... | the last model's | the first model's, enlarged bicubically
    """
    if len(drawn) == 1:
        return [still(picture) for picture in drawn[0]]
    return [_beside(pictures) for pictures in zip(*drawn, strict=True)]


def captions_of(names: Sequence[str], captions: Sequence[str]) -> list[str]:
    """The text below each picture that `shown` makes: the names of its parts from the left, and the caption.

    `names`: the names of the models that drew.

    >>> captions_of(["base", "super"], ["a cat"])
    ['base | super | bicubic: a cat']
    >>> captions_of([""], ["a cat"])
    ['a cat']
    """
    if len(names) == 1:
        return list(captions)
    parts = " | ".join([*names, "bicubic"])
    return [f"{parts}: {caption}" for caption in captions]


def _beside(pictures: Sequence[Picture]) -> Picture:
    side = pictures[-1].shape[0]
    images = [Image.fromarray(np.ascontiguousarray(picture)) for picture in pictures]
    large = [image.resize((side, side), Image.Resampling.NEAREST) for image in images]
    return np.concatenate([*large, images[0].resize((side, side), Image.Resampling.BICUBIC)], axis=1)
