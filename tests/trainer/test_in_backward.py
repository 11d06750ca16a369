"""Updates within the backward: the bits of updates after it, one gradient at a time, and the bytes that plans count."""

import re
import shutil
from math import prod

import pytest
import torch
from kit.crew import crew_of
from kit.tiny_runs import losses_of, opened_here, recipe_of, save_dit, save_pictures, tensors_of, train, train_here

from diffusionpipe.errors import NonFiniteLossError
from diffusionpipe.holding import Ledger
from diffusionpipe.trainer.checkpoints.checkpoint import latest
from diffusionpipe.trainer.checkpoints.checkpoint_folder import FOLDER
from diffusionpipe.trainer.model.workload import workload_of
from diffusionpipe.trainer.optim.in_backward import InBackward

pytestmark = pytest.mark.usefixtures("one_thread")

TRAINING = {"clip_norm": "none", "ema_decay": 0.9}
NARROW = TRAINING | {"precision": "bfloat16", "weights": "bfloat16"}
WAYS = {
    "AdamW": (TRAINING, {}),
    "bfloat16": (NARROW, {}),
    "kahan, recomputed": (NARROW | {"rounding": "kahan", "activation_checkpointing": True}, {}),
    "8 bits": (TRAINING, {"name": "bitsandbytes.optim.AdamW8bit"}),
    "Muon": (TRAINING, {"name": "Muon", "rest": {"name": "AdamW"}}),
    "host": (TRAINING, {"states": "host"}),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("in_backward")
    save_dit(folder / "dit")
    save_pictures(folder / "data")
    return folder


@pytest.fixture
def recipe(place):
    def make(name, training=TRAINING, **sections):
        common = {"checkpoint": {"every": 3, "keep": 9}, "training": training}
        own = {"pipeline": {"microbatches": 1, "encode_chunk": 2}}
        return recipe_of(place / "dit", place / "data", place / name, **common | own | sections)

    return make


def assert_same_end(found, expected):
    one, other = tensors_of(latest(found)), tensors_of(latest(expected))
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way != "bfloat16")) for way in WAYS])
def test_each_parameter_gets_the_bits_of_an_update_after_the_backward(recipe, place, way):
    training, optimizer = WAYS[way]
    assert train_here(recipe(f"{way} after", training, optimizer=optimizer), exports=False) == 6
    assert train_here(recipe(f"{way} in", training, optimizer=optimizer | {"in_backward": True}), exports=False) == 6
    assert_same_end(place / f"{way} in", place / f"{way} after")
    assert losses_of(place / f"{way} in") == losses_of(place / f"{way} after")
    start = tensors_of(place / f"{way} in" / FOLDER / "step-00000003")
    end = tensors_of(latest(place / f"{way} in"))
    assert any(not torch.equal(end[name], start[name]) for name in end if name.startswith("model."))


@pytest.mark.slow
def test_two_stages_and_a_run_that_goes_on_have_the_same_bits(recipe, place):
    own = {"optimizer": {"in_backward": True}}
    assert train_here(recipe("one", NARROW, **own)) == 6
    with crew_of(2) as crew:
        assert crew.run(train, recipe("two", NARROW, **own)) == [6, 6]
    assert_same_end(place / "two", place / "one")
    shutil.copytree(place / "two", place / "on")
    shutil.rmtree(place / "on" / FOLDER / "step-00000006")
    assert train_here(recipe("on", NARROW), "3") == 6  # and may end without it
    assert_same_end(place / "on", place / "one")


def test_no_more_than_a_layers_gradients_are_there_and_the_plan_counts_one(recipe, monkeypatch):
    most, own = [], []

    def noted(self, parameter):
        most.append(sum(p.grad.nbytes for p in self._all if p.grad is not None))
        own.append(parameter.grad.nbytes)
        take(self, parameter)
        assert parameter.grad is None

    take = InBackward._take
    monkeypatch.setattr(InBackward, "_take", noted)
    made = recipe("counted", TRAINING | {"steps": 2}, optimizer={"in_backward": True})
    assert train_here(made) == 2
    assert max(most) <= 2 * max(own)  # a weight and its bias are made by one node
    assert max(most) < 0.5 * sum(own) / 2


def test_plans_count_no_gradient_but_the_largest(recipe):

    after = recipe("plain")
    model = opened_here(after).model
    names = [p.name for p in model.parameters]
    held = [
        Ledger(graph=model, workload=workload_of(one, model)).held(names)
        for one in (after, recipe("early", optimizer={"in_backward": True}))
    ]
    largest = max(4 * prod(p.shape) for p in model.parameters if p.is_trainable)
    assert held[1] == held[0]._replace(gradients=0, backup=largest)


@pytest.mark.slow
def test_the_norm_is_the_one_of_gradients_that_stay(recipe, place):
    for name, optimizer in (("norm after", {}), ("norm in", {"in_backward": True})):
        assert train_here(recipe(name, TRAINING | {"steps": 2}, optimizer=optimizer)) == 2
    after, within = (losses_of(place / name, "gradient_norm") for name in ("norm after", "norm in"))
    assert within == pytest.approx(after, rel=1e-6)
    assert len(within) == 2


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        (
            {"training": TRAINING | {"clip_norm": 1.0}},
            "gradients are gone when their norm is there; set training.",
        ),
        ({"training": TRAINING | {"on_spike": "skip"}}, "a spike is seen when all is updated"),
        ({"training": TRAINING | {"post_validation": True}}, "an update cannot be undone"),
        ({"pipeline": {"microbatches": 2}}, "the gradients of several micro-batches are summed"),
        ({"pipeline": {"microbatches": 1, "data_parallel": 2}}, "copies sum their gradients when the backward is over"),
        ({"pipeline": {"microbatches": 1, "stages": 1, "replicas": [2]}}, "copies sum their gradients"),
        ({"pipeline": {"plan": "auto", "microbatches": 1, "encode_chunk": None}}, "copies sum their gradients"),
        ({"optimizer": {"name": "pytorch_optimizer.Lion", "in_backward": True}}, "pytorch_optimizer.Lion steps all"),
    ],
)
def test_it_is_refused_where_gradients_are_not_final_one_by_one(recipe, sections, why):
    with pytest.raises(ValueError, match=re.escape(f"optimizer.in_backward: {why}")):
        recipe("refused", **{"optimizer": {"in_backward": True}} | sections)


@pytest.mark.slow
def test_a_schedule_with_split_backwards_is_refused(recipe):
    made = recipe(
        "split",
        optimizer={"in_backward": True},
        pipeline={"microbatches": 1, "encode_chunk": 2, "schedule": "zb-h1"},
    )
    with crew_of(2) as crew:
        found = crew.run(train, made)
    assert all("optimizer.in_backward: the schedule computes gradients of weights later" in str(one) for one in found)


def test_a_loss_that_is_not_finite_says_that_weights_have_changed(recipe):
    rates = {"optimizer": {"in_backward": True, "learning_rate": 1e30}}
    with pytest.raises(NonFiniteLossError, match="the backward has updated weights already, so resume from the last"):
        train_here(recipe("burst", **rates))
