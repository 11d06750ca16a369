"""Every key of the recipe is classed by what its change does to a run that goes on."""

from pathlib import Path

import pytest
from kit.tiny_runs import recipe_of

from diffusionpipe.trainer.recipe import SECTIONS, Effect, Recipe, default_of, effect_of, values_of, with_values
from diffusionpipe.trainer.recipe.effects import COMPONENT, EFFECTS, MODEL
from diffusionpipe.trainer.recipe.group_section import GroupSection
from diffusionpipe.trainer.recipe.models_section import MemberSection

CLASSES = {**SECTIONS, COMPONENT: GroupSection, MODEL: MemberSection}


def recipe(**sections):
    return recipe_of(Path("sd"), Path("data"), Path("run"), **sections)


def test_every_section_of_the_recipe_is_classed():
    """`models` is a table of sections, which has no class of its own."""
    assert {*EFFECTS} == {*SECTIONS, MODEL, COMPONENT}
    assert {*SECTIONS, MODEL} == {*Recipe.model_fields}


@pytest.mark.parametrize("section", CLASSES)
def test_every_key_of_the_recipe_is_classed_once(section):
    tables = {COMPONENT} if section in ("model", MODEL) else set()
    assert EFFECTS[section].keys() == CLASSES[section].model_fields.keys() - tables


def test_a_key_that_nobody_has_classed_is_an_error():
    with pytest.raises(KeyError):
        effect_of("training.new")


def test_values_are_those_of_all_keys_that_are_not_silent():
    components = {"text_encoder": {"learning_rate": 1e-6}}
    values = values_of(recipe(model={"train": ("unet", "text_encoder"), "components": components}))
    assert values["model.components.text_encoder.learning_rate"] == 1e-6
    assert effect_of("model.components.text_encoder.learning_rate") is Effect.SAID
    assert values["optimizer.learning_rate"] == 0.01
    assert not any(effect_of(key) is Effect.SILENT for key in values)
    assert "checkpoint.every" not in values


def test_a_key_that_is_not_named_has_its_default():
    assert default_of("optimizer.learning_rate") == 1e-4
    assert default_of("model.components.unet.learning_rate") == "auto"
    assert default_of("models.base.resolution") == "auto"
    assert default_of("training.ema_decay") is None
    assert default_of("training.steps") is None


def test_a_recipe_with_its_own_values_is_itself():
    found = recipe(model={"components": {"unet": {"warmup_steps": 2}}}, data={"height": 16})
    assert with_values(found, values_of(found)) == found
    changed = with_values(found, {"optimizer.learning_rate": 0.5, "model.components.unet.warmup_steps": 3})
    assert changed.optimizer.learning_rate == 0.5
    assert changed.model.components["unet"].warmup_steps == 3
    assert changed.data == found.data


def test_several_models_have_values_of_their_own():
    base = {"optimizer": {"learning_rate": 0.01}, "training": {"steps": 6, "batch": 4}}
    members = {name: {"path": name, "resolution": side} for name, side in (("small", 8), ("large", 16))}
    data = {"data": {"train": "data", "resolution": 16}, "run": {"folder": "run"}, "model": {"path": "small, large"}}
    found = Recipe.model_validate({**base, **data, "models": members})
    values = values_of(found)
    assert values["models.small.resolution"] == 8
    assert "model.path" not in values
    changed = with_values(found, {"models.small.learning_rate": 0.1})
    assert changed.models["small"].learning_rate == 0.1
    assert changed.models["large"] == found.models["large"]
