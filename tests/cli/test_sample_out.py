"""`sample --out` writes the kind of file that its ending says, and refuses others before anything is loaded."""

from pathlib import Path

import av
import numpy as np
import pytest
from kit.tiny_described import save_described
from PIL import Image, ImageSequence

from diffusionpipe import cli
from diffusionpipe.trainer.inference import folder_drawing

SMALL = ("--steps", "1", "--guidance", "1", "--resolution", "64", "--height", "32", "--frames", "5", "--device", "cpu")
CLIP = (*SMALL, "--frame-rate", "10")


def command(*words):
    try:
        cli.main(["sample", *map(str, words)])
    except SystemExit as ended:
        return ended.code or 0
    return 0


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    return save_described("WanPipeline", tmp_path_factory.mktemp("model") / "wan")


@pytest.fixture
def never_loaded(monkeypatch):
    def load(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(folder_drawing, "build_graph", load)


@pytest.mark.parametrize("name", ["a.jpg", "a.xyz", "a", "a.mov", "a.png.bak"])
@pytest.mark.parametrize(
    "words",
    [("--prompt", "a"), ("--prompt", "a", "--prompt", "b", "--count", "2"), ("--ranks", "2", "--prompt", "a"), "like"],
    ids=["one", "several", "ranks", "like"],
)
def test_other_endings_are_refused_before_anything_is_loaded(wan, tmp_path, capsys, never_loaded, name, words):
    words = ("--like", tmp_path / "none.png") if words == "like" else words
    assert command(wan, *words, "--out", tmp_path / name) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{name.rpartition('.')[2]}" in said
    assert "pictures and clips are written as .png, .webp, .gif or .mp4" in said
    assert not (tmp_path / name).exists()


def test_a_gif_of_too_many_frames_a_second_is_refused_before_anything_is_loaded(wan, tmp_path, capsys, never_loaded):
    words = ("--prompt", "a", *SMALL, "--frame-rate", "60", "--out", tmp_path / "a.gif")
    assert command(wan, *words) == 2
    assert "a GIF shows at most 50 frames a second, not 60" in " ".join(capsys.readouterr().err.split())


def frames_of(path: Path):
    if path.suffix == ".mp4":
        with av.open(str(path)) as container:
            assert container.streams.video[0].average_rate == 10
            return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    with Image.open(path) as picture:
        assert picture.format == path.suffix[1:].upper()
        return np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(picture)])


@pytest.mark.slow
def test_one_clip_is_written_as_it_is_and_drawn_again_as_each_kind_of_file(wan, tmp_path):
    out, keep = tmp_path / "a.mp4", tmp_path / "kept"
    assert command(wan, "--prompt", "a", *CLIP, "--out", out, "--keep", keep) == 0
    kept = frames_of(keep / "000-a.png").astype(int)
    assert kept.shape == (5, 32, 64, 3)
    assert np.abs(frames_of(out) - kept).mean() < 12
    for ending in ("png", "webp", "gif"):
        again = tmp_path / f"again.{ending}"
        assert command(wan, "--like", keep / "000-a.png", "--out", again, "--device", "cpu") == 0
        assert np.abs(frames_of(again) - kept).mean() < (1e-9 if ending == "png" else 12)


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "frames"), [("png", 1), ("gif", 5), ("mp4", 5)])
def test_several_clips_play_in_a_grid_or_stand_still_in_a_png(wan, tmp_path, ending, frames):
    out = tmp_path / f"a.{ending}"
    assert command(wan, "--prompt", "a", "--count", "2", *CLIP, "--out", out) == 0
    found = frames_of(out)
    assert len(found) == frames
    assert found.shape[2] > 2 * 128


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["png", "webp", "gif"])
def test_pictures_of_one_frame_are_written_as_each_kind_of_file(wan, tmp_path, ending):
    words = ("--steps", "1", "--guidance", "1", "--resolution", "32", "--frames", "1", "--device", "cpu")
    assert command(wan, "--prompt", "a", "--prompt", "b", *words, "--out", tmp_path / f"a.{ending}") == 0
    assert len(frames_of(tmp_path / f"a.{ending}")) == 1
