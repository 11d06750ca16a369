"""States of an optimizer between updates: stepped a bucket at a time, kept in another form, saved and resumed in it.

One form is known to this file alone: second moments in bfloat16 on the host. Nothing in the product names it.
"""

import shutil

import pytest
import torch
from kit.tiny_runs import recipe_of, save_dit, save_pictures, tensors_of, train, train_here
from torch import nn

from diffusionpipe.costs.graph import ParameterSpec
from diffusionpipe.errors import ConfigError
from diffusionpipe.holding import Item, State
from diffusionpipe.holding.rest import RESTS, Rest
from diffusionpipe.holding.state import Sized, held_of, plain_states
from diffusionpipe.trainer.checkpoints.checkpoint import latest
from diffusionpipe.trainer.checkpoints.checkpoint_folder import FOLDER
from diffusionpipe.trainer.optim import resting
from diffusionpipe.trainer.optim.optimizer import build_optimizer

pytestmark = pytest.mark.usefixtures("one_thread")

OWN = "second moments in bfloat16 on the host"
PLAIN = {"clip_norm": "none", "ema_decay": "none"}
MATRIX = {"name": "matrix", "shape": (10, 10), "dtype": "float32", "is_trainable": True}
RATE, DECAY, BETAS, EPSILON = 0.1, 0.01, (0.9, 0.999), 1e-8


class SecondMoments(Rest):
    """Half of AdamW's numbers at a quarter of the bytes, none of them on the device."""

    def takes(self, key):
        return key == "exp_avg_sq"

    def kept(self, state):
        half = state.width // 2
        return (
            State(item=Item.OPTIMIZER, width=half, name="exp_avg"),
            State(item=Item.OPTIMIZER, width=2, name="exp_avg_sq", is_hosted=True),
        )


def know():
    RESTS[OWN] = SecondMoments(is_hosted=True, dtype="bfloat16")


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    monkeypatch.setitem(RESTS, OWN, None)
    know()


def train_knowing(job, recipe, resume=None):
    """In another process, which knows the form too."""
    know()
    return train(job, recipe, resume)


def parameters():
    torch.manual_seed(0)
    return {f"p{i}": nn.Parameter(torch.randn(shape)) for i, shape in enumerate([(5, 7), (9,), (4, 4), (30,), (2, 3)])}


def stepped(named, rest, name="AdamW", steps=4, **arguments):
    optimizer = build_optimizer(name, named, RATE, {"weight_decay": DECAY, **arguments})
    optimizer.rest(rest)
    torch.manual_seed(1)
    for _ in range(steps):
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape)
        gradients = [parameter.grad for parameter in named.values()]
        optimizer.step()
        assert all(p.grad is one for p, one in zip(named.values(), gradients, strict=True))
    return optimizer


@pytest.mark.parametrize(
    ("name", "arguments"),
    [(name, arguments) for name in ("AdamW", "NAdam", "RMSprop") for arguments in ({}, {"foreach": True})]
    + [("AdamW", {"fused": True})],  # torch has no such kernel for the others
)
def test_buckets_of_parameters_are_stepped_as_all_at_once(monkeypatch, name, arguments):
    monkeypatch.setattr(resting, "BUCKET", 100)
    at_once, by_buckets = parameters(), parameters()
    stepped(at_once, RESTS["device"], name, **arguments)
    stepped(by_buckets, RESTS["host"], name, **arguments)
    assert all(torch.equal(at_once[key], by_buckets[key]) for key in at_once)


def test_no_more_states_than_a_buckets_are_wide_at_a_time(monkeypatch):
    monkeypatch.setattr(resting, "BUCKET", 100)
    named, wide = parameters(), []
    optimizer = build_optimizer("AdamW", named, RATE, {})
    optimizer.rest(RESTS[OWN])
    (inner,) = optimizer.parts
    step = inner.step

    def watched():
        states = [inner.state.get(parameter, {}) for parameter in named.values()]
        moving = [state["exp_avg_sq"] for state in states if "exp_avg_sq" in state]
        wide.append(sum(value.dtype == torch.float32 for value in moving))
        step()

    monkeypatch.setattr(inner, "step", watched)
    for _ in range(2):
        for parameter in named.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    half = len(wide) // 2
    assert half > 1  # buckets
    assert sum(wide[half:]) == len(named)
    assert max(wide) < len(named)


def test_moments_in_bfloat16_follow_the_written_out_recurrence():
    named, expected = parameters(), {name: p.detach().clone() for name, p in parameters().items()}
    stepped(named, RESTS[OWN], foreach=False)
    first = {name: torch.zeros_like(p) for name, p in expected.items()}
    second = {name: torch.zeros_like(p, dtype=torch.bfloat16) for name, p in expected.items()}
    torch.manual_seed(1)
    for step in range(1, 5):
        for name, p in expected.items():
            gradient = torch.randn(p.shape)
            p.mul_(1 - RATE * DECAY)
            first[name].lerp_(gradient, 1 - BETAS[0])
            wide = second[name].float().mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            second[name] = wide.bfloat16()
            root = (wide.sqrt() / (1 - BETAS[1] ** step) ** 0.5).add_(EPSILON)
            p.addcdiv_(first[name], root, value=-RATE / (1 - BETAS[0] ** step))
    assert all(torch.allclose(named[name], p, rtol=0, atol=1e-6) for name, p in expected.items())


def test_states_on_the_host_count_there():
    matrix = ParameterSpec(**MATRIX)

    def held(rest):
        (state,) = [state for state in plain_states() if state.item is Item.OPTIMIZER]
        rest_of = [state for state in plain_states() if state.item is not Item.OPTIMIZER]
        return held_of((*rest_of, *rest.kept(state)), matrix)

    assert (held(RESTS["device"]).optimizer, held(RESTS["device"]).hosted) == (800, 0)
    assert (held(RESTS["host"]).optimizer, held(RESTS["host"]).hosted) == (0, 800)
    assert (held(RESTS[OWN]).optimizer, held(RESTS[OWN]).hosted) == (400, 200)
    assert held(RESTS[OWN]).saved == 400 + 400 + 200


def test_states_that_are_counted_by_parameter_have_no_other_numbers():
    counted = State(item=Item.OPTIMIZER, width=2, sizes=(Sized("matrix", 212),))
    assert held_of(Rest(is_hosted=True).kept(counted), ParameterSpec(**MATRIX)).hosted == 212
    with pytest.raises(ConfigError, match=r'optimizer.states: bfloat16 is for .* set it to "device" or "host"'):
        Rest(dtype="bfloat16").kept(counted)


# Whole runs.


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resting")
    save_dit(folder / "dit")
    save_pictures(folder / "data")
    return folder


@pytest.fixture
def recipe(place):
    def make(name, states, **sections):
        training = PLAIN | sections.pop("training", {})
        common = {"checkpoint": {"every": 3, "keep": 9}, "training": training, "optimizer": {"states": states}}
        return recipe_of(place / "dit", place / "data", place / name, **common | sections)

    return make


def same_bits(found, expected):
    one, other = tensors_of(latest(found)), tensors_of(latest(expected))
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_form_of_this_file_is_run_saved_and_resumed_over_stages(crew, recipe, place):
    assert train_here(recipe("own", OWN), exports=False) == 6
    saved = tensors_of(latest(place / "own"))
    moments = {name: tensor.dtype for name, tensor in saved.items() if name.endswith("exp_avg_sq")}
    assert moments
    assert set(moments.values()) == {torch.bfloat16}
    shutil.copytree(place / "own", place / "own-on")
    shutil.rmtree(place / "own-on" / FOLDER / "step-00000006")
    assert crew.run(train_knowing, recipe("own-on", OWN), "3") == [6, 6]
    assert same_bits(place / "own-on", place / "own")
    assert train_here(recipe("wide", "device"), exports=False) == 6
    assert not same_bits(place / "wide", place / "own")


@pytest.mark.slow
def test_states_on_the_host_change_no_bit(recipe, place):
    assert train_here(recipe("device", "device")) == train_here(recipe("host", "host")) == 6
    assert same_bits(place / "host", place / "device")


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"optimizer": {"states": "disk"}}, "'disk' is not known; use device or host or"),
        ({"optimizer": {"states": "host"}, "training": {"post_validation": True}}, "keeps a copy of all states"),
        (
            {"optimizer": {"states": "host", "name": "schedulefree.AdamWScheduleFree"}},
            "counts steps of all its parameters together",
        ),
    ],
    ids=["unknown", "post-validated", "steps of all"],
)
def test_it_is_refused_where_it_cannot_be(recipe, place, sections, why):
    with pytest.raises(ValueError, match=why):
        recipe_of(place / "dit", place / "data", place / "refused", **{"training": {"ema_decay": "none"}} | sections)
