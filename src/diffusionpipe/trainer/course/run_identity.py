"""The identity of a run: its data, models and objective, which must be the same where it continues."""

from collections.abc import Mapping, Sequence
from hashlib import sha256

from diffusionpipe.errors import CheckpointError
from diffusionpipe.trainer.course.recipe_changes import refusal
from diffusionpipe.trainer.data.scan.dataset import Dataset
from diffusionpipe.trainer.data.scan.sources import identity_of_sources
from diffusionpipe.trainer.model.lora import lora_identity
from diffusionpipe.trainer.model.members import Member, RecipeModels
from diffusionpipe.trainer.recipe import DataSection, ObjectiveSection, Recipe
from diffusionpipe.trainer.recipe.size_rules import run_of

GROWTH = "growth"
OF_DATA = ("data", "picture files", GROWTH)
"""Entries of the identity that say which the training data are."""


def check_resumed(
    state: Mapping[str, object], identity: Mapping[str, object], num_steps: int | None, source: str = "the checkpoint"
) -> int:
    """The step to continue with; refuses a checkpoint whose `state` differs from this run's `identity`.

    `num_steps`: where the run ends; None where the data, whose epochs end it, are not counted yet. `source` names the
    checkpoint in messages.

    Raises:
        CheckpointError: the checkpoint is from another run, its step is not a number, or lies after the recipe's end.
    """
    differing = [
        f"{name} was {state.get(name)!r} and is {value!r}"
        for name, value in identity.items()
        if name in state and state[name] != value  # an older version may not have kept it
    ]
    if differing:
        raise CheckpointError(refusal(source, differing))
    step = state.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise CheckpointError(f"{source}: state.json has the step {str(step)[:100]!r}; it was not written by a run")
    if num_steps is not None and step > num_steps:
        raise CheckpointError(
            f"{source} is from step {step}, but the recipe ends at step {num_steps}; "
            "resume from an earlier one with --resume STEP, or raise training.steps"
        )
    return step


def run_identity(opened: RecipeModels, train: Dataset) -> dict[str, object]:
    """The facts that must not change when a run continues, by name: seed, batch, data, models, objective, adapters."""
    recipe = opened.recipe
    noun = "clips" if recipe.data.has_clips else "pictures"
    # Other captions are described only where there are some, so that older checkpoints with one caption each still fit.
    described = repr([(one.name, one.text, one.label, *([one.others] if one.others else [])) for one in train.samples])
    return {
        "seed": recipe.training.seed,
        "batch": recipe.training.batch,
        "data": f"{len(train.samples)} {noun}, fingerprint {sha256(described.encode()).hexdigest()[:12]}",
        "picture files": f"fingerprint {train.contents}",
        **({GROWTH: [list(pair) for pair in train.growth]} if train.growth else {}),  # lists, as state.json has them
        "model": recipe.model.path,
        "lora": lora_identity(recipe),
        "prediction": ", ".join(str(member.prediction) for member in opened.members),
        "objective": objective_identity(recipe.objective),
        **{f"models.{name}": f"{own.path} at {own.resolution or 'auto'}" for name, own in recipe.models.items()},
        **_class_embeddings(recipe),
        **_low_resolutions(opened.members),
        **_clips(recipe.data),
        **_sources(recipe.data, train),
        **({"data.same_size": run_of(recipe)} if recipe.data.has_sizes else {}),
    }


def _sources(data: DataSection, train: Dataset) -> dict[str, object]:
    """How the samples of each source are used."""
    if not data.sources:
        return {}
    repeats = {part.name: part.repeats for part in train.parts}
    return {"sources": identity_of_sources(repeats, dict(zip(data.sources, data.treatments, strict=True)))}


def _class_embeddings(recipe: Recipe) -> dict[str, str]:
    """The file that embeddings of classes are read from, by its contents."""
    place = recipe.model.class_embeddings
    return {} if place is None else {"class embeddings": f"fingerprint {sha256(place.read_bytes()).hexdigest()[:12]}"}


def _clips(data: DataSection) -> dict[str, str]:
    """The settings for frames of clips that identify a run."""
    if not data.has_clips:
        return {}
    counts = " or ".join(map(str, data.frame_counts))
    rate = "all" if data.frame_rate is None else f"{data.frame_rate:g}"
    return {"clips": f"{counts} frames, {rate} of a second"}


def _low_resolutions(members: Sequence[Member]) -> dict[str, str]:
    """The small pictures that models of super-resolution read."""
    return {
        member.component("low_resolution"): f"{member.low.resolution}, noised below {member.low.augmentation:g}"
        for member in members
        if member.low is not None
    }


def objective_identity(objective: ObjectiveSection) -> str:
    """All keys of [objective] but `kind` as "key value, key value".

    Keys that are newer than the format only if not default.
    """
    defaults = ObjectiveSection().model_dump(mode="json")
    values = objective.model_dump(mode="json", exclude={"kind"})
    # Checkpoints from before the other keys hold these alone, and still have the same identity.
    older = {"snr_gamma", "time_sampling", "shift", "variance", "guidance"}
    values = {key: value for key, value in values.items() if key in older or value != defaults[key]}
    return ", ".join(f"{key} {'none' if value is None else value}" for key, value in values.items())
