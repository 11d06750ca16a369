import numpy as np
import pytest
from PIL import Image

from diffusionpipe.errors import ConfigError
from diffusionpipe.viz import sample_grid


def drawn(tmp_path, images, columns):
    path = tmp_path / "grid.png"
    sample_grid(images, path, columns=columns)
    return np.asarray(Image.open(path))


def test_every_pixel_of_a_small_picture_becomes_a_crisp_square(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    sheet = drawn(tmp_path, [("noise", pixels)], 1)
    enlarged = pixels.repeat(9, axis=0).repeat(9, axis=1)
    assert np.array_equal(sheet[12 : 12 + 144, 12 : 12 + 144], enlarged)


def test_a_large_picture_keeps_its_pixels_and_a_pil_image_is_as_good_as_an_array(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (200, 300, 3), dtype=np.uint8)
    of_array = drawn(tmp_path, [("noise", pixels)], 1)
    of_image = drawn(tmp_path, [("noise", Image.fromarray(pixels))], 1)
    assert np.array_equal(of_array[12:212, 12:312], pixels)
    assert np.array_equal(of_array, of_image)


def test_pictures_stand_row_by_row(tmp_path):
    images = [("", np.full((144, 144, 3), 40 * i, dtype=np.uint8)) for i in range(5)]
    sheet = drawn(tmp_path, images, 3)
    row_height = (sheet.shape[0] - 12) // 2
    corners = [sheet[12 + row_height * (i // 3) + 5, 12 + 156 * (i % 3) + 5, 0] for i in range(5)]
    assert corners == [0, 40, 80, 120, 160]
    assert (sheet[12 + row_height :, 12 + 2 * 156 :] == 255).all()


def test_captions_are_written_below_the_picture_and_never_beside_it(tmp_path):
    white = np.full((144, 144, 3), 255, dtype=np.uint8)
    for caption in ("seven", "word " * 40, "w" * 200, "siebenundzwanzig Äpfel, яблоко"):
        sheet = drawn(tmp_path, [(caption, white)], 1)
        dark = np.argwhere(sheet[:, :, 0] < 128)
        assert len(dark) > 0
        assert dark[:, 0].min() >= 12 + 144
        assert 12 <= dark[:, 1].min() <= dark[:, 1].max() < 12 + 144
        assert dark[:, 0].max() < sheet.shape[0]


def test_a_folder_that_is_missing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot write"):
        sample_grid([("", np.zeros((8, 8, 3), dtype=np.uint8))], tmp_path / "missing" / "grid.png", columns=1)


def test_a_caption_of_a_million_letters_is_cut(tmp_path):
    pixels = np.zeros((16, 16, 3), dtype=np.uint8)
    long, short = (drawn(tmp_path, [("a" * count, pixels)], 1) for count in (1_000_000, 1_000))
    assert np.array_equal(long, short)
