"""PNG files that say how they were drawn."""

import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from diffusionpipe.errors import ConfigError
from diffusionpipe.trainer.inference.denoise import SamplingSettings
from diffusionpipe.trainer.inference.sample_file import (
    SampleOrigin,
    _origin,
    _texts,
    file_name,
    read_origin,
    write_sample,
)
from diffusionpipe.trainer.recipe import RecipePrecision

SETTINGS = SamplingSettings(steps=3, guidance=2.5, seed=4, scheduler={"_class_name": "DDIMScheduler", "eta": [0.1]})
ORIGIN = SampleOrigin(
    settings=SETTINGS, prompt="a", resolution=8, precision=RecipePrecision.BFLOAT16, model="m", weights="average"
)


@settings(max_examples=20)
@given(st.text(), st.text(), st.integers(), st.floats(allow_nan=False, allow_infinity=False))
def test_an_origin_is_read_as_it_was_written(prompt, negative, seed, guidance):
    drawn = replace(SETTINGS, seed=seed, guidance=guidance)
    origin = replace(ORIGIN, settings=drawn, prompt=prompt, negative_prompt=negative, training_step=7, rows=4)
    assert _origin(_texts(origin)) == origin


@pytest.mark.parametrize("origin", [ORIGIN, replace(ORIGIN, prompt=None, label=3), replace(ORIGIN, prompt="蓝山雀 3")])
def test_a_file_keeps_pixels_and_origin(tmp_path, origin):
    picture = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    path = tmp_path / "new" / file_name(origin)
    write_sample(picture, origin, path)
    with Image.open(path) as image:
        assert np.array_equal(np.asarray(image), picture)
    assert read_origin(path) == origin


@pytest.mark.parametrize(
    ("caption", "name"),
    [
        ("A blue tit, on a branch!", "000-a-blue-tit-on-a-branch.png"),
        ("../../etc/passwd", "000-etc-passwd.png"),
        ("", "000.png"),
        ("x" * 200, f"000-{'x' * 48}.png"),
    ],
)
def test_names_are_the_beginning_of_captions_in_plain_letters(caption, name):
    assert file_name(replace(ORIGIN, prompt=caption)) == name


def test_a_picture_without_origin_and_a_file_that_is_none_are_refused(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "plain.png")
    with pytest.raises(ConfigError, match="does not say how it was drawn"):
        read_origin(tmp_path / "plain.png")
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(ConfigError, match="cannot be read as a picture"):
        read_origin(tmp_path / "text.png")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("steps", "0"),
        ("steps", "1000000000"),
        ("seed", "9" * 30),
        ("seed", "9" * 5000),
        ("guidance", "NaN"),
        ("guidance", "Infinity"),
        ("guidance", '"x"'),
        ("embedded_guidance", "-1"),
        ("count", "1000000000"),
        ("index", "7"),
        ("rows", "0"),
        ("resolution", "-8"),
        ("resolution", "true"),
        ("label", "3"),
        ("scheduler", "[]"),
        ("scheduler", "[" * 3000),
    ],
)
def test_a_picture_that_says_something_impossible_of_itself_is_refused_by_name(tmp_path, key, text):
    chunks = PngInfo()
    for name, value in {**_texts(ORIGIN), key: text}.items():
        chunks.add_itxt(name, value)
    Image.new("RGB", (8, 8)).save(tmp_path / "picture.png", pnginfo=chunks)
    with pytest.raises(ConfigError, match=r"picture\.png does not say how it was drawn"):
        read_origin(tmp_path / "picture.png")


def test_a_picture_that_is_a_fifo_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "picture.png")
    with pytest.raises(ConfigError, match=r"picture\.png cannot be read as a picture: it is not a regular file"):
        read_origin(tmp_path / "picture.png")
