import numpy as np
import pytest
import torch
from PIL import Image

from diffusionpipe.errors import DataError
from diffusionpipe.trainer.data.decoding.images import load_pixels, read_header, save_picture


def save(path, values, **options):
    Image.fromarray(np.asarray(values, dtype=np.uint8)).save(path, **options)
    return path


def random_picture(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_a_picture_of_the_right_size_keeps_every_value(tmp_path):
    values = random_picture(8, 8)
    pixels = load_pixels(save(tmp_path / "a.png", values), resolution=8)
    assert pixels.shape == (3, 8, 8)
    assert pixels.dtype == torch.float32
    assert pixels.is_contiguous()
    assert torch.equal(((pixels + 1) * 127.5).round().to(torch.uint8), torch.from_numpy(values).permute(2, 0, 1))


def test_black_is_minus_one_and_white_is_one_exactly(tmp_path):
    values = np.zeros((4, 4, 3))
    values[:2] = 255
    pixels = load_pixels(save(tmp_path / "a.png", values), resolution=4)
    assert pixels[:, :2].eq(1).all()
    assert pixels[:, 2:].eq(-1).all()


@pytest.mark.parametrize(("crop", "left"), [((0.0, 0.5), 0), ((0.5, 0.5), 2), ((0.9999, 0.5), 4)])
def test_a_wide_picture_is_cut_where_the_crop_says(tmp_path, crop, left):
    values = random_picture(8, 12)
    pixels = load_pixels(save(tmp_path / "a.png", values), resolution=8, crop=crop)
    expected = load_pixels(save(tmp_path / "b.png", values[:, left : left + 8]), resolution=8)
    assert torch.equal(pixels, expected)


def test_a_tall_picture_is_cut_from_above(tmp_path):
    values = random_picture(12, 8)
    pixels = load_pixels(save(tmp_path / "a.png", values), resolution=8, crop=(0.5, 0.0))
    assert torch.equal(pixels, load_pixels(save(tmp_path / "b.png", values[:8]), resolution=8))


@pytest.mark.parametrize("size", [(3, 3), (1, 40), (33, 31), (64, 48)])
def test_any_size_becomes_the_asked_square_within_range(tmp_path, size):
    pixels = load_pixels(save(tmp_path / "a.png", random_picture(*size)), resolution=16)
    assert pixels.shape == (3, 16, 16)
    assert pixels.abs().max() <= 1


def test_shrinking_averages_instead_of_picking_pixels(tmp_path):
    board = np.indices((64, 64)).sum(0) % 2 * 255
    pixels = load_pixels(save(tmp_path / "a.png", np.repeat(board[..., None], 3, 2)), resolution=8)
    assert pixels[:, 2:-2, 2:-2].abs().max() < 0.02


def test_flip_mirrors_left_and_right(tmp_path):
    path = save(tmp_path / "a.png", random_picture(8, 8))
    assert torch.equal(load_pixels(path, resolution=8, flip=True), load_pixels(path, resolution=8).flip(2))


def test_the_rotation_in_exif_is_applied(tmp_path):
    values = random_picture(8, 8)
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    turned = load_pixels(save(tmp_path / "a.png", values, exif=exif), resolution=8)
    assert torch.equal(turned, load_pixels(save(tmp_path / "b.png", values), resolution=8).flip(1, 2))


def test_transparency_becomes_white(tmp_path):
    values = np.zeros((4, 4, 4))
    values[:2, :, 3] = 255
    pixels = load_pixels(save(tmp_path / "a.png", values), resolution=4)
    assert pixels[:, :2].eq(-1).all()
    assert pixels[:, 2:].eq(1).all()


def test_sixteen_bits_of_grey_keep_their_shades(tmp_path):
    values = (np.arange(16, dtype=np.uint16) * 4369).reshape(4, 4)
    Image.fromarray(values).save(tmp_path / "a.png")
    pixels = load_pixels(tmp_path / "a.png", resolution=4, channels=1)
    assert torch.equal(pixels.flatten(), torch.arange(16) * 17 / 127.5 - 1)


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK", "LA"])
def test_other_colour_modes_are_read_as_rgb(tmp_path, mode):
    picture = Image.fromarray(random_picture(8, 8)).convert(mode)
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    picture.save(path)
    assert load_pixels(path, resolution=8).shape == (3, 8, 8)


def test_a_picture_that_cannot_be_decoded_is_named(tmp_path):
    path = save(tmp_path / "cut.png", random_picture(64, 64))
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataError, match=r"cut\.png: cannot be decoded"):
        load_pixels(path, resolution=8)


def test_a_bad_header_is_a_problem_and_a_good_one_is_none(tmp_path):
    assert read_header(save(tmp_path / "a.png", random_picture(4, 4))).problem is None
    (tmp_path / "b.png").write_text("no picture")
    (tmp_path / "c.png").write_bytes(b"")
    assert "cannot identify" in read_header(tmp_path / "b.png").problem
    assert read_header(tmp_path / "c.png").problem is not None
    assert "FileNotFoundError" in read_header(tmp_path / "d.png").problem


@pytest.mark.parametrize("channels", [1, 3])
def test_a_saved_picture_is_loaded_back(tmp_path, channels):
    pixels = torch.randint(0, 256, (channels, 8, 8), generator=torch.Generator().manual_seed(0)) / 127.5 - 1
    save_picture(pixels, tmp_path / "a.png")
    loaded = load_pixels(tmp_path / "a.png", resolution=8, channels=channels)
    assert torch.allclose(loaded, pixels, atol=1e-6)
