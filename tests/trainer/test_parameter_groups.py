"""Components of one model are trained with values of their own, exactly as torch's parameter groups are."""

import shutil
import tomllib

import pytest
import torch
from kit.tiny_runs import losses_of, save_pictures, save_stable_diffusion, tensors_of, train_here
from torch import nn

from diffusionpipe.errors import ConfigError, RecipeError
from diffusionpipe.holding import Item
from diffusionpipe.trainer.checkpoints.checkpoint_folder import latest
from diffusionpipe.trainer.model.workload import workload_of
from diffusionpipe.trainer.recipe.recipe_file import recipe_from_table, recipe_to_toml
from diffusionpipe.trainer.step.loop import Stepper

pytestmark = pytest.mark.usefixtures("one_thread")

OWN = {
    "learning_rate": 0.002,
    "learning_rate_schedule": "linear",
    "warmup_steps": 2,
    "learning_rate_final": 0.5,
    "optimizer_arguments": {"weight_decay": 0.3, "betas": [0.8, 0.9]},
    "ema_decay": 0.15,  # so small that the second step already has it, where the average still warms up
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("groups")
    save_stable_diffusion(folder / "model")
    save_pictures(folder / "data", resolution=8)
    return folder


def recipe_of(place, name, own=OWN, component="text_encoder", train=("unet", "text_encoder"), **sections):
    table = {
        "model": {"path": str(place / "model"), "train": list(train), "components": {component: own}},
        "data": {"train": str(place / "data"), "resolution": 8, "workers": 0},
        "training": {"steps": 5, "batch": 4, "ema_decay": 0.9, "precision": "float64"},
        "optimizer": {"learning_rate": 0.01, "arguments": {"weight_decay": 0.1}},
        "pipeline": {"microbatches": 2},
        "run": {"folder": str(place / name)},
    }
    return recipe_from_table({**table, **sections}, source="groups.toml")


@pytest.fixture(scope="module")
def run(place):
    """The weights before the first step, and the gradients of each, by name."""
    before, gradients, update = {}, [], Stepper._update

    def noted(self, step):
        named = self._session.worker.parameters
        before.update({name: p.detach().clone() for name, p in named.items()} if step == 0 else {})
        gradients.append({name: p.grad.clone() for name, p in named.items()})
        update(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "_update", noted)
        assert train_here(recipe_of(place, "run", checkpoint={"every": 3})) == 5
    return before, gradients


def test_text_encoder_and_unet_learn_what_torchs_parameter_groups_learn(place, run):
    before, gradients = run
    parameters = {name: nn.Parameter(value.clone()) for name, value in before.items()}
    averages = {name: value.clone() for name, value in before.items()}
    text = [p for name, p in parameters.items() if name.startswith("text_encoder.")]
    unet = [p for name, p in parameters.items() if name.startswith("unet.")]
    assert text
    assert len(text) + len(unet) == len(parameters)
    groups = [{"params": text, "weight_decay": 0.3, "betas": (0.8, 0.9)}, {"params": unet}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.1, fused=True)
    for step, own in enumerate(gradients):
        for name, p in parameters.items():
            p.grad = own[name]
        linear = 0.002 * (step + 1) / 2 if step < 2 else 0.002 * (1 - 0.5 * (step - 2) / 3)
        for group, rate in zip(optimizer.param_groups, (linear, 0.01), strict=True):
            group["lr"] = rate
        optimizer.step()
        for name, p in parameters.items():
            decay = min(0.15 if name.startswith("text_encoder.") else 0.9, (1 + step) / (10 + step))
            averages[name].lerp_(p.detach(), 1 - decay)
    found = tensors_of(latest(place / "run"))
    for name, p in parameters.items():
        assert torch.equal(found[f"model.{name}"], p.detach())
        assert torch.equal(found[f"ema.{name}"], averages[name])


def test_metrics_have_the_rate_of_the_component(place, run):
    expected = [0.001, 0.002, 0.002, 0.002 * (1 - 0.5 / 3), 0.002 * (1 - 1 / 3)]
    assert list(losses_of(place / "run", "learning_rate/text_encoder").values()) == pytest.approx(expected)
    assert set(losses_of(place / "run", "learning_rate").values()) == {0.01}


def test_a_resumed_run_ends_with_the_same_bits(place, run):
    copy = recipe_of(place, "again", checkpoint={"every": 3})
    shutil.copytree(place / "run", place / "again")
    assert train_here(copy, "3") == 5
    found, expected = tensors_of(latest(place / "again")), tensors_of(latest(place / "run"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_recipe_with_components_is_written_and_read_back(place):
    recipe = recipe_of(place, "written")
    assert recipe_from_table(tomllib.loads(recipe_to_toml(recipe)), source="other.toml") == recipe


def test_memory_counts_the_state_of_the_group_that_keeps_most(place):
    own = {"optimizer_arguments": {"momentum": 0.9}}
    assert workload_of(recipe_of(place, "sgd", own, optimizer={"name": "SGD"})).width(Item.OPTIMIZER) == 8
    assert workload_of(recipe_of(place, "sgd", {}, optimizer={"name": "SGD"})).width(Item.OPTIMIZER) == 0


REFUSED = {
    "text_encoder.optimizer_arguments: optimizer AdamW: weight_deca is unknown; did you mean weight_decay?": {
        "optimizer_arguments": {"weight_deca": 0.1}
    },
    "text_encoder.optimizer_arguments.fused: it holds for all parameters; set it in [optimizer.arguments]": {
        "optimizer_arguments": {"fused": True}
    },
    "text_encoder.optimizer_arguments: optimizer AdamW refuses its arguments": {"optimizer_arguments": {"eps": -1.0}},
    "text_encoder.warmup_steps: 5 is not less than the 5 steps of the run; use a shorter warm-up": {"warmup_steps": 5},
    "text_encoder.learning_rate_final: it has no effect on a constant schedule": {"learning_rate_final": 0.1},
    "text_encoder.lerning_rate: unknown key; did you mean model.components.text_encoder.learning_rate?": {
        "lerning_rate": 0.1
    },
}


@pytest.mark.parametrize(("says", "own"), REFUSED.items(), ids=[next(iter(own)) for own in REFUSED.values()])
def test_a_value_that_cannot_be_is_named_with_its_key(place, says, own):
    with pytest.raises(RecipeError) as caught:
        recipe_of(place, "refused", own)
    assert f"model.components.{says}" in str(caught.value)


def test_a_component_that_is_not_trained_has_no_values_of_its_own(place):
    message = (
        r"model.components.text_encoder: text_encoder is not trained \(trained: unet\); add it to model.train, or "
        "remove this section"
    )
    with pytest.raises(ConfigError, match=message):
        train_here(recipe_of(place, "untrained", train=["unet"]))


@pytest.mark.slow
def test_a_component_has_its_rate_for_both_classes_of_a_mixed_optimizer(place):
    mixed = {"name": "Muon", "learning_rate": 0.01, "rest": {"name": "AdamW"}}
    sections = {
        "optimizer": mixed,
        "training": {"steps": 1, "batch": 4, "ema_decay": "none", "precision": "float64"},
    }
    found = []
    for name, own in (("plain", {}), ("own", {"learning_rate": 0.002})):
        assert train_here(recipe_of(place, f"mixed-{name}", own=own, **sections)) == 1
        tensors = tensors_of(latest(place / f"mixed-{name}"))
        found.append({key: value for key, value in tensors.items() if key.startswith("model.")})
    changed = {key for key, value in found[0].items() if not torch.equal(value, found[1][key])}
    assert changed == {key for key in found[0] if key.startswith("model.text_encoder.")}
