import pytest

from diffusionpipe.errors import RecipeError
from diffusionpipe.trainer.recipe import (
    FrozenDtype,
    PipelineSection,
    RecipePrecision,
    continued,
    decided,
    load_recipe,
    planned,
    recipe_to_toml,
    recorded_recipe,
)

FIVE = """
[model]
path = "sd"
[data]
train = "pictures"
resolution = 8
[training]
steps = 6
batch = 4
"""
CASCADE = FIVE.replace('[model]\npath = "sd"', '[models.base]\npath = "a"\n[models.upper]\npath = "b"\n')


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(FIVE)
    return path


def sections(recipe):
    return recipe.training.precision, recipe.model.frozen_dtype, recipe.training.activation_checkpointing


def test_five_keys_leave_plan_arithmetic_storage_and_recomputation_to_the_machine(file):
    recipe = load_recipe(file)
    assert recipe.pipeline == PipelineSection(plan="auto")
    assert sections(recipe) == (RecipePrecision.AUTO, FrozenDtype.AUTO, None)


@pytest.mark.parametrize(
    "keys", [["pipeline.memory=2.5"], ["pipeline.cluster=cpux2"], ["pipeline.use=[0]", "pipeline.memory=1"]]
)
def test_keys_that_only_the_search_uses_leave_the_layout_to_it(file, keys):
    assert load_recipe(file, keys).pipeline.plan == "auto"


@pytest.mark.parametrize(
    "key",
    [
        "pipeline.microbatches=2",
        "pipeline.plan=none",
        "pipeline.encode_chunk=16",
        "pipeline.memory=none",
        "pipeline.use=[0]",
    ],
)
def test_one_key_of_pipeline_keeps_the_defaults_of_the_others(file, key):
    recipe = load_recipe(file, [key])
    assert recipe.pipeline.plan is None
    assert (recipe.pipeline.sizes.schedule, recipe.pipeline.sizes.encode_chunk) == ("1f1b", 16)


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        (CASCADE, "auto"),
        (CASCADE + "[objective]\nself_conditioning = 0.5\n", None),
        (CASCADE.replace('path = "b"', 'path = "b"\nmicrobatches = 2'), None),
        (CASCADE.replace("[data]", '[models.third]\npath = "c"\n[data]'), None),
    ],
)
def test_the_plan_of_several_models_is_searched_where_the_search_can(file, text, plan):
    file.write_text(text)
    assert load_recipe(file).pipeline.plan == plan


def test_devices_decide_arithmetic_and_storage_and_stated_values_stay(file):
    assert sections(decided(load_recipe(file), has_bfloat16=True))[:2] == (
        RecipePrecision.BFLOAT16,
        FrozenDtype.BFLOAT16,
    )
    assert sections(decided(load_recipe(file), has_bfloat16=False))[:2] == (RecipePrecision.FLOAT32, None)
    wide = load_recipe(file, ["training.precision=float64"])
    assert sections(decided(wide, has_bfloat16=True))[:2] == (RecipePrecision.FLOAT64, None)
    off = load_recipe(file, ["model.frozen_dtype=none"])
    assert sections(decided(off, has_bfloat16=True))[:2] == (RecipePrecision.BFLOAT16, None)
    dora = load_recipe(file, ["lora.rank=4", "lora.dora=true"])  # its norms read the stored weights
    assert sections(decided(dora, has_bfloat16=True))[:2] == (RecipePrecision.BFLOAT16, None)
    narrow = load_recipe(file, ["model.frozen_dtype=bfloat16"])
    with pytest.raises(RecipeError, match=r"compute in float32 .*training\.precision"):
        decided(narrow, has_bfloat16=False)


def test_a_decided_recipe_states_all_and_is_read_back_as_it_is(file, tmp_path):
    recipe = planned(decided(load_recipe(file), has_bfloat16=True), ("a", "b"), 2)
    text = recipe_to_toml(recipe)
    assert '"auto"' not in "".join(line for line in text.splitlines() if line.partition(" ")[0] in KEYS)
    (tmp_path / "recipe.toml").write_text(text)
    again = recorded_recipe(tmp_path / "recipe.toml")
    assert again == load_recipe(tmp_path / "recipe.toml") == recipe
    assert again.training.activation_checkpointing == ("*",)


KEYS = ("precision", "frozen_dtype", "activation_checkpointing")


def test_a_recipe_in_a_run_of_before_has_the_defaults_of_before(file):
    text = "\n".join(line for line in FIVE.splitlines())
    file.write_text(text)
    recipe = recorded_recipe(file)
    assert sections(recipe) == (RecipePrecision.FLOAT32, None, ())
    assert recipe.pipeline == PipelineSection()
    file.write_text(text.replace("batch = 4", 'batch = 4\nprecision = "bfloat16"') + "\n[pipeline]\nstages = 2\n")
    recipe = recorded_recipe(file)
    assert sections(recipe) == (RecipePrecision.BFLOAT16, None, ())
    assert recipe.pipeline.stages == 2


def test_a_run_that_continues_keeps_what_it_had_but_for_what_is_stated_now(file):
    recipe = load_recipe(file)
    before = planned(decided(recipe, has_bfloat16=True), (), 3)
    assert sections(continued(recipe, before)) == (RecipePrecision.BFLOAT16, FrozenDtype.BFLOAT16, ())
    stated = load_recipe(file, ["training.precision=float32", "training.activation_checkpointing=true"])
    now = decided(continued(stated, before), has_bfloat16=True)
    assert sections(now) == (RecipePrecision.FLOAT32, None, ("*",))


def test_the_plan_names_the_layers_that_are_recomputed_unless_the_recipe_does(file):
    recipe = load_recipe(file)
    assert planned(recipe, ("a",), 2).training.activation_checkpointing == ("a",)
    assert planned(recipe, (), 2).training.activation_checkpointing == ()
    stated = load_recipe(file, ["training.activation_checkpointing=false"])
    assert planned(stated, ("a", "b"), 2) == stated
