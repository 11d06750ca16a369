"""Runs whose orders come from a file: `pipeline.orders`."""

from pathlib import Path

import pytest
import torch
from kit.tiers import quick_and_slow
from kit.tiny_runs import losses_of, recipe_of, save_pictures, save_stable_diffusion, tensors_of, train
from typer.testing import CliRunner

from diffusionpipe import cli
from diffusionpipe.errors import RecipeError
from diffusionpipe.ir.files import read_plan
from diffusionpipe.ordering import Goal, HalfStage, Instance, Placing
from diffusionpipe.ordering.instance_file import write_instance
from diffusionpipe.trainer.checkpoints.checkpoint import latest
from diffusionpipe.trainer.recipe import load_recipe, recipe_to_toml
from diffusionpipe.workflows.training.recipe_checks import checks_of_run

pytestmark = pytest.mark.usefixtures("one_thread")
RULES = Path(__file__).parents[2] / "examples/orders/1f1b.rules"


def schedule(*arguments):
    result = CliRunner().invoke(cli.app, ["schedule", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orders")
    save_stable_diffusion(folder / "sd")
    save_pictures(folder / "data", count=8)
    (folder / "1f1b.csv").write_text(schedule("1f1b", "--ranks", 2, "--microbatches", 2, "--csv"))
    return folder


@pytest.fixture(scope="module")
def recipe(place):
    def make(name, **sections):
        training = {"steps": 2, "clip_norm": 0.1} | sections.pop("training", {})
        return recipe_of(place / "sd", place / "data", place / name, training=training, **sections)

    return make


@pytest.fixture(scope="module")
def family(crew, recipe):
    """A finished run by the family 1f1b."""
    made = recipe("family", pipeline={"schedule": "1f1b"})
    assert crew.run(train, made) == [2, 2]
    return made


@pytest.mark.parametrize("kind", quick_and_slow(["csv", "rules"], quick=["rules"]))
def test_1f1b_from_a_file_trains_with_the_bits_of_the_family(crew, recipe, family, place, kind):
    orders = place / "1f1b.csv" if kind == "csv" else RULES
    made = recipe(kind, pipeline={"orders": str(orders)})
    assert crew.run(train, made) == [2, 2]
    assert losses_of(made.run.folder) == losses_of(family.run.folder)
    found, expected = (tensors_of(latest(one.run.folder)) for one in (made, family))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert read_plan(made.run.folder / "plan.json").train.name == orders.name


@pytest.fixture(scope="module")
def searched(place):
    """The file of an answer of `schedule search`: a V of half-stages with a split backward."""
    half = HalfStage(forward=2, input_grad=3, weight_grad=1, activation=2, kept_after_input_grad=1)
    instance = Instance(
        ranks=2,
        microbatches=2,
        placement=Placing.V,
        stages=(half,) * 4,
        comm=1,
        memory_limit=None,
        objective=Goal.MAKESPAN,
        seconds=0,
    )
    write_instance(instance, place / "instance.json")
    schedule("search", place / "instance.json", "--out", place / "searched.json")
    return str(place / "searched.json")


def assert_learns_as_the_family(made, family):
    expected = losses_of(family.run.folder)
    losses = losses_of(made.run.folder)
    assert losses.keys() == expected.keys()
    assert list(losses.values()) == pytest.approx(list(expected.values()), rel=1e-5)


def test_an_answer_of_the_search_trains_with_recomputation(crew, recipe, family, searched):
    made = recipe("searched", training={"activation_checkpointing": True}, pipeline={"orders": searched})
    assert crew.run(train, made) == [2, 2]
    assert_learns_as_the_family(made, family)
    plan = read_plan(made.run.folder / "plan.json")
    assert (plan.train.name, len(plan.blocks), bool(plan.checkpointed)) == ("searched.json", 5, True)


@pytest.mark.slow
def test_a_file_of_orders_is_filled(crew, recipe, family, searched):
    made = recipe("filled", pipeline={"orders": searched, "fill": True})
    assert crew.run(train, made) == [2, 2]
    assert_learns_as_the_family(made, family)
    assert read_plan(made.run.folder / "plan.json").prologue is not None


@pytest.mark.slow
def test_adapters_train_by_a_file_of_orders_as_by_a_family(crew, recipe, place):
    pytest.importorskip("peft")
    lora = {"lora": {"rank": 2}}
    made, expected = recipe("lora", pipeline={"orders": str(RULES)}, **lora), recipe("lora-family", **lora)
    assert crew.run(train, made) == crew.run(train, expected) == [2, 2]
    assert losses_of(made.run.folder) == losses_of(expected.run.folder)


def problem_of(recipe, place, num_ranks, **pipeline):
    """What the command says before any rank starts."""
    path = place / "refused.toml"
    path.write_text(recipe_to_toml(recipe("refused")))
    keys = [f"pipeline.{key}={value}" for key, value in pipeline.items()]
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, keys, checks_of_run(num_ranks, None))
    return str(caught.value).replace(f"{place}/", "").split("\n", 1)[1].strip()


def test_other_sizes_are_refused_with_both_numbers(recipe, place):
    csv = place / "1f1b.csv"
    assert problem_of(recipe, place, 3, orders=csv) == (
        "pipeline.orders: 1f1b.csv: it has orders for 2 ranks, but the number of stages on these ranks is 3; use 2, or "
        "another file (set on the command line)"
    )
    assert problem_of(recipe, place, 2, orders=csv, microbatches=4) == (
        "pipeline.orders: 1f1b.csv: it has orders for 2 micro-batches, but pipeline.microbatches is 4; use 2, or "
        "another file (set on the command line)"
    )


@pytest.mark.parametrize("sharded", ["optimizer", "true"])
def test_copies_in_parts_of_a_family_with_two_directions_are_refused_before_ranks_start(recipe, place, sharded):
    asked = {"stages": 2, "data_parallel": 2, "microbatches": 2, "schedule": "chimera"}
    assert problem_of(recipe, place, 4, sharded=sharded, **asked).startswith(
        "pipeline.schedule: the schedule 'chimera' has copies of its blocks on several workers, which cannot be "
        "sharded; use another schedule"
    )


def test_orders_and_a_schedule_or_a_search_exclude_each_other(recipe, place):
    csv = place / "1f1b.csv"
    assert problem_of(recipe, place, 2, orders=csv, schedule="gpipe").startswith(
        "pipeline.schedule: pipeline.orders sets it; remove one of the two"
    )
    assert problem_of(recipe, place, 2, orders=csv, plan="auto").startswith(
        "pipeline.orders: the search chooses it; remove it"
    )
    assert "pipeline.orders: the plan file plan.json sets it; remove it" in problem_of(
        recipe, place, 2, orders=csv, plan="plan.json"
    )


def test_illegal_orders_are_refused_before_any_rank_starts(recipe, place):
    (place / "illegal.csv").write_text("0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1B1\n")
    (place / "forwards.csv").write_text("0F0,0F1\n1F0,1F1\n")
    assert problem_of(recipe, place, 2, orders=place / "illegal.csv").startswith(
        "pipeline.orders: illegal.csv: the orders are illegal:\n    line 2, cell 1: worker 1: 1B0 comes before 1F0"
    )
    assert problem_of(recipe, place, 2, orders=place / "forwards.csv").startswith(
        "pipeline.orders: forwards.csv: the schedule has only forwards; add the backwards"
    )
    assert "gone.csv: cannot be read" in problem_of(recipe, place, 2, orders=place / "gone.csv")
