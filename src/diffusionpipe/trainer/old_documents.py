"""Documents of earlier versions in the folders of runs: the steps by which they become today's (`files.versions`).

The readers of these files apply the steps, and no other code handles files of earlier versions. The defaults here are
the defaults of those versions. The files, and where each has the number of its format:

    recipe.toml    has no number: every recipe of a run states all keys of its version, so a step adds those it lacks
    state.json     "format", of a checkpoint; 1 and 2 had no number
    ended.json     "format"; 1 had no number
    the update in the key of a kept profile   by which it is looked for, so today's becomes the earlier one
"""

import json
import re

from diffusionpipe.files.versions import Document, Step

FORMAT, IDENTITY, VALUES, STATED, IS_PART = "format", "identity", "recipe", "stated", "recipe_is_part"
"""Entries of state.json. The last one says that values of the recipe were not kept, only a few as its identity."""

_DECIDED: dict[str, Document] = {
    "training": {"precision": "float32", "activation_checkpointing": []},
    "model": {"frozen_dtype": "none"},
    "pipeline": {"plan": "none"},
}
_OF_AREAS = ("aspects", "multiple")
_ADAPTER_FILES = {"formats": ["diffusers"], "dora_as_difference": False, "save_dtype": None, "trigger": None}
_UPDATE = {"rest": None, "states": "device", "average": "device", "rounding": None}
_IN_IDENTITY = {"seed": "training.seed", "batch": "training.batch", "model": "model.path"}
_OF_STEP = ("step", VALUES, STATED, IS_PART, "past_values", "learning_rate_state")


def _decided_then(recipe: Document) -> Document:
    """A recipe of an earlier version with the defaults that it had for keys that today may be left to the machine.

    Keys that the recipe states keep their values. With several models there is no section [model], so none is added.
    """
    for section, values in _DECIDED.items():
        own = recipe.get(section, None if section == "model" else {})
        if isinstance(own, dict):
            recipe[section] = values | own
    return recipe


def _recipe_in_part(state: Document) -> Document:
    """A checkpoint's state.json of format 1 as format 2: with the values of the recipe, as far as the file has them.

    Format 1 kept only some of these values, as the run's identity, and the objective's values in one text.
    """
    values = {key: state[name] for name, key in _IN_IDENTITY.items() if state.get(name, "") != ""}
    if isinstance(text := state.get("objective"), str):
        words = (one.partition(" ") for one in re.split(r", (?=[a-z])", text))
        values |= {f"objective.{key}": _value(word) for key, _, word in words}
    return state | {VALUES: values, IS_PART: True}


def _value(word: str) -> object:
    """The value of a recipe's key from the text that Python's `str` made of it; None for "none"."""
    try:
        return json.loads({"none": "null", "True": "true", "False": "false"}.get(word, word))
    except (ValueError, RecursionError):
        return word


def _identity_apart(state: Document) -> Document:
    """A checkpoint's state.json of format 2 as format 3: with the entries of the run's identity in a part of their own.

    Format 2 had these entries among the others, some values of the recipe twice, and aspects that had no effect.
    """
    apart = {*_OF_STEP, *_IN_IDENTITY, "objective", "clips"}
    identity = {key: value for key, value in state.items() if key not in apart and not key.startswith("models.")}
    values = state[VALUES]
    if isinstance(values, dict) and _has_idle_aspects({key.removeprefix("data."): values[key] for key in values}):
        values = {key: value for key, value in values.items() if key.removeprefix("data.") not in _OF_AREAS}
    return {name: state[name] for name in _OF_STEP if name in state} | {VALUES: values, IDENTITY: identity}


def _has_idle_aspects(data: Document) -> bool:
    """Whether all sizes of a section [data] state width and height, so that aspects beside them had no effect."""
    general, sources = data.get("sizes") or [data.get("resolution")], data.get("sources") or {}
    own = [one.get("resolution") or general for one in sources.values()] if isinstance(sources, dict) else []
    return not any(isinstance(size, int) for sizes in own or [general] for size in sizes)


def _without_idle_aspects(recipe: Document) -> Document:
    """The recipe without aspects in [data] where all sizes state width and height, so that aspects have no effect.

    Until 28 November 2026 a recipe could have both.
    """
    data = recipe.get("data")
    if isinstance(data, dict) and _has_idle_aspects(data):
        recipe["data"] = {key: value for key, value in data.items() if key not in _OF_AREAS}
    return recipe


def _all_settings_of_files(note: Document) -> Document:
    """A run's ended.json of format 1 as format 2: with the settings of adapters' files that format 1 left out.

    It left out the settings that had their default values.
    """
    return _ADAPTER_FILES | note


def update_of_before(update: str) -> str:
    """The text of an update in the key of a kept profile, as it was before 28 November 2026: without usual values.

    `update`: the text of today, JSON.
    """
    stated = json.loads(update)
    if stated["rest"] is not None and stated["rest"]["learning_rate"] == "auto":
        del stated["rest"]["learning_rate"]
    usual = {key for key, value in _UPDATE.items() if stated[key] == value}
    return json.dumps({key: value for key, value in stated.items() if key not in usual}, sort_keys=True)


RECIPE: tuple[Step, ...] = (_decided_then, _without_idle_aspects)
STATE: tuple[Step, ...] = (_recipe_in_part, _identity_apart)
ENDED: tuple[Step, ...] = (_all_settings_of_files,)
