"""Runs whose trained weights are kept in bfloat16: the same on one and two stages, resumed, exported and counted."""

import re
import shutil

import pytest
import torch
from diffusers import DiTTransformer2DModel
from kit.crew import crew_of
from kit.tiny_runs import losses_of, recipe_of, save_dit, save_pictures, tensors_of, train, train_here
from safetensors.torch import load_file

from diffusionpipe.errors import CheckpointError, RecipeError
from diffusionpipe.holding import Item, Ledger
from diffusionpipe.trainer.checkpoints.checkpoint import latest
from diffusionpipe.trainer.checkpoints.checkpoint_folder import FOLDER
from diffusionpipe.trainer.model.workload import workload_of
from diffusionpipe.trainer.recipe.decided import decided
from diffusionpipe.trainer.step.loop import Stepper

pytestmark = pytest.mark.usefixtures("one_thread")

NARROW = {"precision": "bfloat16", "weights": "bfloat16", "clip_norm": "none", "ema_decay": "none"}
KAHAN = NARROW | {"rounding": "kahan"}
WAYS = {"stochastic": NARROW, "kahan": KAHAN, "clipped and averaged": NARROW | {"clip_norm": 0.5, "ema_decay": 0.9}}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("narrow")
    save_dit(folder / "dit")
    save_pictures(folder / "data")
    return folder


@pytest.fixture
def recipe(place):
    def make(name, training=NARROW, **sections):
        common = {"checkpoint": {"every": 3, "keep": 9}, "training": training}
        return recipe_of(place / "dit", place / "data", place / name, **common | sections)

    return make


def differing(found, expected):
    one, other = tensors_of(latest(found)), tensors_of(latest(expected))
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


def continued(place, name, copy):
    """A copy of a run without its last checkpoint."""
    shutil.copytree(place / name, place / copy)
    shutil.rmtree(place / copy / FOLDER / "step-00000006")


def test_a_run_that_goes_on_has_the_bits_of_one_that_was_not_stopped(recipe, place):
    """Kahan's second numbers are states that must be saved, so they stand for both ways here."""
    assert train_here(recipe("one", KAHAN), exports=False) == 6
    saved = tensors_of(latest(place / "one"))
    assert {saved[name].dtype for name in saved if name.startswith("model.") and "attn1.to_q" in name} == {
        torch.bfloat16
    }
    assert {saved[name].dtype for name in saved if name.endswith("exp_avg")} == {torch.float32}
    assert any(saved[name].any() for name in saved if name.endswith("rounding_error"))
    continued(place, "one", "one-on")
    assert train_here(recipe("one-on", KAHAN), "3", exports=False) == 6
    assert differing(place / "one-on", place / "one") == []


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_the_same_on_both_layouts(recipe, place, way):
    with crew_of(2) as crew:
        assert train_here(recipe(f"{way} 1", WAYS[way])) == 6
        assert crew.run(train, recipe(f"{way} 2", WAYS[way])) == [6, 6]
        other = differing(place / f"{way} 2", place / f"{way} 1")
        assert other == [] or way.startswith("clipped")  # whose norm may differ in its last digit
        continued(place, f"{way} 2", f"{way} 2-1")
        assert train_here(recipe(f"{way} 2-1", WAYS[way]), "3") == 6
        other = differing(place / f"{way} 2-1", place / f"{way} 2")
        assert other == [] or way.startswith("clipped")


COPIES = {"pipeline": {"data_parallel": 2, "encode_chunk": 2}}
PARTS = {"pipeline": {"data_parallel": 2, "encode_chunk": 2, "sharded": "optimizer"}}
OF_COPIES = {
    "stochastic": NARROW,
    "kahan": KAHAN,
    "gradients of two bytes": NARROW | {"gradients": "bfloat16"},
    "averaged": NARROW | {"ema_decay": 0.9, "ema_states": "bfloat16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", OF_COPIES)
def test_layouts_with_the_same_micro_batches_and_copies_give_the_same_bits(recipe, place, way):
    """Two copies of one stage and of two stages, with the optimizer's states whole and in parts."""
    training = OF_COPIES[way]
    with crew_of(2) as crew:
        assert crew.run(train, recipe(f"{way} 2x1", training, **COPIES)) == [6, 6]
        assert crew.run(train, recipe(f"{way} 2x1 in parts", training, **PARTS)) == [6, 6]
        continued(place, f"{way} 2x1 in parts", f"{way} 2x1 whole")
        assert crew.run(train, recipe(f"{way} 2x1 whole", training, **COPIES), "3") == [6, 6]
    with crew_of(4) as crew:
        assert crew.run(train, recipe(f"{way} 2x2", training, **COPIES)) == [6] * 4
        assert crew.run(train, recipe(f"{way} 2x2 in parts", training, **PARTS)) == [6] * 4
    for other in ("2x1 in parts", "2x1 whole", "2x2", "2x2 in parts"):
        assert differing(place / f"{way} {other}", place / f"{way} 2x1") == [], other


@pytest.mark.slow
def test_three_copies_with_states_in_parts_train_as_whole_ones(recipe, place):
    """Gloo's sum over all and its sum at an owner add three gradients in another order: the last digits may differ.

    The bias of a key has a gradient of zero in exact arithmetic, and AdamW divides its last digits by themselves.
    """
    training = {"precision": "float64", "batch": 6, "clip_norm": "none", "steps": 5}
    pipeline = {"data_parallel": 3, "encode_chunk": 2}
    with crew_of(3) as crew:
        assert crew.run(train, recipe("whole of three", training, pipeline=pipeline)) == [5] * 3
        assert (
            crew.run(train, recipe("parts of three", training, pipeline=pipeline | {"sharded": "optimizer"})) == [5] * 3
        )
    one, other = (tensors_of(latest(place / f"{name} of three")) for name in ("parts", "whole"))
    assert one.keys() == other.keys()
    compared = [name for name in one if "to_k.bias" not in name]
    assert len(compared) > 0.9 * len(one)
    for name in compared:
        torch.testing.assert_close(one[name], other[name], rtol=1e-12, atol=1e-12)


def test_a_saved_second_number_that_is_deleted_is_missed(recipe, place):
    assert train_here(recipe("lacking", KAHAN | {"steps": 3})) == 3
    shutil.copytree(place / "lacking", place / "stochastic")
    with pytest.raises(CheckpointError, match=r"training\.rounding was kahan and is stochastic"):
        train_here(recipe("stochastic", NARROW), "3")


def test_one_process_holds_the_bytes_that_a_plan_counts_and_exports_what_diffusers_reads(recipe, place):
    counted, held, own = [], [], recipe("counted", NARROW | {"steps": 2, "ema_decay": 0.9})

    def noted(stepper, step):
        update(stepper, step)
        session = stepper._session
        workload = workload_of(session.recipe, session.model)
        found = Ledger(graph=session.model, workload=workload).held(session.worker.parameters)
        counted.append((found.parameters, found.gradients, found.ema, found.optimizer))
        parameters = list(session.worker.parameters.values())
        states = [state for part in session.optimizer.parts for state in part.state.values()]
        moments = sum(value.nbytes for state in states for key, value in state.items() if key != "step")
        held.append(
            (
                sum(p.nbytes for p in parameters),
                sum(p.grad.nbytes for p in parameters),
                sum(value.nbytes for value in session.ema.tensors().values()),
                moments,
            )
        )

    update = Stepper._update
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "_update", noted)
        assert train_here(own) == 2
    assert counted[-1] == held[-1]
    assert held[-1][0] < 0.6 * held[-1][1]  # float32 sums of two micro-batches, and weights of half the bytes
    exported = DiTTransformer2DModel.from_pretrained(place / "counted" / "export" / "transformer")
    trained = load_file(place / "counted" / "export" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert trained.keys() == exported.state_dict().keys()
    assert all(tensor.isfinite().all() for tensor in exported.state_dict().values())


def test_one_micro_batch_has_gradients_of_two_bytes_and_nearly_the_losses_of_float32(recipe, place):
    one = {"pipeline": {"microbatches": 1, "encode_chunk": 2}}
    own = recipe("single", NARROW | {"steps": 3}, **one)
    gradients = []

    def noted(stepper, step):
        gradients.extend(p.grad.dtype for p in stepper._session.worker.parameters.values() if p.dtype is torch.bfloat16)
        update(stepper, step)

    update = Stepper._update
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "_update", noted)
        assert train_here(own, saves=False) == 3
    assert set(gradients) == {torch.bfloat16}
    assert train_here(recipe("wide", NARROW | {"weights": "float32", "steps": 3}, **one), saves=False) == 3
    wide = losses_of(place / "wide")
    assert losses_of(place / "single") == pytest.approx(wide, rel=0.01)
    assert losses_of(place / "single") != wide


def averages(folder):
    saved = tensors_of(latest(folder))
    return {name: tensor for name, tensor in saved.items() if name.startswith("ema.")}


@pytest.mark.parametrize("kept", [pytest.param("host", marks=pytest.mark.slow), pytest.param("bfloat16")])
def test_an_average_kept_otherwise_is_saved_counted_and_resumed(recipe, place, kept):
    own = {"precision": "float32", "clip_norm": "none", "ema_decay": 0.9}
    assert train_here(recipe(f"of {kept}", own | {"ema_states": kept}), exports=False) == 6
    continued(place, f"of {kept}", f"of {kept} on")
    assert train_here(recipe(f"of {kept} on", own | {"ema_states": kept}), "3", exports=False) == 6
    assert differing(place / f"of {kept} on", place / f"of {kept}") == []
    found = averages(place / f"of {kept}")
    made = recipe(f"of {kept}", own | {"ema_states": kept})
    (state,) = [state for state in workload_of(made).states if state.item is Item.EMA]
    assert {tensor.element_size() for tensor in found.values()} == {state.width}
    assert state.is_hosted == (kept == "host")
    assert train_here(recipe(f"beside {kept}", own), exports=False) == 6
    plain = averages(place / f"beside {kept}")
    if kept == "host":
        assert all(torch.equal(found[name], plain[name]) for name in plain)
    else:
        assert all(torch.allclose(found[name].float(), plain[name], rtol=2**-5, atol=1e-3) for name in plain)
        with pytest.raises(CheckpointError, match="the checkpoint's average has other numbers"):
            train_here(recipe(f"of {kept} on", own), "6", exports=False)


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"training": {"ema_states": "host", "ema_decay": "none"}}, "training.ema_states: there is no average"),
        ({"training": NARROW | {"precision": "float32"}}, "training.weights: layers would compute in float32"),
        ({"training": {"rounding": "kahan"}}, "training.rounding: weights in float32 are not rounded"),
        ({"lora": {"rank": 2}}, "training.weights: adapters take few bytes"),
        ({"training": NARROW | {"post_validation": True}}, "training.post_validation: it keeps copies"),
        ({"pipeline": {"versions": "stashed"}}, "pipeline.versions: versions of weights are kept in float32"),
        ({"training": {"gradients": "bfloat16"}}, "training.gradients: weights in float32 have gradients in float32"),
        ({"pipeline": {"sharded": True, "data_parallel": 2}}, 'set pipeline.sharded to "optimizer" or false'),
        ({"optimizer": {"name": "pytorch_optimizer.Lion"}}, "training.weights: pytorch_optimizer.Lion steps all"),
    ],
)
def test_it_is_refused_where_it_cannot_be(recipe, sections, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        recipe("refused", **sections)


def test_devices_without_bfloat16_are_refused_before_the_run(recipe):
    with pytest.raises(RecipeError, match=r"training\.weights: layers would compute in float32"):
        decided(recipe("undecided", NARROW | {"precision": "auto"}), has_bfloat16=False)
