"""Drawings are written as the kind of file that their ending says, and read again as they were."""

import builtins

import av
import numpy as np
import pytest
from PIL import Image, ImageSequence

from diffusionpipe.errors import ConfigError
from diffusionpipe.viz import sample_grid
from diffusionpipe.viz.drawing_file import ENDINGS, MOVING, check_drawing_file, write_clip

LEVELS = (30, 90, 150, 210, 60, 120, 240, 20)
KINDS = {".png": "PNG", ".webp": "WEBP", ".gif": "GIF"}


def clip(height=32, width=48, count=8):
    """Each frame has one colour, which the next one has not."""
    colours = np.array([(level, 255 - level, 128) for level in LEVELS[:count]], dtype=np.uint8)
    return colours[:, None, None].repeat(height, axis=1).repeat(width, axis=2)


def frames_of(path):
    """(F, H, W, 3)."""
    if path.suffix == ".mp4":
        with av.open(str(path)) as container:
            return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    with Image.open(path) as picture:
        assert picture.format == KINDS[path.suffix]
        return np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(picture)])


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_clip_has_its_frames_in_every_kind_of_file(tmp_path, ending):
    path = tmp_path / f"clip{ending}"
    write_clip(clip(), path, rate=8)
    found = frames_of(path).astype(int)
    assert found.shape == clip().shape
    assert np.abs(found - clip()).mean(axis=(1, 2, 3)).max() < 4


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_picture_is_written_too(tmp_path, ending):
    path = tmp_path / f"one{ending.upper() if ending == '.png' else ending}"
    write_clip(clip()[3], path, rate=1)
    found = frames_of(path.rename(path.with_suffix(ending))).astype(int)
    assert len(found) == 1
    assert np.abs(found[0] - clip()[3]).mean() < 4


def test_an_mp4_of_odd_sides_has_its_last_lines_twice(tmp_path):
    write_clip(clip(height=33, width=47), tmp_path / "clip.mp4", rate=8)
    found = frames_of(tmp_path / "clip.mp4").astype(int)
    assert found.shape[1:3] == (34, 48)
    assert np.abs(found - clip(height=34, width=48)).mean(axis=(1, 2, 3)).max() < 4


@pytest.mark.parametrize("ending", MOVING)
def test_the_clips_of_a_grid_play_together_over_their_captions(tmp_path, ending):
    path = tmp_path / f"grid{ending}"
    sample_grid([("a", clip(144, 144)), ("b", clip(144, 144, count=3))], path, columns=2, rate=8)
    found = frames_of(path).astype(int)
    assert len(found) == 8
    for number, frame in enumerate(found):
        assert np.abs(frame[40:100, 40:100] - clip()[number, 0, 0]).mean() < 6
        assert np.abs(frame[40:100, 200:260] - clip()[min(number, 2), 0, 0]).mean() < 6
        assert frame[160:, 12:156].min() < 100, "no caption"


def test_a_grid_that_a_kind_of_file_cannot_hold_is_made_smaller_with_a_warning(tmp_path, caplog):
    write_clip(clip(height=8, width=5000, count=2), tmp_path / "clip.mp4", rate=8)
    assert frames_of(tmp_path / "clip.mp4").shape == (2, 6, 4096, 3)
    assert 'pixels=4096x6 reason=".mp4 files hold no larger ones"' in caplog.text


@pytest.mark.parametrize("name", ["a.jpg", "a.xyz", "a", "a.mp4.txt", "a.mov", "a.avi", "a.svg"])
def test_other_endings_are_refused_with_those_that_there_are(tmp_path, name):
    with pytest.raises(ConfigError, match=r"written as \.png, \.webp, \.gif or \.mp4"):
        check_drawing_file(tmp_path / name)


def test_a_device_gets_a_png(tmp_path):
    from pathlib import Path

    check_drawing_file(Path("/dev/null"))
    write_clip(clip()[0], Path("/dev/null"), rate=1)


def test_a_gif_of_too_many_frames_a_second_is_refused(tmp_path):
    check_drawing_file(tmp_path / "a.gif", 50)
    check_drawing_file(tmp_path / "a.mp4", 120)
    with pytest.raises(ConfigError, match=r"at most 50 frames a second, not 60; use \.mp4 or \.webp"):
        check_drawing_file(tmp_path / "a.gif", 60)


def test_an_mp4_without_pyav_is_refused_with_what_to_install(tmp_path, monkeypatch):
    original = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "av":
            raise ImportError("No module named 'av'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    check_drawing_file(tmp_path / "a.gif")
    with pytest.raises(ConfigError, match=r"pip install av, or use \.webp"):
        check_drawing_file(tmp_path / "a.mp4")
