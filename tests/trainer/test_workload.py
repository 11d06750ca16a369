import json
from dataclasses import replace
from pathlib import Path

import pytest
from kit.tiny_runs import recipe_of

from diffusionpipe.costs import ModelGraph, ParameterSpec
from diffusionpipe.costs.graph import numbers_of
from diffusionpipe.errors import ConfigError
from diffusionpipe.holding import DEVICE, HOST, Item
from diffusionpipe.holding.state import held_of
from diffusionpipe.holding.workload import STATE_OF_OPTIMIZER, state_of_optimizer
from diffusionpipe.trainer.model.workload import samples_drawn_together, workload_of
from diffusionpipe.trainer.optim.optimizer import build_optimizer, state_per_parameter


def model_of(folder: Path, pipeline: str) -> Path:
    """As much of a model's folder as says how it is drawn from."""
    (folder / "transformer").mkdir()
    (folder / "transformer/config.json").write_text('{"guidance_embeds": true}')
    (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    return folder


def recipe(**sections):
    return recipe_of(Path("model"), Path("data"), Path("run"), **sections)


@pytest.mark.parametrize("name", STATE_OF_OPTIMIZER)
def test_the_table_of_optimizers_is_what_torch_keeps(name):
    assert state_of_optimizer(name) == state_per_parameter(name, {})


def test_the_table_has_every_optimizer_that_a_recipe_may_name():
    with pytest.raises(ConfigError) as caught:
        build_optimizer("Nonsense", {}, 1e-3, {})
    known = str(caught.value).rpartition("torch.optim has ")[2].split(", ")
    assert set(known) == set(STATE_OF_OPTIMIZER)


def test_an_unknown_optimizer_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean AdamW"):
        state_of_optimizer("adamw")


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, (4, 4, 8, 4)),
        ({"training": {"ema_decay": "none"}}, (4, 4, 8, 0)),
        ({"training": {"precision": "bfloat16"}}, (4, 4, 8, 4)),
        ({"training": {"precision": "float64"}}, (8, 8, 16, 8)),
        ({"optimizer": {"name": "SGD"}}, (4, 4, 0, 4)),
        ({"optimizer": {"name": "SGD", "arguments": {"momentum": 0.9}}}, (4, 4, 4, 4)),
        ({"optimizer": {"name": "Adam", "arguments": {"amsgrad": True}}}, (4, 4, 12, 4)),
    ],
)
def test_bytes_of_a_parameter_follow_from_the_recipe(sections, expected):
    found = workload_of(recipe(**sections))
    assert tuple(map(found.width, (Item.PARAMETERS, Item.GRADIENTS, Item.OPTIMIZER, Item.EMA))) == expected
    assert found.batch == 4


def test_states_that_rest_on_the_host_count_there():
    parameter = ParameterSpec(name="x", shape=(6,), dtype="float32", is_trainable=True)
    found = held_of(workload_of(recipe(optimizer={"states": "host"})).states, parameter)
    assert (found.optimizer, found.hosted) == (0, 48)


def test_a_stored_matrix_counts_the_numbers_that_it_has_when_it_is_wide():
    weight = ParameterSpec(name="a.weight", shape=(64, 100), is_trainable=False)
    wide = ModelGraph(layers=(), tensors=(), parameters=(weight,), inputs=())
    for form, codes in (("nf4", (3200 + 100,)), ("int8", (64, 100)), ("float8", (64, 100))):
        stored = (
            ParameterSpec(name="a.codes", shape=codes, dtype=form, is_trainable=False),
            ParameterSpec(name="a.scales", shape=(64, 1), is_trainable=False),
        )
        assert numbers_of(replace(wide, parameters=stored), trained=False) == numbers_of(wide, trained=False) == 6400


def test_frozen_parameters_of_a_recipe_are_counted_as_they_are_stored():
    workload = workload_of(recipe(training={"precision": "bfloat16"}, model={"frozen_dtype": "bfloat16"}))
    matrix, norm = (
        ParameterSpec(name=name, shape=(6,), dtype=dtype, is_trainable=False)
        for name, dtype in (("matrix", "bfloat16"), ("norm", "float32"))
    )
    assert [workload.frozen.size(one) for one in (matrix, norm)] == [12, 24]


def test_checkpointing_and_chunk_are_the_recipes():
    found = workload_of(recipe(training={"activation_checkpointing": ["a*"]}, pipeline={"encode_chunk": 3}))
    assert (found.checkpointed, found.encode_chunk) == (("a*",), 3)
    assert workload_of(recipe(pipeline={"encode_chunk": "none"})).encode_chunk == 16


def test_the_recipe_offloads_the_frozen_part_unless_that_is_searched():
    assert workload_of(recipe()).encoders is DEVICE
    assert workload_of(recipe(pipeline={"offload_frozen": True})).encoders is HOST
    assert workload_of(recipe(pipeline={"offload_frozen": True, "plan": "auto"})).encoders is DEVICE


@pytest.mark.parametrize(
    ("pipeline", "sampling", "count"),
    [
        ("DiTPipeline", {}, 0),
        ("DiTPipeline", {"prompts": ["a", "b"]}, 0),
        ("StableDiffusionPipeline", {"every": 1, "prompts": ["a", "b"]}, 4),
        ("DiTPipeline", {"every": 1, "labels": [1, 2, 3], "guidance": 1}, 3),
        ("FluxPipeline", {"every": 1, "prompts": ["a", "b"]}, 2),
        ("FluxPipeline", {"every": 1, "prompts": ["a", "b"], "guidance": 2.5, "true_cfg_scale": 2}, 2),
        ("FluxPipeline", {"every": 1, "prompts": ["a", "b"], "negative_prompt": "c", "true_cfg_scale": 2}, 4),
    ],
)
def test_samples_of_both_halves_of_guidance_are_drawn_together(tmp_path, pipeline, sampling, count):
    assert (
        samples_drawn_together(recipe_of(model_of(tmp_path, pipeline), Path("data"), Path("run"), sampling=sampling))
        == count
    )
