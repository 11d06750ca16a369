"""The recipe of a run that continues, compared with the one that wrote its checkpoint, before anything long starts.

A value of the command line holds for the run: it stays at the next resume, also where the command does not repeat it.

    file        file then   run then   the run continues with
    1e-4        1e-4        1e-4        1e-4
    1e-4        1e-4        2e-4        2e-4    the command line has set it at an earlier start
    3e-4        1e-4        2e-4        3e-4    the file has been changed since
    any, and the command line sets 5e-4     5e-4
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import realpath
from pathlib import Path

from pydantic import JsonValue

from diffusionpipe.errors import CheckpointError, RecipeError
from diffusionpipe.trainer.optim.optimizer import kept_state
from diffusionpipe.trainer.recipe import Effect, Recipe, default_of, effect_of, recorded_recipe, values_of, with_values

VALUES, STATED = "recipe", "stated"
"""Entries of a checkpoint's state: the values that trained it, and those values that the file states otherwise."""

Values = Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The recipe with which a run continues, remarks on its changes, and values of its file that do not hold."""

    recipe: Recipe
    notes: tuple[str, ...] = ()
    """The remarks about the changes of the recipe."""
    stated: Values = field(default_factory=dict)
    """Values of the recipe's file that do not hold, by their dotted keys."""


def state_of(settled: Settled) -> dict[str, object]:
    """The entries "recipe" (all values) and "stated" (values that the file has otherwise) for a checkpoint's state."""
    return {VALUES: values_of(settled.recipe), STATED: dict(settled.stated)}


def settle(recipe: Recipe, stated: Values, state: Mapping[str, object], source: Path) -> Settled:
    """The recipe with which the run of a checkpoint continues; `source` is the checkpoint, `state` its contents.

    `stated`: keys that the command line sets, with the values that the recipe's file has for them.

    Raises:
        CheckpointError: a value has changed that may not; every one is named.
        RecipeError: values that stay do not fit to others that have changed.
    """
    before = _values_in(state, VALUES, source)
    # Checkpoints of earlier versions hold no recipe; the run's folder does, mostly.
    if before is None:
        before = _recorded(source.parent.parent / "recipe.toml")
    if before is None:
        return Settled(recipe=recipe, stated=stated)
    now, stays = values_of(recipe), _staying(recipe, stated, before, _values_in(state, STATED, source) or {})
    if stays:
        recipe = with_values(recipe, {key: before[key] for key in stays})
        stated, now = {**stated, **{key: now[key] for key in stays}}, values_of(recipe)
    problems = list(_problems(recipe, before, now))
    if problems:
        raise CheckpointError(refusal(str(source), problems))
    step = state.get("step")
    changed = [
        f"{key} {shown(old)} -> {shown(new)}"
        for key, old, new in _changes(before, now)
        if effect_of(key) is Effect.SAID
    ]
    notes = [f"changed since step {step}: {'; '.join(changed)}"] if changed else []
    notes += [
        f"{key} stays {shown(now[key])}, as the command line has set it before; the file has {shown(stated[key])}"
        for key in stays
    ]
    return Settled(recipe=recipe, notes=tuple(notes), stated=stated)


def refusal(source: str, problems: Sequence[str]) -> str:
    """The message that `source` belongs to another run: the problems, and the remedy."""
    return (
        f"{source} belongs to another run: {'; '.join(problems)}.\n"
        "Resume with the same recipe and data, or start a new run in another run.folder; it begins with what a "
        "finished run has learned if model.path is its export."
    )


def shown(value: JsonValue) -> str:
    """A value in short, as a recipe writes it.

    >>> shown(0.0001), shown(2e-05), shown(0.25), shown(None), shown("cosine"), shown(True)
    ('1e-4', '2e-5', '0.25', 'none', 'cosine', 'true')
    """
    match value:
        case None:
            return "none"
        case float() if 0 < abs(value) < 1e-3:
            digits, _, power = f"{value:e}".partition("e")
            return f"{float(digits):g}e{int(power)}"
        case str():
            return value
        case dict():
            return "{" + ", ".join(f"{key} = {shown(inner)}" for key, inner in value.items()) + "}"
        case _:
            return json.dumps(value)


def _staying(recipe: Recipe, stated: Values, before: Values, stated_before: Values) -> list[str]:
    """Keys that the command line has set at an earlier start, and that neither it nor the file sets otherwise now."""
    now = values_of(recipe)
    return [
        key
        for key, of_file in stated_before.items()
        if key in now and key in before and key not in stated and effect_of(key) is Effect.SAID
        if now[key] == of_file and before[key] != now[key]
    ]


def _changes(before: Values, now: Values) -> Iterator[tuple[str, JsonValue, JsonValue]]:
    """Keys whose values differ; a key that one of the two lacks has its default there."""
    for key in dict.fromkeys((*before, *now)):
        if key == "training.steps" and now.get(key) is None:  # epochs give it, once the data are counted
            continue
        try:
            old, new = (values[key] if key in values else default_of(key) for values in (before, now))
        except KeyError:  # a key that another version had
            continue
        if old != new:
            yield key, old, new


_OF_AREAS = ("data.aspects", "data.multiple")
"""Keys without effect where every size states its width and its height."""


def _problems(recipe: Recipe, before: Values, now: Values) -> Iterator[str]:
    for key, old, new in _changes(before, now):
        effect = effect_of(key)
        # The same folder by another name, e.g. through a link.
        if effect is Effect.FIXED and key.endswith("path") and realpath(str(old)) == realpath(str(new)):
            continue
        if key in _OF_AREAS and not recipe.data.has_area:  # earlier versions let them stand beside such sizes
            continue
        if effect is Effect.FIXED:
            yield f"{key} was {shown(old)} and is {shown(new)}"
        elif effect is Effect.SAID and (why := _why_fixed(recipe, before, key, old, new)):
            yield f"{key} was {shown(old)} and is {shown(new)} ({why})"


def _why_fixed(recipe: Recipe, before: Values, key: str, old: JsonValue, new: JsonValue) -> str | None:
    """Why a value that may change otherwise may not change so."""
    name = key.rpartition(".")[2]
    if name == "precision" and "float64" in (old, new):
        return "the checkpoint's numbers have another type"
    if name == "ema_decay" and old in (None, "auto") and new not in (None, "auto"):
        general = before.get("training.ema_decay") if key != "training.ema_decay" else None
        return None if general is not None else "the checkpoint holds no average"
    if name == "ema_states" and "bfloat16" in (old, new):
        return "the checkpoint's average has other numbers"
    if name in ("arguments", "optimizer_arguments"):
        general = recipe.optimizer.arguments if name == "optimizer_arguments" else {}
        states = []
        for own in (old, new):
            try:
                states.append(kept_state(recipe.optimizer.name, {**general, **(own if isinstance(own, dict) else {})}))
            except RecipeError:  # arguments of another version
                return None
        return None if states[0] == states[1] else "the optimizer keeps other numbers"
    return None


def _values_in(state: Mapping[str, object], name: str, source: Path) -> dict[str, JsonValue] | None:
    """Values by dotted keys among what a checkpoint keeps; None where an older version has written it.

    Raises:
        CheckpointError: something else is there.
    """
    found = state.get(name)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise CheckpointError(f"{source}: state.json has the {name} {str(found)[:100]!r}; it was not written by a run")
    known = {}
    for key, value in found.items():
        try:
            effect_of(key)
        except KeyError:  # of another version
            continue
        known[key] = value
    return known


def _recorded(path: Path) -> dict[str, JsonValue] | None:
    """The values of the recipe in a run's folder; None where there is none that this version reads."""
    try:
        return values_of(recorded_recipe(path))
    except RecipeError:
        return None
