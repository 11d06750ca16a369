import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusionpipe.errors import RecipeError
from diffusionpipe.trainer.recipe import PipelineSection, replicas_of_stages
from diffusionpipe.trainer.recipe.recipe_file import load_recipe, recipe_from_table, recipe_to_toml

SMALL = """
[model]
path = "model"

[data]
train = "pictures"
resolution = 32

[training]
steps = 10
batch = 8
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def problems(path, overrides=()):
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def test_a_file_with_overrides_becomes_a_recipe(file):
    recipe = load_recipe(file, ["training.steps=20", "optimizer.arguments.betas=[0.9, 0.99]", "run.folder=out"])
    assert recipe.training.steps == 20
    assert recipe.training.batch == 8
    assert recipe.optimizer.arguments == {"betas": [0.9, 0.99]}
    assert str(recipe.run.folder) == "out"


def test_lists_of_the_file_are_taken_for_every_key_with_several_values(file):
    lists = ["model.train=['unet']", "pipeline.splits=['a']", "pipeline.replicas=[2, 1]", "sampling.labels=[3]"]
    recipe = load_recipe(file, [*lists, "validation.timesteps=[0.5]", "training.activation_checkpointing=['a*']"])
    assert (recipe.model.train, recipe.pipeline.splits, recipe.pipeline.replicas) == (("unet",), ("a",), (2, 1))
    assert (recipe.sampling.labels, recipe.validation.timesteps) == ((3,), (0.5,))


def test_the_run_folder_is_named_after_the_file_unless_given(file):
    assert str(load_recipe(file).run.folder) == "runs/small"


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("training.stpes", "did you mean training.steps?"),
        ("training.learning_rate", "did you mean optimizer.learning_rate?"),
        ("optmizer.name", "did you mean [optimizer]?"),
        ("steps", "did you mean training.steps?"),
        ("optimizer.weight_decay", "put arguments of the class into [optimizer.arguments]"),
        ("run.xyz", "[run] has folder"),
        ("lora.rnak", "did you mean lora.rank?"),
        ("lora.lora_alpha", "did you mean lora.alpha?"),
        ("training.target_modules", "did you mean lora.target_modules?"),
    ],
)
def test_an_unknown_key_is_named_in_full_with_the_nearest_one(file, key, suggestion):
    message = problems(file, [f"{key}=3"])
    assert str(file) in message
    assert suggestion in message
    assert f"  {key.split('.')[0] if key.startswith('optm') else key}: unknown" in message


def test_adapters_are_switched_on_by_their_rank_alone(file):
    assert load_recipe(file, ["lora.rank=8"]).lora.rank == 8
    assert load_recipe(file).lora.rank is None
    assert "lora.rank: this key is required: rank of every adapter" in problems(file, ["lora.alpha=8"])
    file.write_text(SMALL + "[lora]\n")
    assert "lora.rank: this key is required" in problems(file)
    both = problems(file, ["lora.lora_dropout=0.1"])
    assert "lora.lora_dropout: dropout is not supported" in both
    assert "lora.rank: this key is required" in both


def test_all_problems_are_reported_at_once_with_the_key_of_each(file):
    file.write_text(SMALL.replace("steps = 10", 'steps = "ten"').replace("resolution = 32", ""))
    message = problems(file, ["batch", "objective.kind=epsilom", "pipeline.replicas=[0]", "checkpoint=3"])
    keys = [line.split(":")[0].strip() for line in message.splitlines()[1:]]
    assert keys == [
        "'batch'",
        "objective.kind",
        "data.resolution",
        "training.steps",
        "pipeline.replicas[0]",
        "checkpoint",
    ]
    assert "6 problems" in message


def test_problems_between_sections_are_reported_beside_those_inside_others(file):
    message = problems(file, ["training.batch=7", "sampling.every=1", "pipeline.microbatches=4"])
    assert "sampling.every: there are neither prompts" in message
    assert "training.batch: 7 samples" in message


def test_only_keys_from_the_command_line_are_said_to_come_from_there(file):
    file.write_text(SMALL.replace("resolution = 32", "resolution = 0"))
    lines = problems(file, ["training.steps=0"]).splitlines()
    assert [line.endswith("(set on the command line)") for line in lines] == [False, False, True]


HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (f"training.steps={HUGE}", "training.steps"),
        (f"training.batch={2**70}", "training.batch"),
        ("optimizer.learning_rate=1e400", "optimizer.learning_rate"),
        ("optimizer.learning_rate=inf", "optimizer.learning_rate"),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate"),
        (f"optimizer.learning_rate={HUGE}", "optimizer.learning_rate"),
        ("optimizer.arguments.weight_decay=1e400", "optimizer.arguments.weight_decay"),
        ("optimizer.arguments.weight_decay=nan", "optimizer.arguments.weight_decay"),
        (f"optimizer.arguments.weight_decay={HUGE}", "optimizer.arguments.weight_decay"),
        (f"optimizer.arguments.betas=[{HUGE}, 0.9]", "optimizer.arguments.betas"),
    ],
    ids=lambda text: text[:40],
)
def test_a_number_that_is_too_large_or_none_is_one_short_problem(file, override, key):
    message = problems(file, [override])
    assert "1 problem" in message
    assert f"  {key}: " in message
    assert len(message) < 250


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.patches=true", 'e.g. [data.patches] with share_whole = 0.5, or "none"; got true'),
        ("data.captions=3", "e.g. [data.captions] with lines = false; got 3"),
        ("data.columns=3", 'e.g. [data.columns] with image = "image"; got 3'),
        ("data.sources=true", "[data.sources.NAME]; got true"),
        ("data.sources.cats=3", "e.g. [data.sources.cats] with regularisation = false; got 3"),
        (
            'data.sources={cats = {path = "cats", captions = 1}}',
            'e.g. [data.sources.cats.captions] with lines = false, or "none"; got 1',
        ),
        ("optimizer.rest=true", 'e.g. [optimizer.rest] with name = "AdamW", or "none"; got true'),
        ("optimizer.arguments=1", "[optimizer.arguments]; got 1"),
        ("optimizer.groups.norms=1", "[optimizer.groups.norms]; got 1"),
        ("model.components.unet=3", "e.g. [model.components.unet] with its learning_rate; got 3"),
        ("lora.rank_pattern=true", "[lora.rank_pattern]; got true"),
    ],
)
def test_a_value_in_the_place_of_a_table_is_answered_with_the_table(file, override, says):
    text = problems(file, [override])
    assert f"write a table, {says}" in text
    assert "Section" not in text


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.aspects=[0.5]", r"data.aspects: give 2 or more values, e.g. \[0.5, 2.0\]; got \[0.5\]"),
        ("data.aspects=[1, 2, 3]", r"data.aspects: give 2 values at most, e.g. \[0.5, 2.0\]; got"),
        ("data.aspects=1", r"data.aspects: write a list, e.g. \[0.5, 2.0\]; got 1"),
        ("data.aspects=[-1.0, 2.0]", r"data.aspects\[0\]: input should be greater than 0; got -1.0"),
        ("validation.timesteps=[]", r"validation.timesteps: give 1 or more values, e.g. \[0.1, 0.3, .*; got \[\]"),
        ("pipeline.replicas=2", r"pipeline.replicas: write a list, e.g. \[2, 1\]; got 2"),
    ],
)
def test_a_wrong_list_is_one_problem_with_an_example(file, override, says):
    with pytest.raises(RecipeError, match=rf": 1 problem\n  {says}"):
        load_recipe(file, [override])


def test_stages_beyond_all_memory_are_refused_like_any_other_number():
    with pytest.raises(RecipeError, match=rf"need {2**53} ranks; there are 2"):
        replicas_of_stages(PipelineSection(stages=2**53), 2)


def test_a_missing_binary_or_malformed_file_is_named(tmp_path):
    assert "nowhere.toml: cannot be read" in problems(tmp_path / "nowhere.toml")
    assert "cannot be read" in problems(tmp_path)
    (tmp_path / "bad.toml").write_text("[model\n")
    assert "bad.toml: not a TOML file" in problems(tmp_path / "bad.toml")
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    assert "not a TOML file" in problems(tmp_path / "bad.toml")


@settings(max_examples=30)
@given(
    prompts=st.lists(st.text(st.characters(codec="utf-8")), max_size=3),
    rate=st.floats(min_value=1e-300, max_value=1e300),
    arguments=st.dictionaries(
        st.sampled_from(["betas", "weight_decay", "foreach"]), st.sampled_from([[0.9, 0.99], 0.5, True])
    ).filter(
        lambda a: all(isinstance(v, {"betas": list, "weight_decay": float, "foreach": bool}[k]) for k, v in a.items())
    ),
    clip=st.none() | st.floats(min_value=1e-3, max_value=10),
)
def test_a_written_recipe_is_read_back_as_it_was(prompts, rate, arguments, clip):
    table = tomllib.loads(SMALL) | {
        "sampling": {"prompts": prompts},
        "optimizer": {"learning_rate": rate, "arguments": arguments},
    }
    table["training"] |= {"clip_norm": clip}
    recipe = recipe_from_table(table, source="small.toml")
    assert recipe_from_table(tomllib.loads(recipe_to_toml(recipe)), source="other.toml") == recipe


def test_nested_arguments_of_the_optimizer_are_written_as_inline_tables(file):
    recipe = load_recipe(file)
    nested = recipe.model_copy(
        update={"optimizer": recipe.optimizer.model_copy(update={"arguments": {"a b": {"c": [True, "x\x7f"]}}})}
    )
    assert tomllib.loads(recipe_to_toml(nested))["optimizer"]["arguments"] == {"a b": {"c": [True, "x\x7f"]}}
