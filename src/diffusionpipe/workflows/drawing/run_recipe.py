"""How a run draws pictures: from the recipe in its folder, which may be a stranger's."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusionpipe.models.base.family import CaptionReading, Clip
    from diffusionpipe.trainer.recipe import RecipePrecision, SamplingSection

_OF_CHECKPOINTS = "adapters"
"""The folder of a run that has the adapters of its checkpoints; `trainer` is imported only where it is used."""
_RECIPE = "recipe.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSize:
    """The size of pictures or clips to draw: side, height, frames and frames a second, as the keys of [data]."""

    resolution: int
    height: int | None = None
    frames: int | None = None
    frame_rate: float | None = None

    @property
    def played(self) -> float | None:
        """The frames a second with which a clip is shown; None for a picture."""
        from diffusionpipe.trainer.data.decoding.clips import PLAYED

        return None if self.frames is None else self.frame_rate or PLAYED

    @property
    def sample(self) -> "Clip":
        """The width, height and frames of each picture or clip."""
        from diffusionpipe.models.base.family import Clip

        return self.clip or Clip.square(self.resolution)

    @property
    def clip(self) -> "Clip | None":
        """The width, height and frames of a clip or of a picture that is not square; None for square pictures."""
        from diffusionpipe.trainer.model.members import clip_of_size

        return clip_of_size(self.resolution, self.height, self.frames)


def sampling_of(run: Path) -> "SamplingSection":
    """The section [sampling] of the run's recipe, or its defaults without one.

    Raises:
        ConfigError: the recipe cannot be read, or the section is wrong; the message names the file and the key.
    """
    from pydantic import ValidationError

    from diffusionpipe.errors import ConfigError
    from diffusionpipe.trainer.recipe import SamplingSection

    recipe = recipe_of(run)
    values = _table(recipe).get("sampling", {})
    try:
        return SamplingSection.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(("sampling", *map(str, first["loc"])))
        raise ConfigError(f"{recipe}: {key}: {first['msg']}; correct it, or remove the section [sampling]") from error


def size_of(run: Path, folder: Path, resolution: int | None, height: int | None, frames: int | None) -> SampleSize:
    """The size to draw: as given, for the rest as the run was trained, else as diffusers' pipeline draws.

    With a resolution and no height, pictures and clips are square; 1 frame is a picture. Of several sizes of a run the
    largest is drawn, as the run itself does.

    Raises:
        ConfigError: the run's recipe names no size.
    """
    from diffusionpipe.models.opening.pipeline_defaults import default_resolution

    recipe = recipe_of(run)
    own = _trained_size(recipe) if recipe.is_file() else None
    if own is None:
        own = SampleSize(resolution=resolution or default_resolution(folder))
    if resolution is not None:
        own = replace(own, resolution=resolution, height=None)
    frames = own.frames if frames is None else frames
    return replace(own, height=own.height if height is None else height, frames=None if frames == 1 else frames)


def _trained_size(recipe: Path) -> SampleSize:
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.trainer.inference.clip_rate import kept_rate

    data = _table(recipe).get("data")
    found = {} if not isinstance(data, dict) else {key: data[key] for key in SampleSize.__slots__ if key in data}
    if isinstance(data, dict) and data.get("sizes"):
        found |= _largest_size(recipe, data)
    # TOML has no null, so a resolved recipe writes "none".
    found = {key: value for key, value in found.items() if value != "none"}
    for key in ("resolution", "height", "frames"):
        value = found.get(key, None if key == "resolution" else 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            remedy = f"correct it, or give --{key}"
            raise ConfigError(f"{recipe}: data.{key} must be a whole number of at least 1; {remedy}")
    rate = found.get("frame_rate", 1)
    if not isinstance(rate, int | float) or not rate > 0:
        raise ConfigError(f"{recipe}: data.frame_rate must be a number above 0; correct it")
    if "frames" in found and "frame_rate" not in found:
        found["frame_rate"] = kept_rate(recipe.parent)
    return SampleSize(**found)


def _largest_size(recipe: Path, data: dict[str, Any]) -> dict[str, object]:
    """The largest size of a run that has several, as "resolution", "height" and "frames"; "none" for a missing value.

    `data`: the section [data] of the run's recipe, the file `recipe`.

    Raises:
        ConfigError: the sizes cannot be read.
    """
    from pydantic import ValidationError

    from diffusionpipe.errors import ConfigError
    from diffusionpipe.trainer.recipe import DataSection
    from diffusionpipe.trainer.recipe.size_rules import sizes_of

    try:
        size = sizes_of(DataSection.model_validate(data))[0]
    except ValueError as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ConfigError(f"{recipe}: data.sizes cannot be read: {why}; correct or remove them") from error
    stated = zip(("resolution", "height", "frames"), size.stated, strict=True)
    return {key: "none" if value is None else value for key, value in stated}


def precision_of(run: Path) -> "RecipePrecision":
    """The precision in which the run was trained; float32 where there is no run.

    Raises:
        ConfigError: the run's recipe names none that there is.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.trainer.recipe import RecipePrecision

    recipe = recipe_of(run)
    training = _table(recipe).get("training", {})
    named = training.get("precision", RecipePrecision.FLOAT32) if isinstance(training, dict) else training
    # A run has settled on an arithmetic, so "auto" is not in its recipe.
    known = ", ".join(one for one in RecipePrecision if one is not RecipePrecision.AUTO)
    if named not in known.split(", "):
        raise ConfigError(f"{recipe}: training.precision must be one of {known}; correct it, or give --precision")
    return RecipePrecision(str(named))


def captions_of(run: Path, chunks: int | None, clip_skip: int | None) -> "CaptionReading":
    """How texts are read: with the given number of chunks and of skipped layers; if None, as the run was trained.

    Raises:
        ConfigError: the run's recipe has a value that cannot be.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.models.base.family import MOST_CHUNKS, CaptionReading

    recipe = recipe_of(run)
    data = _table(recipe).get("data")
    own = {key: value for key, value in data.items() if value != "none"} if isinstance(data, dict) else {}
    found: dict[str, Any] = {
        "caption_chunks": chunks or own.get("caption_chunks", 1),
        "clip_skip": clip_skip or own.get("clip_skip"),
    }
    for key, most in (("caption_chunks", MOST_CHUNKS), ("clip_skip", 2**53)):
        value = 1 if found[key] is None else found[key]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            remedy = f"correct it, or give --{key.replace('_', '-')}"
            raise ConfigError(f"{recipe}: data.{key} must be a whole number from 1 to {most}; {remedy}")
    return CaptionReading(chunks=found["caption_chunks"], clip_skip=found["clip_skip"])


def validation_of(run: Path) -> Path | None:
    """The folder of the run's validation data; None where there is no run, or it has none.

    Raises:
        ConfigError: the run's recipe cannot be read.
    """
    data = _table(recipe_of(run)).get("data")
    folder = data.get("validation") if isinstance(data, dict) else None
    return Path(folder) if isinstance(folder, str) and folder != "none" else None


def recipe_of(run: Path) -> Path:
    """The path of the resolved recipe of a run, of its export/ or of a folder in its adapters/.

    The file need not be there.
    """
    if run.is_file():
        return run / _RECIPE  # which is not there: a file may lie anywhere
    # A run's own folder, its export/, or adapters/step-N/ in it.
    places = [run, run.parent, *([run.parent.parent] if run.parent.name == _OF_CHECKPOINTS else [])]
    return next((place / _RECIPE for place in places if (place / _RECIPE).is_file()), run.parent / _RECIPE)


def _table(recipe: Path) -> dict[str, object]:
    """Name -> value of each section of a recipe's file; {} where there is no file.

    Raises:
        ConfigError: the file cannot be read.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.files.input_file import read_text

    if not recipe.is_file():
        return {}
    try:
        return tomllib.loads(read_text(recipe))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{recipe}: cannot be read: {error}; restore or remove it") from error
    except RecursionError:
        raise ConfigError(f"{recipe}: cannot be read: it is nested too deeply; restore or remove it") from None
