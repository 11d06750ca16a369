"""The facts about a run in state.json of its checkpoints: the step, the identity, and the values of its recipe."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from diffusionpipe.errors import CheckpointError, RecipeError
from diffusionpipe.files.versions import Document, upgraded
from diffusionpipe.trainer.old_documents import FORMAT, IDENTITY, IS_PART, STATE, STATED, VALUES
from diffusionpipe.trainer.recipe import effect_of, recorded_recipe, values_of

Values = Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFacts:
    """The facts that a checkpoint keeps about its run."""

    source: str
    """The checkpoint's path, as messages name it."""
    step: int
    """The number of updates before the checkpoint."""
    identity: Mapping[str, object]
    """The entries of `run_identity`; a checkpoint of an earlier version may lack some."""
    values: Values
    """The values of the run's recipe, by their dotted keys."""
    stated: Values
    """The values that the recipe's file had for keys that the run's command line set, by dotted keys."""
    is_whole: bool
    """Whether `values` has all keys of its version; if not, the other values are unknown."""


def facts_to_keep(identity: Mapping[str, object], values: Values, stated: Values) -> dict[str, object]:
    """The entries of state.json that keep the facts about a run, without the step.

    `values`: the recipe's values by dotted keys. `stated`: the file's values of keys that the command line set.
    """
    return {FORMAT: len(STATE) + 1, IDENTITY: dict(identity), VALUES: dict(values), STATED: dict(stated)}


def kept_facts(state: Document, source: Path | str) -> KeptFacts:
    """The facts about a run in `state`, the content of state.json in the checkpoint `source`, of any version.

    If the checkpoint keeps only a part of the recipe, the recipe in the run's folder adds the rest, where there is one.

    Raises:
        CheckpointError: the version is unknown, or values are there that no run has written.
    """
    version = state.get(FORMAT, 2 if VALUES in state else 1)
    try:
        state = upgraded(state, version, STATE)
    except ValueError as error:
        raise CheckpointError(f"{source}: state.json: {error}; resume with the one that wrote it") from error
    except (AttributeError, TypeError) as error:  # a step found other values than runs write
        raise _strange(source, "values", state) from error
    step, identity, is_whole = state.get("step"), state.get(IDENTITY), IS_PART not in state
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise _strange(source, "step", step)
    if not isinstance(identity, dict):
        raise _strange(source, IDENTITY, identity)
    values, stated = (_values_in(state, name, source) for name in (VALUES, STATED))
    if not is_whole:
        try:
            values = {**values_of(recorded_recipe(Path(source).parent.parent / "recipe.toml")), **values}
            is_whole = True
        except RecipeError:
            pass  # none that this version reads
    return KeptFacts(source=str(source), step=step, identity=identity, values=values, stated=stated, is_whole=is_whole)


def _values_in(state: Document, name: str, source: Path | str) -> dict[str, JsonValue]:
    """The entry `name` of `state`, which has values by dotted keys, without the keys that only another version has.

    Raises:
        CheckpointError: the entry is not a JSON object.
    """
    found = state.get(name, {})
    if not isinstance(found, dict):
        raise _strange(source, name, found)
    return {key: value for key, value in found.items() if _is_key(key)}


def _is_key(key: str) -> bool:
    try:
        effect_of(key)
    except KeyError:
        return False
    return True


def _strange(source: Path | str, name: str, found: object) -> CheckpointError:
    return CheckpointError(f"{source}: state.json has the {name} {str(found)[:100]!r}; it was not written by a run")
