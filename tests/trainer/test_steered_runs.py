"""A ControlNet draws from conditioning pictures: in runs from those of validation, in `sample` also from others."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.drawn_families import GUIDED
from kit.steered import CONDITIONS, asked_of_steered, save_controlled, save_steered
from kit.tiny_runs import RESOLUTION
from PIL import Image

from diffusionpipe.errors import ConfigError, DataError, RecipeError
from diffusionpipe.ir.size import Clip
from diffusionpipe.trainer.inference.conditions import SampleRequest, steering_pictures
from diffusionpipe.trainer.inference.folder_drawing import open_source
from diffusionpipe.workflows.drawing.conditions import steered


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_steered(tmp_path_factory.mktemp("pictures"), RESOLUTION)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_controlled(tmp_path_factory.mktemp("model"))


def test_pictures_of_validation_steer_prompts_in_the_order_of_their_names(data):
    found = steering_pictures(data, 5)
    assert [path.relative_to(data).as_posix() for path in found] == [CONDITIONS[i % len(CONDITIONS)] for i in range(5)]


@pytest.mark.parametrize(
    ("given", "count", "expected"),
    [((), 2, (0, 0, 1, 1)), ((2,), 1, (2, 2)), ((2, 1), 2, (2, 2, 1, 1))],
    ids=["validation", "one for all", "one for each"],
)
def test_sample_steers_each_prompt(model, data, tmp_path, given, count, expected):
    (tmp_path / "recipe.toml").write_text(f'[data]\nvalidation = "{data}"')
    paths = [data / name for name in CONDITIONS]
    wish = SampleRequest(prompts=tuple(prompt for prompt in ("a", "b") for _ in range(count)))
    found = steered(wish, tmp_path, model, [paths[i] for i in given], count)
    assert found.conditions == tuple(paths[i] for i in expected)


@pytest.mark.parametrize("size", [(16, 32), (32, 16)], ids=["upright", "wide"])
def test_pictures_that_steer_are_as_wide_and_high_as_the_ones_to_draw(model, data, size):
    asked = asked_of_steered(model, data, GUIDED)
    source = replace(asked.sources[0], clip=Clip(width=size[0], height=size[1], frames=1))
    found = open_source(source, asked.wish, asked.settings[0]).raw["condition"]
    expected = [fitted(data / CONDITIONS[i], size) for i in (0, 1)]
    torch.testing.assert_close(found, torch.stack(expected * 2))


def fitted(path, size):
    """The square picture resized until it covers a size, and cut at its centre, by Pillow alone."""
    (width, height), side = size, max(size)
    left, upper = (side - width) // 2, (side - height) // 2
    with Image.open(path) as picture:
        cut = picture.resize((side, side), Image.Resampling.BICUBIC).crop((left, upper, left + width, upper + height))
    return torch.from_numpy(np.asarray(cut, dtype=np.float32) / 255).permute(2, 0, 1)


def test_what_steers_nothing_or_is_missing_is_refused(model, data, tmp_path):
    wish = SampleRequest(prompts=("a", "b"))
    with pytest.raises(ConfigError, match="there are 0 for 2: give --condition once for each prompt, or once for all"):
        steered(wish, tmp_path, model, (), 1)
    asked = asked_of_steered(model, data, GUIDED)
    with pytest.raises(RecipeError, match=r"there are 0 for 2: name one as .conditioning_image. for each picture of"):
        open_source(asked.sources[0], wish, asked.settings[0])
    Image.new("RGB", (RESOLUTION, RESOLUTION)).save(tmp_path / "plain.png")
    (tmp_path / "plain.txt").write_text("a b")
    with pytest.raises(DataError, match=r'1 picture has no "conditioning_image"'):
        steering_pictures(tmp_path, 1)


def test_a_condition_for_a_model_that_is_not_steered_is_refused(tmp_path, data):
    from kit.tiny_runs import save_stable_diffusion

    plain = save_stable_diffusion(tmp_path / "plain")
    with pytest.raises(ConfigError, match="holds no ControlNet; leave it out"):
        steered(SampleRequest(prompts=("a",)), tmp_path, plain, (data / CONDITIONS[0],), 1)
    asked = asked_of_steered(plain, data, GUIDED)
    with pytest.raises(RecipeError, match="steer a ControlNet, and the model is none"):
        open_source(asked.sources[0], asked.wish, asked.settings[0])
