"""A plan file that a run cannot train by is refused with what is wrong and what to do, before anything is loaded."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from kit.tiny_runs import recipe_of
from planner import synthetic

from diffusionpipe.errors import ConfigError, FileFormatError, RecipeError
from diffusionpipe.ir import Op, Sharded
from diffusionpipe.ir.files import plan_to_text, write_plan
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.proposal import pricing_of
from diffusionpipe.trainer.recipe import load_recipe, recipe_to_toml
from diffusionpipe.trainer.setup.plan_file import read_plan_file
from diffusionpipe.workflows.training.recipe_checks import checks_of_run

PROFILE = synthetic.chain([0.01] * 6, frozen=0.01)
MODEL = PROFILE.graph
LAYOUT = Layout(batch=8, stages=2, microbatches=2)
SETTING = Setting(profile=PROFILE, cluster=synthetic.cluster(2), workload=synthetic.workload(8))
PLAN = build_plan(MODEL, LAYOUT)
FILLED = build_plan(MODEL, LAYOUT, pricing=pricing_of(SETTING), filler=filler_of(SETTING))


def recipe(**training):
    return recipe_of(Path("model"), Path("data"), Path("run"), training={"batch": 8} | training)


def problem(plan, folder, *, model=MODEL, num_ranks=2, **training):
    write_plan(plan, folder / "plan.json")
    with pytest.raises(ConfigError) as caught:
        read_plan_file(folder / "plan.json", model, recipe(**training), num_ranks)
    message = str(caught.value)
    assert message.startswith(f"pipeline.plan: {folder / 'plan.json'} cannot be used for this run:")
    assert "diffusionpipe plan RECIPE" in message
    return message


@pytest.mark.parametrize(
    "plan", [PLAN, FILLED, build_plan(MODEL, replace(LAYOUT, replicas=(2, 1)))], ids=["plain", "filled", "replicas"]
)
def test_a_plan_is_read_as_it_was_written(plan, tmp_path):
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan_file(tmp_path / "plan.json", MODEL, recipe(), plan.mesh.num_ranks) == plan


def test_other_ranks_and_another_batch_are_both_named(tmp_path):
    message = problem(PLAN, tmp_path, num_ranks=4, batch=16)
    assert "it is for 2 ranks, but there are 4: start with --ranks 2" in message
    assert "it is for a batch of 8, but training.batch is 16: set training.batch = 8" in message


def early_problem(folder, plan_file):
    """The error before a model is read or a rank starts: here is no model."""
    pipeline = {"microbatches": None, "encode_chunk": None, "plan": str(plan_file)}
    made = recipe_of(folder / "model", folder, folder / "run", training={"batch": 16}, pipeline=pipeline)
    (folder / "recipe.toml").write_text(recipe_to_toml(made))
    with pytest.raises(RecipeError) as caught:
        load_recipe(folder / "recipe.toml", [], checks_of_run(4, None))
    return str(caught.value)


def test_other_ranks_and_another_batch_are_named_before_the_model_is_read(tmp_path):
    write_plan(PLAN, tmp_path / "plan.json")
    message = early_problem(tmp_path, tmp_path / "plan.json")
    assert f"pipeline.plan: {tmp_path / 'plan.json'} cannot be used for this run:" in message
    assert "it is for 2 ranks, but there are 4: start with --ranks 2" in message
    assert "it is for a batch of 8, but training.batch is 16: set training.batch = 8" in message


@pytest.mark.parametrize(("name", "reason"), [("/dev/zero", "more than"), ("/", "directory"), ("none.json", "No such")])
def test_a_path_without_a_plan_is_refused_before_the_model_is_read(name, reason, tmp_path):
    found = re.search(r"pipeline\.plan: (.*)", early_problem(tmp_path, name))
    assert found is not None
    assert name in found[1]
    assert reason in found[1]


def test_a_plan_of_another_model_names_the_layer_that_is_missing_on_either_side(tmp_path):
    longer, shorter = (synthetic.chain([0.01] * count, frozen=0.01).graph for count in (7, 5))
    assert "it lacks the layer layer6 (1 such layers)" in problem(PLAN, tmp_path, model=longer)
    assert "this one has no layer layer5 (1 such layers)" in problem(PLAN, tmp_path, model=shorter)


def test_layers_that_are_trained_on_one_side_only_are_named(tmp_path):
    trained = replace(MODEL, parameters=tuple(replace(p, is_trainable=True) for p in MODEL.parameters))
    assert "it freezes encode, which is trained here: change model.train" in problem(PLAN, tmp_path, model=trained)
    of_trained = build_plan(trained, LAYOUT)
    assert "it trains encode, which is frozen here: change model.train" in problem(of_trained, tmp_path)


def test_estimates_are_for_the_share_of_the_recipe(tmp_path):
    half, whole = (synthetic.conditioned(PROFILE, share).graph for share in (0.5, 1.0))
    plan = build_plan(half, LAYOUT)
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan_file(tmp_path / "plan.json", half, recipe(), 2) == plan
    words = "it makes estimates for {} of 2 micro-batches, but objective.self_conditioning wants them for {}"
    assert words.format(1, 2) in problem(plan, tmp_path, model=whole)
    assert words.format(1, 0) in problem(plan, tmp_path)
    assert words.format(0, 1) in problem(PLAN, tmp_path, model=half)


def test_other_checkpointing_is_named_with_the_key(tmp_path):
    message = problem(PLAN, tmp_path, activation_checkpointing=["layer[12]"])
    assert "it keeps the activations of layer1 (2 such layers)" in message
    assert "training.activation_checkpointing, which is ['layer[12]']" in message
    again = build_plan(MODEL, replace(LAYOUT, checkpointed=("*",)))
    message = problem(again, tmp_path, activation_checkpointing=False)
    assert "it recomputes the activations of layer0 (6 such layers)" in message


def test_a_recipe_that_states_no_checkpointing_takes_the_plans(tmp_path):
    again = build_plan(MODEL, replace(LAYOUT, checkpointed=("*",)))
    write_plan(again, tmp_path / "plan.json")
    assert read_plan_file(tmp_path / "plan.json", MODEL, recipe(), 2) == again


def test_an_illegal_order_is_refused_with_worker_and_action(tmp_path):
    text = plan_to_text(PLAN)
    order = " ".join(map(str, PLAN.train.orders[0]))
    assert order in text
    (tmp_path / "plan.json").write_text(text.replace(order, re.sub(r"\b0F0 ", "", order), 1))
    with pytest.raises(ConfigError, match="its train schedule is illegal: worker 0: 0F0 is missing"):
        read_plan_file(tmp_path / "plan.json", MODEL, recipe(), 2)


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(FileFormatError, match=r"plan\.json"):
        read_plan_file(tmp_path / "plan.json", MODEL, recipe(), 2)


def without(schedule, op):
    return replace(schedule, orders=tuple(tuple(a for a in order if a.op is not op) for order in schedule.orders))


COPIES = build_plan(MODEL, replace(LAYOUT, stages=1, data_parallel=2))
SWAPPED = replace(PLAN, blocks=(PLAN.blocks[1], PLAN.blocks[0], PLAN.blocks[2]))
OTHER_CUT = replace(PLAN, blocks=((*PLAN.blocks[0], PLAN.blocks[1][0]), PLAN.blocks[1][1:], PLAN.blocks[2]))
EDITED = {
    "no sum over copies": (replace(COPIES, train=without(COPIES.train, Op.REDUCE_GRAD)), "no action sums the"),
    "layers in another order": (SWAPPED, "its layers are in another order"),
    "a cut without its tensors": (OTHER_CUT, "does not bring h3 to stage 1, whose layers read it"),
    "a block too few": (replace(PLAN, blocks=PLAN.blocks[:2]), "runs block 2, but the plan lists 2 blocks"),
    "no prologue": (replace(FILLED, prologue=None), "a prologue belongs to a train schedule that encodes ahead"),
    "a prologue too many": (replace(PLAN, prologue=FILLED.prologue), "a prologue belongs to"),
    "a mesh of other workers": (
        replace(PLAN, mesh=replace(PLAN.mesh, pipeline=3)),
        "has 2 workers, but its mesh has 3",
    ),
    "validation elsewhere": (
        replace(PLAN, validate=build_plan(MODEL, replace(LAYOUT, stages=1, microbatches=1)).validate),
        "its validate schedule has 1 workers, but its mesh has 2",
    ),
    "frozen layers left out": (
        replace(PLAN, blocks=(*PLAN.blocks[:2], ()), ), "it lacks the layer encode",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("plan", "words"), EDITED.values(), ids=EDITED)
def test_a_plan_edited_by_hand_is_refused(plan, words, tmp_path):
    assert words in problem(plan, tmp_path)


def test_a_parameter_that_two_ranks_would_train_apart_is_named_with_its_layers(tmp_path):
    first, last = MODEL.layer(MODEL.backbone_layers[0]), MODEL.backbone_layers[-1]
    layers = tuple(replace(one, parameters=first.parameters) if one.name == last else one for one in MODEL.layers)
    message = problem(PLAN, tmp_path, model=replace(MODEL, layers=layers))
    assert f"{first.name} and {last} train the same parameter {first.parameters[0]}" in message


SHARDED = build_plan(MODEL, Layout(batch=8, stages=1, microbatches=1, data_parallel=2, sharded=Sharded.ALL, buckets=3))


def test_a_sharded_plan_is_read_as_it_was_written(tmp_path):
    write_plan(SHARDED, tmp_path / "plan.json")
    assert read_plan_file(tmp_path / "plan.json", MODEL, recipe(), 2) == SHARDED


def test_what_is_gathered_must_be_in_parts_and_the_other_way_round(tmp_path):
    whole = replace(SHARDED, mesh=replace(SHARDED.mesh, shard=1))
    assert "its train schedule gathers block 0, which its mesh does not shard" in problem(whole, tmp_path)
    copies = build_plan(MODEL, Layout(batch=8, stages=1, microbatches=1, data_parallel=2, buckets=3))
    sampled = replace(SHARDED, sample=copies.sample)
    assert "its sample schedule does not gather block 0" in problem(sampled, tmp_path)


def test_a_plan_file_from_before_parameters_were_sharded_is_whole(tmp_path):
    text = plan_to_text(PLAN)
    assert '"shard": 1' in text
    (tmp_path / "plan.json").write_text(re.sub(r'"shard": 1, ', "", text))
    assert read_plan_file(tmp_path / "plan.json", MODEL, recipe(), 2).mesh.shard == 1
