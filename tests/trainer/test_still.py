"""The picture that stands for a clip on a sheet: its frames side by side."""

import numpy as np
import pytest

from diffusionpipe.trainer.inference.drawing import still


@pytest.mark.parametrize(
    ("frames", "shown"),
    [(1, [0]), (2, [0, 1]), (4, [0, 1, 2, 3]), (5, [0, 1, 3, 4]), (9, [0, 3, 5, 8])],
)
def test_a_clip_shows_up_to_four_frames_from_the_first_to_the_last(frames, shown):
    clip = np.arange(frames, dtype=np.uint8)[:, None, None, None] * np.ones((2, 3, 3), dtype=np.uint8)
    sheet = still(clip)
    assert sheet.shape == (2, 3 * len(shown), 3)
    assert sheet[0, ::3, 0].tolist() == shown


def test_a_picture_stays():
    picture = np.zeros((2, 3, 3), dtype=np.uint8)
    assert still(picture) is picture
