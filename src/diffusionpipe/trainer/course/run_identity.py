"""The identity of a run: facts about data and models beside its recipe's values, the same wherever it continues."""

from collections.abc import Mapping, Sequence
from hashlib import sha256

from diffusionpipe.errors import CheckpointError
from diffusionpipe.trainer.course.kept_facts import KeptFacts
from diffusionpipe.trainer.course.recipe_changes import refusal
from diffusionpipe.trainer.data.scan.dataset import Dataset
from diffusionpipe.trainer.data.scan.sources import identity_of_sources
from diffusionpipe.trainer.model.lora import lora_identity
from diffusionpipe.trainer.model.members import Member, RecipeModels
from diffusionpipe.trainer.recipe import DataSection, Recipe
from diffusionpipe.trainer.recipe.size_rules import run_of

GROWTH = "growth"
OF_DATA = ("data", "picture files", GROWTH)
"""The names of the identity's entries that describe the training data."""


def check_resumed(kept: KeptFacts, identity: Mapping[str, object], num_steps: int | None) -> int:
    """The step of the checkpoint, with which the run continues; refuses a checkpoint of a run with another identity.

    `kept`: the facts in the checkpoint. `identity`: the identity of this run.

    `num_steps`: the number of steps of the whole run; None while the data, whose epochs end it, are not counted yet.

    Raises:
        CheckpointError: the checkpoint is from another run, or its step lies after the recipe's end.
    """
    differing = [
        f"{name} was {kept.identity[name]!r} and is {value!r}"
        for name, value in identity.items()
        if name in kept.identity and kept.identity[name] != value
    ]
    if differing:
        raise CheckpointError(refusal(kept.source, differing))
    if num_steps is not None and kept.step > num_steps:
        raise CheckpointError(
            f"{kept.source} is from step {kept.step}, but the recipe ends at step {num_steps}; "
            "resume from an earlier one with --resume STEP, or raise training.steps"
        )
    return kept.step


def run_identity(opened: RecipeModels, train: Dataset) -> dict[str, object]:
    """The facts about data and models that must not change when a run continues, keyed by their names in messages.

    They are not among the values of its recipe.
    """
    recipe = opened.recipe
    noun = "clips" if recipe.data.has_clips else "pictures"
    # A hash cannot be upgraded, so a sample with one caption is described as when no sample had more.
    described = [(one.name, one.text, one.label, *([one.others] if one.others else [])) for one in train.samples]
    return {
        "data": f"{len(train.samples)} {noun}, fingerprint {_fingerprint(repr(described).encode())}",
        "picture files": f"fingerprint {train.contents}",
        GROWTH: [list(pair) for pair in train.growth],  # lists, as state.json has them
        "lora": lora_identity(recipe),
        "prediction": ", ".join(str(member.prediction) for member in opened.members),
        "class embeddings": _class_embeddings(recipe),
        **_low_resolutions(opened.members),
        "sources": _sources(recipe.data, train),
        "data.same_size": run_of(recipe) if recipe.data.has_sizes else None,
    }


def _fingerprint(content: bytes) -> str:
    return sha256(content).hexdigest()[:12]


def _sources(data: DataSection, train: Dataset) -> dict[str, object]:
    """A text of how the samples of each source are used, keyed by the source's name; empty without sources."""
    repeats = {part.name: part.repeats for part in train.parts} if data.sources else {}
    return identity_of_sources(repeats, dict(zip(data.sources, data.treatments, strict=bool(data.sources))))


def _class_embeddings(recipe: Recipe) -> str | None:
    """A fingerprint of the file from which the embeddings of classes are read; None without such a file."""
    place = recipe.model.class_embeddings
    return None if place is None else f"fingerprint {_fingerprint(place.read_bytes())}"


def _low_resolutions(members: Sequence[Member]) -> dict[str, str]:
    """A text of the small pictures that each super-resolution model reads, keyed by the raw input's name."""
    return {
        member.component("low_resolution"): f"{member.low.resolution}, noised below {member.low.augmentation:g}"
        for member in members
        if member.low is not None
    }
