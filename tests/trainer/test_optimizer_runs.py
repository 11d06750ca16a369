"""Whole runs with optimizers of other packages: two stages do what one process does, and so do their continuations."""

import shutil

import pytest
import torch
from tiny_runs import losses_of, recipe_of, save_dit, save_pictures, tensors_of, train, train_here

from diffusionpipe.errors import ConfigError
from diffusionpipe.trainer.checkpoints.checkpoint import latest
from diffusionpipe.trainer.checkpoints.checkpoint_folder import FOLDER

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"min_8bit_size": 16}
CLASSES = {
    "AdamW8bit": {"name": "bitsandbytes.optim.AdamW8bit", "arguments": SMALL},
    "Lion8bit": {"name": "bitsandbytes.optim.Lion8bit", "arguments": SMALL, "learning_rate": 1e-3},
    "PagedAdamW8bit": {"name": "bitsandbytes.optim.PagedAdamW8bit", "arguments": SMALL},
    "Lion": {"name": "pytorch_optimizer.Lion", "learning_rate": 1e-3},
    "CAME": {"name": "pytorch_optimizer.CAME"},
    "Adan": {"name": "pytorch_optimizer.Adan"},
    "SOAP": {"name": "pytorch_optimizer.SOAP"},
    "AdaFactor": {"name": "pytorch_optimizer.AdaFactor"},
    "Adafactor": {"name": "Adafactor"},
    "Muon": {"name": "Muon", "rest": {"name": "AdamW", "learning_rate": 1e-3}},
}
QUICK = ("Muon",)
ALL = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in CLASSES]
PLAIN = {"clip_norm": "none", "ema_decay": "none"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimizers")
    save_dit(folder / "dit")
    save_pictures(folder / "data")
    return folder


@pytest.fixture(scope="module")
def recipe(place):
    """A recipe of 6 steps that saves after step 3."""

    def make(name, optimizer, **sections):
        training = PLAIN | sections.pop("training", {})
        common = {"checkpoint": {"every": 3, "keep": 9}, "training": training, "optimizer": optimizer}
        return recipe_of(place / "dit", place / "data", place / name, **common | sections)

    return make


@pytest.fixture(scope="module")
def alone(recipe, place):
    """The folder of the finished run in one process, for each class."""
    done = {}

    def folder(kind):
        if kind not in done:
            assert train_here(recipe(f"{kind}-alone", CLASSES[kind])) == 6
            done[kind] = place / f"{kind}-alone"
        return done[kind]

    return folder


def assert_same_bits(found, expected):
    one, other = tensors_of(latest(found)), tensors_of(latest(expected))
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []


@pytest.mark.parametrize("kind", ALL)
def test_two_stages_end_with_the_bits_of_one_process(crew, recipe, alone, place, kind):
    own = recipe(f"{kind}-two", CLASSES[kind])
    assert crew.run(train, own) == [6, 6]
    assert_same_bits(place / f"{kind}-two", alone(kind))
    losses = losses_of(alone(kind))
    assert len(set(losses.values())) == 6
    first, last = (tensors_of(path) for path in sorted((alone(kind) / FOLDER).iterdir()))
    changed = [name for name in first if name.startswith("model.") and not torch.equal(first[name], last[name])]
    assert len(changed) > len([name for name in first if name.startswith("model.")]) / 2


@pytest.mark.parametrize("kind", ALL)
def test_a_run_over_two_stages_goes_on_in_one_process_and_back(crew, recipe, alone, place, kind):
    one = place / f"{kind}-from-alone"
    shutil.copytree(alone(kind), one)
    assert crew.run(train, recipe(one.name, CLASSES[kind]), "3") == [6, 6]
    assert_same_bits(one, alone(kind))
    shutil.rmtree(one / FOLDER / "step-00000006")
    assert train_here(recipe(one.name, CLASSES[kind]), "3") == 6
    assert_same_bits(one, alone(kind))
