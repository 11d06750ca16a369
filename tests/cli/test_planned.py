"""The plan of a training where nothing fits: the ways out that `plan` names, by keys of the recipe."""

from pathlib import Path

import pytest
from kit.tiny_runs import recipe_of
from planner import synthetic

from diffusionpipe.cli.verbs.plan_asking import PlanCommand
from diffusionpipe.costs.cluster import with_memory
from diffusionpipe.errors import ConfigError
from diffusionpipe.planner.choosing.asking import IN_WORDS
from diffusionpipe.workflows.planning.question import PlanQuestion, answered
from diffusionpipe.workflows.planning.recipe_setting import setting_of
from diffusionpipe.workflows.training.run_plan import searched_plan

FREE = {"plan": "auto", "microbatches": None, "encode_chunk": None}


def ways_in(error):
    """The sentences about what fits, each with the line below it."""
    lines = str(error.value).splitlines()
    return [(line, lines[number + 1].strip()) for number, line in enumerate(lines) if line.startswith("This fits")]


@pytest.mark.parametrize(("mebibytes", "keys"), [(3, ["training.batch=4"])])
def test_training_and_plan_name_the_same_ways_out_by_keys_and_by_commands(mebibytes, keys):
    recipe = recipe_of(Path("model"), Path("data"), Path("run"), pipeline=FREE, training={"batch": 16})
    profile, small = synthetic.chain([0.1] * 3, elements=10**5), with_memory(synthetic.cluster(2), mebibytes * 2**20)
    with pytest.raises(ConfigError) as trained:
        searched_plan(recipe, profile, small)
    command = PlanCommand(("plan", "recipe.toml"), (), has_recipe=True)
    question = PlanQuestion(
        setting=setting_of(recipe, profile, small), batches=(16,), recipe=recipe, may_recompute=True
    )
    with pytest.raises(ConfigError) as planned:
        answered(question, command)
    named, commands = ways_in(trained), ways_in(planned)
    assert [key for _, key in named] == keys
    assert [words for words, _ in named] == [words for words, _ in commands]
    for (_, key), (_, shown) in zip(named, commands, strict=True):
        assert shown == f"diffusionpipe plan recipe.toml {key.replace(', ', ' ')}"


def test_a_change_without_a_key_is_said_by_the_machine():
    options, keys = [("--frozen-dtype", "bfloat16"), ("--cluster", "rtx3060x4")], ["model.frozen_dtype=bfloat16", ""]
    assert IN_WORDS.changed(options, keys) == "model.frozen_dtype=bfloat16, a machine such as rtx3060x4"
