"""The size of what `sample` draws: as asked for, else as the run was trained."""

import pytest
import torch
from kit.tiny_runs import recipe_of

from diffusionpipe.errors import ConfigError
from diffusionpipe.models.base.family import Clip
from diffusionpipe.trainer.model.members import sample_size
from diffusionpipe.trainer.recipe import recipe_to_toml
from diffusionpipe.workflows.drawing.memory import check_memory
from diffusionpipe.workflows.drawing.run_recipe import SampleSize, size_of

CLIPS = "[data]\nresolution = 832\nheight = 480\nframes = 81\nframe_rate = 16\n"


@pytest.fixture
def run(tmp_path):
    (tmp_path / "recipe.toml").write_text(CLIPS)
    return tmp_path


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((None, None, None), SampleSize(resolution=832, height=480, frames=81, frame_rate=16)),
        ((None, None, 17), SampleSize(resolution=832, height=480, frames=17, frame_rate=16)),
        ((None, None, 1), SampleSize(resolution=832, height=480, frame_rate=16)),
        ((None, 320, None), SampleSize(resolution=832, height=320, frames=81, frame_rate=16)),
        ((256, None, None), SampleSize(resolution=256, frames=81, frame_rate=16)),
    ],
)
def test_what_is_asked_for_comes_first_and_then_the_run(run, asked, expected):
    assert size_of(run, run / "export", *asked) == expected


def test_no_size_is_refused_where_nobody_knows_how_much_memory_is_free(run, monkeypatch):
    monkeypatch.setattr("diffusionpipe.runtime.machine.free_memory.free_on", lambda device: None)
    check_memory(run, 10**9, Clip(width=10**6, height=10**6), torch.device("cpu"))


def test_only_what_is_no_square_picture_is_a_clip():
    assert SampleSize(resolution=64).clip is None
    assert SampleSize(resolution=64, height=32).clip == Clip(width=64, height=32)
    assert SampleSize(resolution=64, frames=5).clip == Clip(width=64, height=64, frames=5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[data]\n", "data.resolution must be a whole number of at least 1; correct it, or give --resolution"),
        (
            CLIPS.replace("81", "'many'"),
            r"data\.frames must be a whole number of at least 1; .* or give --frames",
        ),
        (CLIPS.replace("16", "-1"), "data.frame_rate must be a number above 0"),
    ],
)
def test_a_recipe_that_names_no_size_is_refused(tmp_path, text, message):
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        size_of(tmp_path, tmp_path / "export", None, None, None)


@pytest.mark.parametrize(
    "resolution", [[512, "640x384"], ["832x480x33", "832x480"], ["16x32"], ["64x64x5", 96], [64, 96], 64]
)
def test_of_several_sizes_the_one_that_the_run_draws_is_drawn(tmp_path, resolution):
    recipe = recipe_of(tmp_path / "model", tmp_path / "data", tmp_path / "run", data={"resolution": resolution})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text(recipe_to_toml(recipe))
    found = size_of(tmp_path / "run", tmp_path / "model", None, None, None)
    assert found.sample == sample_size(recipe)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('train = "pictures"\nsizes = ["64 by 32"]', "'64 by 32' is not a width and a height"),
        ('sizes = ["64x32"]', "train"),
    ],
)
def test_sizes_that_are_none_are_refused(tmp_path, text, why):
    (tmp_path / "recipe.toml").write_text(f"[data]\nresolution = 64\n{text}\n")
    with pytest.raises(ConfigError, match=rf"recipe\.toml: data\.sizes cannot be read: .*{why}.*; correct or remove"):
        size_of(tmp_path, tmp_path, None, None, None)


def test_none_in_a_recipe_is_no_size(tmp_path):
    (tmp_path / "recipe.toml").write_text('[data]\nresolution = 64\nheight = "none"\nframes = "none"\n')
    assert size_of(tmp_path, tmp_path, None, None, None) == SampleSize(resolution=64)
