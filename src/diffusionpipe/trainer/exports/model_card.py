"""The README.md of an exported model: the contents of the files, how to draw a picture from them, and the recipe."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffusionpipe.models.objectives.objective import Prediction
from diffusionpipe.models.opening.folder import is_hub_id
from diffusionpipe.trainer.exports.card_snippet import FILLING, FOLDER, OF_CLASSES, OF_CLIPS, Example, command, snippet
from diffusionpipe.trainer.recipe import Recipe, tables_of, tables_to_toml

_FREE_TEXT = ("prompts", "negative_prompt", "negative_prompts")
"""The keys of a recipe whose texts may hold slashes without being paths."""

_OF_ESTIMATES = """The denoiser was trained with self-conditioning: beside the noisy latents it reads its own
estimate of the clean ones, from the step before (zeros at the first step). So it has twice the input channels. The
pipelines of diffusers open these files, but do not feed the estimate back, and cannot draw with them."""
_OF_COORDINATES = """The denoiser was trained on patches: after the noisy samples it reads two channels more, with the
place of each pixel or latent in the whole picture, x and y from -1 to 1. The pipelines of diffusers open these files,
but do not give the coordinates, and cannot draw with them."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """The facts about trained adapters on a model card: rank, form, file for ComfyUI and trigger words."""

    rank: int
    is_merged: bool
    """Whether they are added to the base model's weights, so that the files hold the whole model."""
    comfy: str | None = None
    """The name of the file for ComfyUI; None without one."""
    trigger: str | None = None
    """The words that stood for the subject in the captions; None without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The facts on a model card: base model, trained parts, scheduler, example and recipe."""

    pipeline: str
    """The name of the diffusers pipeline that opens the export."""
    base_model: str
    """The base model's hub id or folder."""
    trained: tuple[str, ...]
    """The names of the trained components."""
    prediction: Prediction
    step: int
    """The number of training steps."""
    is_average: bool
    """Whether the files hold the moving average of the trained weights."""
    copied: tuple[str, ...] = ()
    """The names of components that are copied from the base model."""
    left_out: tuple[str, ...] = ()
    """The names of the pipeline's components that neither the base folder nor the export has."""
    own_scheduler: Mapping[str, Any]
    """The configuration of the base model's scheduler."""
    scheduler: Mapping[str, Any]
    """The configuration of the scheduler that samples the trained model."""
    example: Example
    """The picture or clip that the program on the card draws."""
    recipe: Recipe | None = None
    """The recipe of the run; None where there is none."""
    self_conditioning: bool = False
    """Whether the denoiser reads its own estimate."""
    is_placed: bool = False
    """Whether the denoiser reads coordinates."""
    adapters: Adapters | None = None
    """The facts about trained adapters; None if whole weights were trained."""

    @property
    def are_alone(self) -> bool:
        """Whether the files hold adapters and nothing else."""
        return self.adapters is not None and not self.adapters.is_merged


def model_card(card: Card) -> str:
    """The text of an export's README.md, with the metadata of the Hugging Face Hub.

    It names no path of this machine.
    """
    name = public_name(card.base_model)
    title = f"Adapters for {name}" if card.are_alone else f"{card.pipeline} trained from {name}"
    parts = [
        _head(card),
        f"# {title}\n",
        f"Trained with DiffusionPipe: {_subject(card)}, {card.step} steps, objective `{card.prediction}`.\n",
        _contents(card) + "\n",
        "## Sampling\n",
        _snippet(card, name),
    ]
    if card.recipe is not None:
        parts += ["## Recipe\n", f"```toml\n{public_recipe(card.recipe).strip()}\n```\n"]
    return "\n".join(parts)


def _snippet(card: Card, name: str) -> str:
    """The part of the card that draws a picture: a program for diffusers, or a command.

    `name`: the public name of the base model.
    """
    if card.self_conditioning or card.is_placed:
        reason = _OF_ESTIMATES if card.self_conditioning else _OF_COORDINATES
        return command(reason, card.example, card.pipeline, FOLDER)
    return snippet(
        card.example,
        pipeline=card.pipeline,
        prediction=card.prediction,
        base_model=name if card.are_alone else None,
        is_on_hub=is_hub_id(card.base_model),
        config=_config(card),
        scheduler=card.scheduler if card.are_alone and card.scheduler != card.own_scheduler else None,
    )


def _config(card: Card) -> str | None:
    """The folder or id of the configurations if the base model is one file; None if it is a folder."""
    config = None if card.recipe is None else card.recipe.model.config
    return config if config is None or is_hub_id(config) else f"path/to/{public_name(config)}"


def _head(card: Card) -> str:
    """The card's metadata in YAML, by which the hub links the card to its base model."""
    from huggingface_hub import ModelCardData

    tags = ["lora"] * card.are_alone + ["controlnet"] * ("ControlNet" in card.pipeline)
    is_from_scratch = card.recipe is not None and card.recipe.model.from_scratch
    data = ModelCardData(
        library_name="diffusers",
        pipeline_tag=_task(card.pipeline),
        base_model=card.base_model if is_hub_id(card.base_model) and not is_from_scratch else None,
        tags=tags or None,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _task(pipeline: str) -> str:
    """The task of a pipeline, as the hub names it, e.g. "text-to-image"."""
    if pipeline in OF_CLASSES:
        return "unconditional-image-generation"
    source = "image" if pipeline in FILLING.values() else "text"
    return f"{source}-to-{'video' if pipeline in OF_CLIPS else 'image'}"


def _subject(card: Card) -> str:
    what = ", ".join(card.trained)
    if card.adapters is not None:
        return f"adapters (LoRA) of rank {card.adapters.rank} on {what}"
    is_from_scratch = card.recipe is not None and card.recipe.model.from_scratch
    return f"{what}, from random weights" if is_from_scratch else what


def _contents(card: Card) -> str:
    """The sentences on the contents of the files, and on their differences from the base model."""
    weights = "the exponential moving average of the weights" if card.is_average else "the weights as trained"
    if card.are_alone:
        lines = [f"The files hold {weights}; the base model is needed beside them."]
        if card.adapters is not None and card.adapters.comfy is not None:
            lines.append(f"`{card.adapters.comfy}` holds the same for ComfyUI: put it into `models/loras`.")
        if card.adapters is not None and card.adapters.trigger is not None:
            lines.append(f"The captions of the training said: {card.adapters.trigger}")
    else:
        added = "; they are added to the base model's" if card.adapters is not None else ""
        lines = [f"The files hold {weights}{added}."]
        if card.copied:
            lines.append(f"Unchanged copies from the base model: {', '.join(card.copied)}.")
    lines.append(_scheduler_text(card.own_scheduler, card.scheduler))
    if card.left_out:
        lines.append(f"Not included, because the base model's folder did not have them: {', '.join(card.left_out)}.")
    return "\n".join(lines)


def _scheduler_text(own: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    if own == ours:
        return "The scheduler is the base model's."
    if own.get("_class_name") != ours.get("_class_name"):
        return f"The scheduler is `{ours.get('_class_name')}`; the base model's is `{own.get('_class_name')}`."
    changed = ", ".join(f"`{key} = {value}`" for key, value in ours.items() if own.get(key) != value)
    return f"The scheduler is the base model's, except for {changed}."


def public_name(path_or_id: str) -> str:
    """The hub id itself, or the last part of a path, which names no other folder of this machine."""
    return path_or_id if is_hub_id(path_or_id) else _last_part(path_or_id)


def public_recipe(recipe: Recipe) -> str:
    """The text of the recipe in TOML, with the last part in place of every path."""
    tables = {
        section: {key: _public(key, value) for key, value in table.items()}
        for section, table in tables_of(recipe).items()
    }
    tables["model"]["path"] = public_name(recipe.model.path)
    if recipe.model.config is not None:
        tables["model"]["config"] = public_name(recipe.model.config)
    return tables_to_toml(tables)


def _public(key: str, value: object) -> object:
    """The value of a recipe's key with the last part in place of each path, also inside of lists and tables."""
    match value:
        # A prompt may hold a slash, but not begin as a path does.
        case str() if key in _FREE_TEXT and not re.match(r"[/\\~]|[A-Za-z]:[/\\]", value):
            return value
        case str():
            return _last_part(value)
        case list():
            return [_public(key, item) for item in value]
        case dict():
            return {name: _public(name, item) for name, item in value.items()}
        case _:
            return value


def _last_part(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1].removeprefix("~")
