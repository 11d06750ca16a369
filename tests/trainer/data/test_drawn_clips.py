"""Clips that the program has drawn are read again for training, with their times and colours."""

import numpy as np
import pytest
from PIL import Image, ImageSequence

from diffusionpipe.trainer.data.decoding.clip_times import timeline_of
from diffusionpipe.trainer.data.decoding.clips import FrameSelection, load_clip
from diffusionpipe.viz.drawing_file import MOVING, write_clip

LEVELS = (30, 90, 150, 210, 60, 120, 240, 20)


def clip(height=32, width=48, count=8):
    """Each frame has one colour, which the next one has not."""
    colours = np.array([(level, 255 - level, 128) for level in LEVELS[:count]], dtype=np.uint8)
    return colours[:, None, None].repeat(height, axis=1).repeat(width, axis=2)


@pytest.mark.parametrize("rate", [8, 16, 24000 / 1001, 30])
def test_a_clip_lasts_as_long_as_its_frames_a_second_say(tmp_path, rate):
    for ending in MOVING:
        write_clip(clip(), tmp_path / f"clip{ending}", rate=rate)
    assert timeline_of(tmp_path / "clip.mp4").rate == pytest.approx(rate, rel=1e-3)
    assert timeline_of(tmp_path / "clip.gif").seconds == pytest.approx(8 / rate, abs=0.006)
    with Image.open(tmp_path / "clip.webp") as picture:
        shown = []
        for frame in ImageSequence.Iterator(picture):
            frame.load()
            shown.append(frame.info["duration"])
    assert sum(shown) == pytest.approx(8000 / rate, abs=0.6)


def test_a_written_clip_is_trained_on_in_its_own_colours(tmp_path):
    """H.264 says here that its colours are those of BT.709; a reader that does not look is wrong by 14 levels."""
    write_clip(clip(), tmp_path / "clip.mp4", rate=8)
    levels = load_clip(tmp_path / "clip.mp4", size=(48, 32), taken=FrameSelection(frames=8))
    found = levels.permute(1, 2, 3, 0).numpy().astype(int)
    assert np.abs(found - clip()).mean(axis=(1, 2)).max() < 3
