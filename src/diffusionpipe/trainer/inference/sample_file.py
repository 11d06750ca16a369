"""PNG files of single pictures and clips, which say how they were drawn, so that they can be drawn again.

A clip is an animated PNG, which web browsers play.

samples/step-00000500/000-a-blue-tit-on-a-branch.png

Every key is a text chunk of the file (`identify -verbose`, `exiftool` and picture viewers show them):

prompt            a blue tit on a branch             the given prompt; label instead, for a class model
negative_prompt   blurry
condition         validation/edges/1.png             the picture that steered a ControlNet
steps, guidance, seed, scheduler, ...                the fields of `SamplingSettings`, as JSON
index, count      0, 2                               which picture of those that were drawn together
rows              4                                  rows that went through the denoiser at a time
resolution, precision                                height, frames and frame_rate too of a sample that is not a square
                                                     picture
caption_chunks        2                              where texts were read in chunks; clip_skip too
model             models/stable-diffusion-v1-5
training_step     500
weights           average
Software          DiffusionPipe 0.1.0

Equal bits need `index`, `count` and `rows`: the first noise belongs to the index, schedulers that draw noise draw it
for all pictures together, and a matrix product rounds by its number of rows.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffusionpipe.errors import ConfigError
from diffusionpipe.files.input_file import problem_of_file
from diffusionpipe.files.output_file import reason_of, write_atomically
from diffusionpipe.ir.locales import for_file_names
from diffusionpipe.models.base.family import MOST_CHUNKS, CaptionReading
from diffusionpipe.trainer.data.decoding.clips import PLAYED
from diffusionpipe.trainer.inference.denoise import SamplingSettings
from diffusionpipe.trainer.recipe import RecipePrecision

_MAX_SLUG = 48
_MOST = 10_000
"""The largest number of pictures drawn together, of their rows, and of denoising steps."""
_SOFTWARE = "Software"
_CLIP = 4
"""The number of dimensions of a clip's array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrigin:
    """The facts by which one picture can be drawn again: model, settings, prompt or label, size, index among others."""

    settings: SamplingSettings
    prompt: str | None = None
    """The prompt; None for a model of classes."""
    negative_prompt: str | None = None
    """The negative prompt, which may be empty; None: there was none."""
    label: int | None = None
    """The class that it shows; None for a model that reads captions."""
    condition: str | None = None
    """The path of the conditioning picture; None for models that read none."""
    image: str | None = None
    """The path of the picture whose hole was filled; None for other models."""
    mask: str | None = None
    """The path of the mask of that picture; None if it has none."""
    index: int = 0
    """The index of the picture among the pictures that were drawn together."""
    count: int = 1
    """The number of pictures that were drawn together."""
    rows: int | None = None
    """The number of rows that went through the denoiser at a time; None: all."""
    resolution: int
    """The width in pixels."""
    height: int | None = None
    """The height in pixels, as in the recipe's [data]; None: the same as the width."""
    frames: int | None = None
    """The number of frames of a clip, as in the recipe's [data]; None: a picture."""
    frame_rate: float | None = None
    """The frames per second of a clip; None: it is shown with `PLAYED` of them."""
    caption_chunks: int | None = None
    """The number of chunks in which captions were read; None: one."""
    clip_skip: int | None = None
    """The layer of CLIP that gave the states, counted from the last one, which is 1; None: the last one."""
    precision: RecipePrecision
    model: str
    """The base model as the recipe names it, or the folder."""
    training_step: int | None = None
    """The number of training steps before it was drawn; None for a folder's weights."""
    weights: str
    """"average" or "trained" where a run drew it, "export" or "folder" where `diffusionpipe sample` did."""

    @property
    def captions(self) -> CaptionReading:
        """The way in which its texts were read: the number of chunks, and the layer of CLIP that gave the states."""
        return CaptionReading(chunks=self.caption_chunks or 1, clip_skip=self.clip_skip)

    @property
    def caption(self) -> str:
        """The text for the picture: its prompt, or "class N"."""
        return self.prompt if self.prompt is not None else f"class {self.label}"


def file_name(origin: SampleOrigin) -> str:
    """The name of a picture's file: its index and the start of its caption in plain letters.

    For example 000-a-blue-tit.png.
    """
    words = re.sub(r"[\W_]+", "-", for_file_names(origin.caption.lower())).strip("-")
    return f"{origin.index:03d}-{words[:_MAX_SLUG].strip('-')}".strip("-") + ".png"


def write_sample(picture: NDArray[np.uint8], origin: SampleOrigin, path: Path) -> None:
    """Writes a PNG of the picture, (H, W, 3), or clip, (F, H, W, 3), with its origin as text; makes the folder.

    Raises:
        ConfigError: the file cannot be written.
    """
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    chunks = PngInfo()
    for key, text in _texts(origin).items():
        chunks.add_itxt(key, text)
    drawn = BytesIO()
    first, *others = (Image.fromarray(frame) for frame in (picture if picture.ndim == _CLIP else picture[None]))
    played = {"save_all": True, "append_images": others, "duration": 1000 / (origin.frame_rate or PLAYED), "loop": 0}
    first.save(drawn, format="PNG", pnginfo=chunks, **(played if others else {}))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {reason_of(error)}; choose a folder that can be made") from error
    write_atomically(path, drawn.getvalue())


def read_origin(path: Path) -> SampleOrigin:
    """The facts by which the picture in a PNG file was drawn.

    Raises:
        ConfigError: the file is not a picture, or does not say how it was drawn.
    """
    from diffusionpipe.trainer.data.decoding.picture_file import opened_picture

    if problem := problem_of_file(path):
        raise ConfigError(f"{path} cannot be read as a picture: {problem}")
    try:
        with opened_picture(path) as image:
            image.load()  # text may follow the pixels
            chunks: Mapping[str, str] = dict(getattr(image, "text", {}))
    except Exception as error:  # Pillow's readers raise whatever their parsers stumble over
        raise ConfigError(f"{path} cannot be read as a picture: {error}") from error
    try:
        origin = _origin(chunks)
        _check(origin)
        return origin
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path} does not say how it was drawn ({error!r}); give a picture of a run's samples/step-*/ folders, or "
            "one that `diffusionpipe sample --keep` has written, as it was written"
        ) from error


def _texts(origin: SampleOrigin) -> dict[str, str]:
    """The text chunks of the file by name: fields that are not None, texts as they are and other values as JSON."""
    values: dict[str, Any] = {field.name: getattr(origin, field.name) for field in fields(origin)}
    values |= asdict(values.pop("settings"))
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    kept = {key: text for key, text in texts.items() if values[key] is not None}
    return {**kept, _SOFTWARE: f"DiffusionPipe {version('diffusionpipe')}"}


def _origin(chunks: Mapping[str, str]) -> SampleOrigin:
    names = {field.name for field in fields(SamplingSettings)}
    settings = {key: _value(key, text) for key, text in chunks.items() if key in names}
    own = {field.name for field in fields(SampleOrigin)} - {"settings"}
    values = {key: _value(key, text) for key, text in chunks.items() if key in own}
    values["precision"] = RecipePrecision(values["precision"])
    return SampleOrigin(settings=SamplingSettings(**settings), **values)


def _check(origin: SampleOrigin) -> None:
    """Refuses an origin that no picture of ours has: the file may be a stranger's.

    Raises:
        ValueError: names the first impossible field.
    """
    settings = origin.settings
    whole = {
        "steps": (settings.steps, 1, _MOST),
        "seed": (settings.seed, -(2**63), 2**63 - 1),
        "index": (origin.index, 0, _MOST),
        "count": (origin.count, 1, _MOST),
        "rows": (1 if origin.rows is None else origin.rows, 1, _MOST),
        "resolution": (origin.resolution, 1, 2**24),
        "height": (1 if origin.height is None else origin.height, 1, 2**24),
        "frames": (1 if origin.frames is None else origin.frames, 1, _MOST),
        "caption_chunks": (origin.caption_chunks or 1, 1, MOST_CHUNKS),
        "clip_skip": (origin.clip_skip or 1, 1, _MOST),
        "label": (origin.label or 0, 0, 2**31),
        "training_step": (origin.training_step or 0, 0, 2**62),
    }
    # A bool is an int too.
    wrong = [name for name, (value, low, high) in whole.items() if type(value) is not int or not low <= value <= high]
    strengths = {name: getattr(settings, name) for name in ("guidance", "embedded_guidance", "unguided")}
    wrong += [n for n, value in strengths.items() if not _is_strength(value, is_optional=n == "embedded_guidance")]
    if settings.tolerance is not None and not _is_strength(settings.tolerance, is_optional=False):
        wrong.append("tolerance")
    if not isinstance(settings.scheduler, dict):
        wrong.append("scheduler")
    if (origin.prompt is None) == (origin.label is None):
        wrong.append("prompt or label")
    if origin.image is None and origin.mask is not None:
        wrong.append("image or mask")
    if not wrong and origin.index >= origin.count:
        wrong.append("index")
    if wrong:
        raise ValueError(f"it has an impossible {wrong[0]}")


def _is_strength(value: object, *, is_optional: bool) -> bool:
    if value is None:
        return is_optional
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9


def _value(key: str, text: str) -> Any:  # whatever JSON holds
    is_text = key in {
        "prompt",
        "negative_prompt",
        "condition",
        "image",
        "mask",
        "precision",
        "model",
        "weights",
        "scheduler_class",
    }
    return str(text) if is_text else json.loads(text)
