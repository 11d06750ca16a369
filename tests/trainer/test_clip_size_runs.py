"""Runs over clips of several lengths and pictures."""

import json

import numpy as np
import pytest
from kit.tiny_clips import save_clips, write_clip
from kit.tiny_described import save_described
from kit.tiny_runs import losses_of, recipe_of, train, train_here
from PIL import Image

from diffusionpipe.errors import ConfigError
from diffusionpipe.workflows.data_report import report_on_recipe

pytestmark = pytest.mark.usefixtures("one_thread", "one_trace")
SIZES = {"resolution": ["16x16x33", "16x16x17", "16x16"], "same_size": 1, "caption_dropout": 0.0}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Clips of 36, 20 and 9 frames, and pictures."""
    folder = save_clips(tmp_path_factory.mktemp("clips") / "mixed", 2, frames=36)
    random = np.random.default_rng(1)
    lines = []
    for name, frames in (("a.mp4", 20), ("b.mp4", 20), ("c.mp4", 9)):
        noise = random.integers(0, 256, (frames, 8, 8, 3), dtype=np.uint8)
        write_clip(folder / name, list(noise.repeat(4, axis=1).repeat(4, axis=2)))
        lines.append(json.dumps({"file_name": name, "text": name[0]}))
    for name in ("d.png", "e.png", "f.png"):
        Image.fromarray(random.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(folder / name)
        lines.append(json.dumps({"file_name": name, "text": name[0]}))
    with (folder / "metadata.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_described("WanPipeline", tmp_path_factory.mktemp("model") / "wan")


def recipe(model, data, folder, /, **sections):
    training = {"steps": 2, "batch": 8, "precision": "float64", **sections.pop("training", {})}
    return recipe_of(model, data, folder, data={**SIZES, **sections.pop("data", {})}, training=training, **sections)


def losses(folder):
    found = losses_of(folder)
    return [found[step] for step in sorted(found)]


def test_each_sample_has_a_size_of_as_many_frames_as_it_can_fill(model, data, tmp_path):
    report = report_on_recipe(recipe(model, data, tmp_path / "run"))
    frames = {sample.name: report.sizes[place].frames for place, sample in enumerate(report.train.dataset.samples)}
    assert frames == {
        "000.mp4": 33,
        "001.mp4": 33,
        "a.mp4": 17,
        "b.mp4": 17,
        "c.mp4": 1,
        "d.png": 1,
        "e.png": 1,
        "f.png": 1,
    }


@pytest.mark.slow
def test_clips_and_pictures_train_on_two_stages_and_by_tokens_as_on_one_rank(model, data, tmp_path, crew):
    one = recipe(model, data, tmp_path / "one", pipeline={"microbatches": 8})
    assert train_here(one) == 2
    drawn = {"every": 2, "steps": 1, "prompts": ["a", "b"], "sizes": ["16x16x17", "16x16"]}
    crew.run(train, recipe(model, data, tmp_path / "two", pipeline={"microbatches": 8}, sampling=drawn))
    shown = [Image.open(path) for path in sorted((tmp_path / "two").glob("samples/*/*.png"))]
    assert [getattr(picture, "n_frames", 1) for picture in shown] == [17, 1]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)
    cut = {"same_size": "auto", "batching": "tokens"}
    train_here(recipe(model, data, tmp_path / "cut", data=cut, pipeline={"microbatches": 8}))
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"resolution": ["16x16x16", "16x16"]}, r"16 frames do not divide so: use 15 or 17|the VAE encodes one frame"),
        ({"resolution": ["16x16x33", "16x16x17"]}, r"pictures that cannot be used|it has 9 frames"),
        ({"frames": 17}, "frames: it does not go with several sizes; give"),
        ({"masks": "boxes"}, "masks: holes of clips of several sizes are not supported"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(model, data, tmp_path, keys, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        train_here(recipe(model, data, tmp_path / "run", data=keys))
