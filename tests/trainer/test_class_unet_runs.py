"""A class-conditional pair in pixel space: trained alone and together, drawn, opened by diffusers."""

import diffusers
import numpy as np
import pytest
import torch
from kit.tiny_class_unet import save_class_pair
from kit.tiny_runs import losses_of, save_pictures, tensors_of, train, train_here

from diffusionpipe.trainer.checkpoints.checkpoint_folder import latest
from diffusionpipe.trainer.recipe.recipe_file import recipe_from_table

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classes")
    save_class_pair(folder)
    save_pictures(folder / "data", count=8, resolution=16)
    return folder


def recipe_of(place, name, models=("base", "super"), **sections):
    members = {"base": {"path": str(place / "base"), "resolution": 8}, "super": {"path": str(place / "super")}}
    table = {
        "models": {model: members[model] for model in models},
        "data": {"train": str(place / "data"), "resolution": 16, "workers": 0},
        "training": {"steps": 2, "batch": 4, "ema_decay": 0.5, "precision": "float64"},
        "optimizer": {"learning_rate": 0.01},
        "pipeline": {"microbatches": 2, "encode_chunk": 2},
        "sampling": {"every": 2, "labels": [0, 9], "steps": 2, "guidance": 2.0},
        "run": {"folder": str(place / name)},
    }
    table = {**table, **{key: table.get(key, {}) | value for key, value in sections.items()}}
    return recipe_from_table(table, source="classes.toml")


@pytest.fixture(scope="module")
def together(place):
    """The run of both models in one process."""
    assert train_here(recipe_of(place, "together")) == 2
    return place / "together"


def test_diffusers_opens_the_exports_and_they_hold_the_averages(together):
    for name, channels in (("base", 3), ("super", 6)):
        opened = diffusers.DiffusionPipeline.from_pretrained(together / "export" / name, use_safetensors=True)
        assert type(opened).__name__ == "DDPMPipeline"
        assert opened.unet.config.in_channels == channels
        averages = {key: value for key, value in tensors_of(latest(together)).items() if f"ema.{name}/" in key}
        stored = dict(opened.unet.named_parameters())
        assert len(averages) == len(stored)
        for key, average in averages.items():
            torch.testing.assert_close(stored[key.partition("/")[2].partition(".")[2]], average.float())
        assert "cannot sample it" in (together / "export" / name / "README.md").read_text(encoding="utf-8")


def test_pictures_of_the_run_are_drawn_from_classes(together):
    assert np.load(together / "samples" / "step-00000002.npy").shape == (2, 16, 48, 3)


def test_the_base_model_trains_and_draws_alone(place):
    recipe = recipe_of(place, "alone", ["base"], data={"resolution": 8})
    assert train_here(recipe) == 2
    first, second = losses_of(place / "alone", "loss").values()
    assert first != second
    assert np.load(place / "alone" / "samples" / "step-00000002.npy").shape == (2, 8, 8, 3)


@pytest.mark.parametrize("pipeline", [{"schedule": "opposed"}, {"schedule": "1f1b"}], ids=["opposed", "in turn"])
def test_two_ranks_learn_what_one_does(together, place, crew, pipeline):
    name = pipeline["schedule"]
    assert crew.run(train, recipe_of(place, name, pipeline=pipeline, sampling={"every": "none"})) == [2, 2]
    for key in ("loss/base", "loss/super", "gradient_norm/base", "gradient_norm/super"):
        found, expected = (list(losses_of(folder, key).values()) for folder in (place / name, together))
        assert found == pytest.approx(expected, rel=1e-12)
