"""`plan --weights bfloat16`: the bytes of a recipe's training, and the keys that a plan file hands to recipes."""

import pytest
from kit.tiny_runs import opened_here, save_pictures, save_stable_diffusion

from diffusionpipe.errors import ConfigError, ModelError
from diffusionpipe.holding import Ledger
from diffusionpipe.ir import Sharded
from diffusionpipe.ir.files import read_plan
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.search.search import search
from diffusionpipe.trainer.model.workload import workload_of
from diffusionpipe.trainer.recipe import load_recipe
from diffusionpipe.workflows.planning.question import (
    StatedPlace,
    StatedTraining,
    question_of_model,
    write_answer,
)
from diffusionpipe.workflows.planning.recipe_setting import decided_for
from diffusionpipe.workflows.planning.stated_model import StatedModel, named_model, stated_graph
from diffusionpipe.workflows.telling import SILENCE

pytestmark = pytest.mark.usefixtures("one_trace")

RECIPE = """
[model]
path = "{0}/sd"
[data]
train = "{0}/data"
resolution = 32
[training]
steps = 2
[pipeline]
plan = "{0}/plan.json"
"""


def asked_for(place, gradients, *, optimizer="AdamW", cluster="rtx4090x2"):
    model = named_model(str(place / "sd"), None, resolution="32", weights="bfloat16")
    training = StatedTraining(batch=4, checkpoint=None, has_ema=False, optimizer=optimizer, gradients=gradients)
    devices = StatedPlace(cluster=cluster, used=(), memory=None)
    return question_of_model(model, training, devices, uses_cache=False, tell=SILENCE)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    save_stable_diffusion(folder / "sd")
    save_pictures(folder / "data", count=4, resolution=32)
    (folder / "recipe.toml").write_text(RECIPE.format(folder))
    return folder


@pytest.fixture(scope="module")
def narrow(place):
    return asked_for(place, "bfloat16")


@pytest.mark.parametrize("gradients", ["bfloat16", pytest.param(None, marks=pytest.mark.slow)])
def test_a_recipe_that_trains_by_the_plan_holds_the_bytes_that_the_plan_counts(place, narrow, gradients):
    asked = narrow if gradients else asked_for(place, gradients)
    write_answer(choose(asked.setting, fill=True), asked, place / "plan.json")
    stated = read_plan(place / "plan.json").made_with
    expected = {"--weights=bfloat16", "training.weights=bfloat16", f"training.gradients={gradients or 'float32'}"}
    assert expected <= set(stated)
    recipe = decided_for(load_recipe(place / "recipe.toml"), asked.setting.cluster)
    model = opened_here(recipe).model
    assert model.parameters == asked.setting.graph.parameters
    own, workload = Ledger(graph=model, workload=workload_of(recipe, model)), asked.setting.workload
    names = [p.name for p in model.parameters]
    assert own.held(names) == Ledger(graph=model, workload=workload).held(names)
    narrow = {p.name for p in model.parameters if p.is_trainable and p.dtype == "bfloat16"}
    assert 0 < len(narrow) < len(own.trained)  # norms stay wide
    found = own.held(narrow)
    assert found.gradients == found.parameters * (1 if gradients else 2)
    assert found.optimizer == 4 * found.parameters


@pytest.mark.slow
def test_no_copies_that_hold_weights_in_parts_are_searched_where_updates_round_them(narrow):
    found = search(narrow.setting).finalists
    assert found
    assert all(candidate.sharded is not Sharded.ALL for candidate, _ in found)


def test_a_card_without_bfloat16_is_refused(place):
    with pytest.raises(ConfigError, match="--weights bfloat16: Tesla T4 has no bfloat16 and computes in float32"):
        asked_for(place, None, cluster="t4x2")


def test_a_configuration_that_trains_adapters_is_refused():
    with pytest.raises(ModelError, match="--weights bfloat16: adapters take few bytes"):
        stated_graph(StatedModel(name="flux.1-dev-lora", has_narrow_weights=True))
