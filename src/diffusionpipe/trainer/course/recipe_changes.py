"""The recipe of a run that continues, compared with the one that wrote its checkpoint, before anything long starts.

A value of the command line holds for the run: it stays at the next resume, also where the command does not repeat it.

    file        file then   run then   the run continues with
    1e-4        1e-4        1e-4        1e-4
    1e-4        1e-4        2e-4        2e-4    the command line has set it at an earlier start
    3e-4        1e-4        2e-4        3e-4    the file has been changed since
    any, and the command line sets 5e-4     5e-4
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from os.path import realpath

from pydantic import JsonValue

from diffusionpipe.errors import CheckpointError, RecipeError
from diffusionpipe.trainer.course.kept_facts import KeptFacts, Values
from diffusionpipe.trainer.optim.optimizer import kept_state
from diffusionpipe.trainer.recipe import Effect, Recipe, default_of, effect_of, values_of, with_values


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The recipe with which a run continues, remarks on its changes, and values of its file that do not hold."""

    recipe: Recipe
    notes: tuple[str, ...] = ()
    """The remarks about the changes of the recipe, one sentence each."""
    stated: Values = field(default_factory=dict)
    """The values that the recipe's file has for keys that the command line sets now or has set, by dotted keys."""


def settle(recipe: Recipe, stated: Values, kept: KeptFacts) -> Settled:
    """The recipe with which a run continues from a checkpoint, and remarks on its changes.

    `kept`: the facts about the run in the checkpoint.

    `stated`: keys that the command line sets, with the values that the recipe's file has for them.

    Raises:
        CheckpointError: a value has changed that may not; every one is named.
        RecipeError: values that stay do not fit to others that have changed.
    """
    now = values_of(recipe)
    # Of a part nothing else is known, so the other values count as unchanged.
    before = kept.values if kept.is_whole else {**now, **kept.values}
    stays = _staying(recipe, stated, before, kept.stated)
    if stays:
        recipe = with_values(recipe, {key: before[key] for key in stays})
        stated, now = {**stated, **{key: now[key] for key in stays}}, values_of(recipe)
    problems = list(_problems(recipe, before, now))
    if problems:
        raise CheckpointError(refusal(kept.source, problems))
    changed = [
        f"{key} {shown(old)} -> {shown(new)}"
        for key, old, new in _changes(before, now)
        if effect_of(key) is Effect.SAID
    ]
    notes = [f"changed since step {kept.step}: {'; '.join(changed)}"] if changed else []
    notes += [
        f"{key} stays {shown(now[key])}, as the command line has set it before; the file has {shown(stated[key])}"
        for key in stays
    ]
    return Settled(recipe=recipe, notes=tuple(notes), stated=stated)


def refusal(source: str, problems: Sequence[str]) -> str:
    """The message that the checkpoint `source` belongs to another run: the problems, and the remedy."""
    return (
        f"{source} belongs to another run: {'; '.join(problems)}.\n"
        "Resume with the same recipe and data, or start a new run in another run.folder; it begins with what a "
        "finished run has learned if model.path is its export."
    )


def shown(value: JsonValue) -> str:
    """A short text of a value, as a recipe writes it.

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
    """The keys that the command line has set at an earlier start and that keep their value.

    Neither the command line nor the file sets them otherwise now. `stated`, `stated_before`: the file's values of keys
    that the command line sets now, and has set then. `before`: the values of the run's recipe.
    """
    now = values_of(recipe)
    return [
        key
        for key, of_file in stated_before.items()
        if key in now and key in before and key not in stated and effect_of(key) is Effect.SAID
        if now[key] == of_file and before[key] != now[key]
    ]


def _changes(before: Values, now: Values) -> Iterator[tuple[str, JsonValue, JsonValue]]:
    """Each key whose value differs, with its value before and its value now.

    A key that one of the two recipes lacks has its default there.
    """
    for key in dict.fromkeys((*before, *now)):
        if key == "training.steps" and now.get(key) is None:  # epochs give it, once the data are counted
            continue
        old, new = (values[key] if key in values else default_of(key) for values in (before, now))
        if old != new:
            yield key, old, new


def _problems(recipe: Recipe, before: Values, now: Values) -> Iterator[str]:
    for key, old, new in _changes(before, now):
        effect = effect_of(key)
        # The same folder by another name, e.g. through a link.
        if effect is Effect.FIXED and key.endswith("path") and realpath(str(old)) == realpath(str(new)):
            continue
        if effect is Effect.FIXED:
            yield f"{key} was {shown(old)} and is {shown(new)}"
        elif effect is Effect.SAID and (why := _why_fixed(recipe, before, key, old, new)):
            yield f"{key} was {shown(old)} and is {shown(new)} ({why})"


def _why_fixed(recipe: Recipe, before: Values, key: str, old: JsonValue, new: JsonValue) -> str | None:
    """The reason why a value may not change from `old` to `new`, though its key may change; None if it may."""
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
