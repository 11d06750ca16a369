"""The frames of a second that a run draws: as they are taken, else those of its clips, kept for later drawings."""

from types import SimpleNamespace

import pytest
from kit.cuts import traced_once
from kit.tiny_clips import save_clips
from kit.tiny_described import CLIPS, save_described
from kit.tiny_runs import recipe_of, train_here

from diffusionpipe.errors import ConfigError
from diffusionpipe.trainer.data.batches import batch
from diffusionpipe.trainer.inference import drawing
from diffusionpipe.trainer.inference.clip_rate import FILE, kept_rate, write_rate
from diffusionpipe.trainer.inference.sample_file import read_origin
from diffusionpipe.workflows.drawing.request import DrawingOptions, _size
from diffusionpipe.workflows.drawing.run_recipe import size_of

DRAWN = {"every": 2, "prompts": ["a b"], "steps": 2, "guidance": 1.0}


def test_a_kept_rate_is_read_again(tmp_path):
    write_rate(tmp_path, 24000 / 1001)
    assert kept_rate(tmp_path) == 24000 / 1001


def test_a_run_of_pictures_keeps_none(tmp_path):
    write_rate(tmp_path, None)
    assert kept_rate(tmp_path) is None
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"frame_rate": 0}', '{"frame_rate": "x"}', '{"frame_rate": true}'])
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"clips\.json.*remove"):
        kept_rate(tmp_path)


def test_sample_draws_at_the_rate_that_the_runs_clips_had(tmp_path):
    (tmp_path / "recipe.toml").write_text("[data]\nresolution = 96\nframes = 17\n")
    assert size_of(tmp_path, tmp_path, None, None, None).frame_rate is None
    write_rate(tmp_path, 30.0)
    assert size_of(tmp_path, tmp_path, None, None, None).frame_rate == 30
    (tmp_path / "recipe.toml").write_text("[data]\nresolution = 96\nframes = 17\nframe_rate = 8\n")
    assert size_of(tmp_path, tmp_path, None, None, None).frame_rate == 8


def test_sample_takes_the_rate_that_is_asked_for_then_the_runs_then_that_of_diffusers_pipeline(tmp_path):
    folder = save_described("LTXPipeline", tmp_path / "ltx")
    model = SimpleNamespace(folder=folder, resolution=None)

    def rate(run, frames=17, frame_rate=None):
        asked = DrawingOptions(resolution=64, frames=frames, frame_rate=frame_rate)
        return _size(run, model, asked).frame_rate

    assert rate(folder) == 25
    assert rate(folder, frame_rate=12.0) == 12
    (tmp_path / "recipe.toml").write_text("[data]\nresolution = 64\nframes = 17\nframe_rate = 8\n")
    assert rate(tmp_path) == 8
    assert rate(tmp_path, frame_rate=12.0) == 12
    assert rate(tmp_path, frames=1) is None
    with pytest.raises(ConfigError, match=r"--frame-rate: only clips have frames; give --frames"):
        rate(tmp_path, frames=1, frame_rate=12.0)


@pytest.mark.slow
@pytest.mark.parametrize("taken", [None, 4.0])
def test_training_and_drawing_are_told_the_same_rate(tmp_path, taken, monkeypatch):
    """The tiny clips have 8 frames a second."""
    model, size = save_described("LTXPipeline", tmp_path / "ltx"), CLIPS["LTXPipeline"]
    save_clips(tmp_path / "clips", 4, frames=40, width=size.width, height=size.height)
    data = {"resolution": size.width, "height": size.height, "frames": size.frames}
    data |= {} if taken is None else {"frame_rate": taken}
    recipe = recipe_of(model, tmp_path / "clips", tmp_path / "run", data=data, training={"steps": 2}, sampling=DRAWN)
    told, trained = [], []
    conditions, rates = drawing.raw_conditions, batch._frame_rates

    def spied(*arguments):
        found = conditions(*arguments)
        told.extend(found["frame_rate"].tolist())
        return found

    def spied_rates(*arguments):
        found = rates(*arguments)
        trained.extend(found.tolist())
        return found

    monkeypatch.setattr(drawing, "raw_conditions", spied)
    monkeypatch.setattr(batch, "_frame_rates", spied_rates)
    with traced_once():
        train_here(recipe)
    right = 8.0 if taken is None else taken
    assert {round(rate, 3) for rate in trained} == {round(rate, 3) for rate in told} == {right}
    (picture,) = (tmp_path / "run" / "samples" / "step-00000002").iterdir()
    assert read_origin(picture).frame_rate == pytest.approx(right)
    assert kept_rate(tmp_path / "run") == pytest.approx(right)
    assert size_of(tmp_path / "run", model, None, None, None).frame_rate == pytest.approx(right)
    assert f"frame_rate={right:g}" in (tmp_path / "run" / "export" / "README.md").read_text()
