"""examples/recipes: one recipe for each pipeline that trains, and each trains."""

import re
from pathlib import Path

import pytest
from kit.tiers import quick_and_slow
from kit.tiny_described import PIPELINES, RESOLUTIONS, save_described
from kit.tiny_runs import save_pictures, train_here

from diffusionpipe.models.opening.folder import REGISTRY
from diffusionpipe.models.parameters.lora_read import ADAPTERS
from diffusionpipe.trainer.recipe import load_recipe

FOLDER = Path(__file__).parents[2] / "examples/recipes"
RECIPES = sorted(FOLDER.glob("*.toml"))


def kinds_of(file):
    """The pipelines that the recipe's head names."""
    return re.search(r"^# diffusers: (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)[1].split(", ")


def test_each_pipeline_has_a_recipe():
    named = [kind for file in RECIPES for kind in kinds_of(file)]
    assert sorted(named) == sorted(REGISTRY)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_is_right_and_says_how_it_is_run(file):
    recipe = load_recipe(file)
    text = file.read_text(encoding="utf-8")
    assert f"# diffusionpipe train examples/recipes/{file.name} --ranks 4 data.train={recipe.data.train}\n" in text
    assert recipe.run.folder == Path("runs") / f"{Path(recipe.data.train).name}-{file.stem}"
    assert max(map(len, text.splitlines())) <= 120


TINY = {kinds_of(file)[0]: file for file in RECIPES if kinds_of(file)[0] in PIPELINES}


SOME = ["PixArtSigmaPipeline", "ZImagePipeline"]
"""Whole training and adapters. A run measures the model and takes 20 s."""


@pytest.mark.parametrize("kind", quick_and_slow(SOME, quick=[]))
def test_a_tiny_model_of_the_pipeline_trains_as_the_recipe_says(kind, tmp_path):
    model = save_described(kind, tmp_path / "model")
    side = RESOLUTIONS.get(kind, 16)
    pictures = save_pictures(tmp_path / "pictures", 8, resolution=side)
    run = tmp_path / "run"
    overrides = {"model.path": model, "data.train": pictures, "data.resolution": side, "run.folder": run}
    overrides |= {
        "lora.rank": 2,
        "training.steps": 1,
        "training.batch": 2,
        "learning_rate.warmup_steps": 0,
        "sampling.every": 1,
        "sampling.steps": 2,
        "checkpoint.every": 1,
    }
    if not REGISTRY[kind].has_adapters:
        del overrides["lora.rank"]
    recipe = load_recipe(TINY[kind], [f"{key}={value}" for key, value in overrides.items()])
    assert train_here(recipe) == 1
    assert list(run.rglob(ADAPTERS if REGISTRY[kind].has_adapters else "model_index.json"))
