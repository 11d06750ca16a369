"""A plan file holds the options it was made with; recipes that train by it leave keys out, or agree."""

from dataclasses import replace

import pytest
from golden.plans import questions, recorded_plan
from kit.forked import completed
from kit.tiny_runs import save_pictures, save_stable_diffusion

from diffusionpipe.cli import main
from diffusionpipe.errors import RecipeError
from diffusionpipe.ir.files import plan_from_text, plan_to_text, read_plan, write_plan
from diffusionpipe.trainer.recipe import FrozenDtype, RecipePrecision, load_recipe
from diffusionpipe.workflows.planning.origin import options_of

FIVE = '[model]\npath = "{0}/sd"\n[data]\ntrain = "{0}/data"\nresolution = 32\n[training]\nsteps = 2\n'


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return int(caught.value.code or 0)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, pictures, and a plan of two devices for them, made with two options."""
    folder = tmp_path_factory.mktemp("origin")
    save_stable_diffusion(folder / "sd")
    save_pictures(folder / "data", count=4, resolution=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        asked = ("--model", folder / "sd", "--resolution", 32, "--cluster", "rtx4090x2", "--batch", 4)
        assert run("plan", *asked, "--out", folder / "plan.json") == 0
    return folder


KEYS = (
    "training.batch=4",
    "training.precision=bfloat16",
    "model.frozen_dtype=bfloat16",
    "optimizer.name=AdamW",
    "data.resolution=32",
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(FIVE.format(tmp_path))
    return path


@pytest.fixture
def plan_file(tmp_path):
    """A plan that says what it was made with."""
    plan = recorded_plan(next(one for one in questions() if one.answer))
    write_plan(replace(plan, made_with=("--model=sd", *KEYS)), tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.mark.slow
def test_a_plan_file_holds_its_options_and_the_keys_of_its_training(place):
    plan = read_plan(place / "plan.json")
    assert options_of(plan.made_with) == {"model": str(place / "sd"), "resolution": "32", "cluster": "rtx4090x2"}
    assert {text for text in plan.made_with if not text.startswith("--")} == set(KEYS)
    assert plan_from_text(plan_to_text(plan)) == plan


def test_a_recipe_takes_the_keys_that_it_leaves_out_from_its_plan(plan_file, file):
    recipe = load_recipe(file, [f"pipeline.plan={plan_file}"])
    assert (recipe.training.batch, recipe.training.precision) == (4, RecipePrecision.BFLOAT16)
    assert recipe.model.frozen_dtype is FrozenDtype.BFLOAT16
    assert recipe.training.activation_checkpointing is None  # the plan's own layers hold


@pytest.mark.parametrize(
    ("key", "own", "of_plan"),
    [
        ("training.precision", "float32", "bfloat16"),
        ("training.batch", "8", "4"),
        ("model.frozen_dtype", "none", "bfloat16"),
        ("data.resolution", "64", "32"),
        ("optimizer.name", "SGD", "AdamW"),
    ],
)
def test_a_key_that_differs_from_the_plans_is_refused_with_both_values(plan_file, file, key, own, of_plan):
    with pytest.raises(RecipeError) as caught:
        load_recipe(file, [f"pipeline.plan={plan_file}", f"{key}={own}"])
    assert f"{key}: the recipe has {own}, but the plan {plan_file} was made for {of_plan}" in str(caught.value)


def test_a_recipe_without_a_plan_file_takes_nothing(file):
    with pytest.raises(RecipeError, match=r"training\.batch: this key is required"):
        load_recipe(file)


@pytest.mark.slow
def test_two_ranks_train_by_the_plan_and_it_is_rehearsed_without_an_option(place, file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    file.write_text(FIVE.format(place))
    changes = [f"pipeline.plan={place / 'plan.json'}", f"run.folder={tmp_path / 'run'}", "data.workers=0"]
    completed(["-m", "diffusionpipe", "train", str(file), *changes, "--ranks", "2", "--device", "cpu"])
    assert read_plan(tmp_path / "run" / "plan.json") == read_plan(place / "plan.json")
    assert run("rehearse", place / "plan.json", "--iterations", 1, "--scale", 0.01) == 0
