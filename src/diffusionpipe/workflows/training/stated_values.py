"""Keys that a command line sets, with the values that the file of the recipe has for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import JsonValue

    from diffusionpipe.trainer.recipe import Recipe


def stated_values(path: Path, overrides: Sequence[str], recipe: "Recipe") -> "dict[str, JsonValue]":
    """Key ("section.key") -> its value without the override, for each key that `overrides` set or change.

    {} for a file that can be read only once, as a FIFO. `recipe` is read from the file and the overrides.
    """
    from diffusionpipe.errors import RecipeError
    from diffusionpipe.trainer.recipe import default_of, load_recipe, values_of
    from diffusionpipe.trainer.recipe.group_section import ELSEWHERE

    if not path.is_file():
        return {}
    now, stated = values_of(recipe), {}
    for key in dict.fromkeys(_key(text) for text in overrides):
        others = [text for text in overrides if _key(text) != key]
        try:
            # Each key is left out alone, so that the other overrides keep the recipe sound.
            before = values_of(load_recipe(path, others))
        except RecipeError:  # the file lacks a key that is required
            before = {}
        # In a member's own recipe this value stands under the general key.
        general = ELSEWHERE.get(key.rpartition(".")[2]) if key.startswith("models.") else None
        names = {key, ".".join(general) if general is not None else key}
        for found, value in now.items():
            is_set = any(
                found == name or f"{found}.".startswith(f"{name}.") or name.startswith(f"{found}.") for name in names
            )
            # Defaults may depend on the key, so others can change with it.
            if is_set or (before and before.get(found) != value):
                stated[found] = before[found] if found in before else default_of(found)
    return stated


def _key(text: str) -> str:
    return text.partition("=")[0].strip()
