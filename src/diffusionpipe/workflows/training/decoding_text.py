"""The memory for decoding the samples of a run, in a sentence that is shown before anything long starts."""

from collections.abc import Sequence
from dataclasses import replace
from textwrap import wrap
from typing import TYPE_CHECKING

from diffusionpipe.costs import Profile
from diffusionpipe.costs.decoding import Decoding
from diffusionpipe.holding.memory import Trait
from diffusionpipe.planner.drawing.drawing import decoder_use
from diffusionpipe.units import Bytes

if TYPE_CHECKING:
    from diffusionpipe.planner.choosing.chosen import Choice
    from diffusionpipe.trainer.recipe import Recipe

GIB = 2**30


def samples_shown(recipe: "Recipe") -> int:
    """The number of samples that a recipe draws at a time while it trains; 0 for none."""
    drawn = recipe.sampling
    return (len(drawn.prompts) or len(drawn.labels)) if drawn.every else 0


def decoding_of_recipe(recipe: "Recipe") -> Decoding | None:
    """The bytes of decoding by the recipe's VAE that takes most; None where nothing is drawn, or without a VAE.

    Raises:
        ModelError: there is no model folder, or its configuration makes no VAE.
    """
    from diffusionpipe.trainer.inference.decoding import folder_decoding
    from diffusionpipe.trainer.model.members import folder_of, sample_size

    models = (recipe.alone(name) for name in recipe.backbones) if samples_shown(recipe) else ()
    found = (folder_decoding(folder_of(one), sample_size(one)) for one in models)
    return max((one for one in found if one is not None), key=lambda one: one.whole, default=None)


def decoding_lines(choice: "Choice", recipe: "Recipe", *, width: int) -> Sequence[str]:
    """Lines of at most `width` columns on how a run by this plan decodes its samples; () where it draws none."""
    # Rank 0 decodes, beside what stays on its device.
    room = choice.setting.cluster.devices[0].memory - choice.proposal.memory[0].having(Trait.LASTING)
    known = replace(choice.setting.profile, decoding=decoding_of_recipe(recipe))
    text = decoding_text(known, samples_shown(recipe), room)
    return wrap(f"Samples while training: {text}.", width, break_on_hyphens=False) if text else ()


def decoding_text(profile: Profile, samples: int, room: Bytes) -> str:
    """How rank 0 decodes `samples` samples, as a text: whole, by tiles, or not at all; "" where that is not known.

    `room`: the bytes of its device's memory that nothing else uses. Weights of the VAE count, and all latents.
    """
    if profile.decoding is None:
        return ""
    taken, is_tiled = decoder_use(profile, samples, room)
    # With endless room nothing is tiled.
    whole, _ = decoder_use(profile, samples, 2**62)
    left = f"{max(room, 0) / GIB:.1f} GiB are left"
    if not is_tiled and whole <= room:
        return f"rank 0 decodes one sample at a time, each as a whole: {whole / GIB:.1f} GiB, and {left}"
    if not is_tiled:
        return (
            f"rank 0 decodes one sample at a time and needs {whole / GIB:.1f} GiB for it, but {left}; draw smaller "
            "samples, or leave sampling.every out"
        )
    way = f"rank 0 decodes one sample at a time, tile by tile: {taken / GIB:.1f} GiB"
    if taken > room:
        return f"{way}, but {left}; draw smaller samples, or leave sampling.every out"
    return f"{way}, because a whole one needs {whole / GIB:.1f} GiB, and {left}; tiles are blended and differ a little"
