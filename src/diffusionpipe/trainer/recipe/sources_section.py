"""[data.sources.NAME], one of several folders that are trained on together, [data.columns] and [data.patches]."""

from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from diffusionpipe.ir.size import Clip
from diffusionpipe.trainer.data.masks.kinds import NAME
from diffusionpipe.trainer.data.scan.columns import Columns
from diffusionpipe.trainer.data.sizes.sizes import stated_size
from diffusionpipe.trainer.recipe.captions_section import CaptionsSection
from diffusionpipe.trainer.recipe.section import Auto, Maybe, Place, Positive, ProperFraction, Section, Several, of_user

_EXAMPLE = 'give sides in pixels, or sizes such as "768x512"; e.g. [512, "768x512"]'
_LONGEST = 65_536
"""The longest side of a size in pixels, and the most frames."""


def pattern_of_masks(pattern: str) -> str:
    """The same pattern of the paths of masks; pydantic calls it to check the pattern.

    Raises:
        ValueError: it does not hold {name}, which the picture's name replaces.
    """
    if NAME not in pattern:
        raise ValueError(f': the path of each picture\'s mask holds {NAME}, e.g. "masks/{NAME}.png"')
    return pattern


def one_or_several(value: object) -> object:
    """A list of the one size, if the value is a size, for a key that takes a size or a list; else the value itself.

    "none" is not a size.
    """
    return [value] if isinstance(value, int | str) and value != "none" else value


def stated_sizes(stated: Sequence[object]) -> list[Clip]:
    """The sizes that a recipe states, in its order; a side is a square.

    Raises:
        ValueError: one of them is not a size.
    """
    if not stated:
        raise ValueError(_EXAMPLE)
    sizes = []
    for one in stated:
        if not isinstance(one, int | str) or isinstance(one, bool):
            raise ValueError(f"{one!r} is not a size; {_EXAMPLE}")
        size = stated_size(one) if isinstance(one, str) else Clip.square(one)
        if not all(0 < number <= _LONGEST for number in (size.width, size.height, size.frames)):
            raise ValueError(f"{one!r} is not from 1 to {_LONGEST:,}; {_EXAMPLE}")
        sizes.append(size)
    return sizes


def checked_sizes(stated: Sequence[int | str]) -> Sequence[int | str]:
    """The same sizes; pydantic calls it to check them.

    Raises:
        ValueError: one of them is not a size.
    """
    try:
        stated_sizes(stated)
    except ValueError as error:
        raise ValueError(f": {error}") from None
    return stated


Resolutions = Annotated[Several[int | str], BeforeValidator(one_or_several), AfterValidator(checked_sizes)]
MaskPattern = Annotated[str, Field(min_length=1), AfterValidator(of_user), AfterValidator(pattern_of_masks)]


class ColumnsSection(Section):
    """[data.columns]: the columns of tables."""

    image: str = "image"
    """The column of pictures: their bytes, or the paths of their files."""
    text: str = "text"
    """The column of captions, each a text or a list of texts, which are several captions."""
    label: str = "label"
    """The column of classes."""
    split: str = "train"
    """The split that is read of a saved data set."""

    @property
    def columns(self) -> Columns:
        """The names of the columns and of the split, in the form that a scan reads."""
        return Columns(image=self.image, text=self.text, label=self.label, split=self.split)


class SourceSection(Section):
    """[data.sources.NAME]: one of several folders that are trained on together."""

    path: Place
    """A folder, shards or a table, as data.train is."""
    resolution: Maybe[Resolutions] = None
    """The sizes of its samples, as in `data.resolution`; `"none"`: the sizes of all sources."""
    repeats: Auto[Annotated[int, Field(ge=1, le=10_000)]] = None
    """Times that an epoch has each of its samples, each time with a view, a noise and a text of its own; `"auto"`: 1,
    but all regularisation sets together get about the samples of all others."""
    regularisation: bool = False
    """Whether it is a set of pictures of the general kind, which keep the model from forgetting it. They have no
    trigger word."""
    loss_weight: Positive = 1.0
    """Factor of the loss of its samples."""
    loss_mask: Maybe[MaskPattern] = None
    """The path of each picture's mask of the loss, instead of `data.loss_mask`; `"none"`: `data.loss_mask`."""
    columns: Maybe[ColumnsSection] = None
    """All keys of [data.columns] for this source; `"none"`: as `[data.columns]` says."""
    captions: Maybe[CaptionsSection] = None
    """All keys of [data.captions] for this source; `"none"`: as `[data.captions]` says."""

    @model_validator(mode="after")
    def _trigger_is_of_new_pictures(self) -> Self:
        if self.regularisation and self.captions is not None and self.captions.trigger is not None:
            raise ValueError("captions.trigger: a regularisation set has no trigger word; remove it")
        return self


class PatchesSection(Section):
    """[data.patches]: training on patches of pictures."""

    share_whole: ProperFraction = 0.5
    """The share of steps on whole pictures; the others have patches of a half of their side, or also of a quarter where
    the model has no autoencoder."""
