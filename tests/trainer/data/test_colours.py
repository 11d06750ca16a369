"""Pictures with colour profiles become sRGB: expected colours are computed from the profiles' numbers in float."""

import numpy as np
import pytest
from kit import icc, pngs
from PIL import Image

from diffusionpipe.trainer.data.decoding.images import load_levels, read_header
from diffusionpipe.trainer.data.scan.dataset import scan

DISPLAY_P3, ADOBE_RGB = icc.matrix_profile(icc.P3, 2.2), icc.matrix_profile(icc.ADOBE, 2.2)
SRGB_LIKE = icc.matrix_profile(icc.SRGB, 2.2)
WITHIN = 2
"""Levels of 256: eight bits round twice."""


def colours_within_srgb(primaries, gamma, count=64):
    """Levels (N, 3) whose colours sRGB can show."""
    levels = np.random.default_rng(0).integers(0, 256, (4000, 3))
    xyz = (levels / 255) ** gamma @ icc.to_d50(primaries).T
    linear = xyz @ np.linalg.inv(icc.to_d50(icc.SRGB)).T
    return levels[((linear >= 0.002) & (linear <= 1)).all(axis=1)][:count].astype(np.uint8)


def read(path, channels=3):
    """The levels of a file with one row of pixels in a square, (N, channels)."""
    with Image.open(path) as picture:
        side = picture.width
    levels = load_levels(path, size=(side, side), channels=channels).numpy()
    return levels.reshape(channels, -1).T.astype(int)


def square(levels):
    return np.asarray(levels, dtype=np.uint8).reshape(8, 8, -1).squeeze()


def assert_close(found, expected):
    assert np.abs(found - expected).max() <= WITHIN


@pytest.mark.parametrize(("primaries", "profile"), [(icc.P3, DISPLAY_P3), (icc.ADOBE, ADOBE_RGB)], ids=["P3", "Adobe"])
@pytest.mark.parametrize("name", ["a.png", "a.webp"])
def test_a_picture_of_wide_colours_becomes_srgb_by_its_profile(tmp_path, primaries, profile, name):
    levels = colours_within_srgb(primaries, 2.2)
    Image.fromarray(square(levels)).save(tmp_path / name, icc_profile=profile, lossless=True)
    expected = icc.srgb_of(levels, primaries, 2.2)
    assert_close(read(tmp_path / name), expected)
    assert np.abs(expected - levels).max() > 10, "a reader that ignores profiles would pass"
    other = icc.srgb_of(levels, icc.ADOBE if primaries is icc.P3 else icc.P3, 2.2)
    assert np.abs(expected - other).max() > 10, "a reader that takes the other profile would pass"
    assert read_header(tmp_path / name).colours is None


def test_a_jpeg_with_a_profile_in_several_segments_becomes_srgb(tmp_path):
    level = np.array([[200, 120, 90]])
    long = ADOBE_RGB[:4] + ADOBE_RGB[4:] + bytes(150_000)
    Image.new("RGB", (8, 8), tuple(level[0])).save(tmp_path / "a.jpg", icc_profile=long, quality=100, subsampling=0)
    assert_close(read(tmp_path / "a.jpg"), icc.srgb_of(level, icc.ADOBE, 2.2))


def test_a_palette_becomes_srgb_by_its_profile(tmp_path):
    levels = colours_within_srgb(icc.P3, 2.2)
    picture = Image.fromarray(square(np.arange(64)), mode=None).convert("L")
    picture.putpalette(levels.ravel().tolist())
    picture.save(tmp_path / "a.png", icc_profile=DISPLAY_P3)
    assert_close(read(tmp_path / "a.png"), icc.srgb_of(levels, icc.P3, 2.2))


def test_colours_become_srgb_before_they_are_laid_over_white(tmp_path):
    levels = colours_within_srgb(icc.ADOBE, 2.2)
    alpha = np.arange(64)[:, None] * 4
    Image.fromarray(square(np.concatenate([levels, alpha], axis=1))).save(tmp_path / "a.png", icc_profile=ADOBE_RGB)
    expected = icc.srgb_of(levels, icc.ADOBE, 2.2) * alpha / 255 + 255 - alpha
    assert_close(read(tmp_path / "a.png"), expected)


@pytest.mark.parametrize("kind", ["L", "LA", "I;16", "LA;16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_grey_becomes_srgb_by_the_gamma_of_its_profile(tmp_path, kind, channels):
    levels = np.arange(8, 256, 8).repeat(2)[:, None]
    levels = np.concatenate([levels, [[255], [128]]])
    expected = icc.encoded((levels / 255) ** 1.0)
    grey, profile = square(levels), icc.grey_profile(1.0)
    if kind == "LA;16":
        (tmp_path / "a.png").write_bytes(pngs.grey_16_with_alpha(grey, profile))
    else:
        made = Image.fromarray(grey.astype(np.uint16) * 257 if kind == "I;16" else grey)
        (made.convert("LA") if kind == "LA" else made).save(tmp_path / "a.png", icc_profile=profile)
    assert_close(read(tmp_path / "a.png", channels), expected)
    assert np.abs(expected - levels).max() > 10
    assert read_header(tmp_path / "a.png").colours is None


def test_inks_become_srgb_by_the_table_of_their_profile(tmp_path):
    levels = np.array([[0, 0, 0, 0], [255, 0, 0, 0], [40, 200, 80, 30], [0, 0, 0, 128], [255, 255, 255, 0]])
    for number, inks in enumerate(levels):
        path = tmp_path / f"{number}.jpg"
        Image.new("CMYK", (8, 8), tuple(int(ink) for ink in inks)).save(
            path, icc_profile=icc.ink_profile(), quality=100
        )
        assert_close(read(path), icc.srgb_of_inks(inks[None]))


def test_a_picture_whose_profile_is_that_of_srgb_keeps_its_levels(tmp_path):
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    levels = np.random.default_rng(0).integers(0, 256, (64, 3))
    Image.fromarray(square(levels)).save(tmp_path / "a.png", icc_profile=profile)
    assert np.array_equal(read(tmp_path / "a.png"), levels)


@pytest.mark.parametrize(
    ("profile", "mode", "reason"),
    [
        (DISPLAY_P3[:100], "RGB", "cut short: it has 100 of"),
        (DISPLAY_P3[:-30], "RGB", "cut short: it has"),
        (icc.grey_profile(1.8), "RGB", "is for GRAY, and its colours are RGB"),
        (DISPLAY_P3, "L", "is for RGB, and its colours are GRAY"),
        (icc.ink_profile(), "RGB", "is for CMYK, and its colours are RGB"),
        (icc.matrix_profile(icc.P3, 2.2, b"link"), "RGB", "of the class link, which does not describe pictures"),
        (icc.matrix_profile(icc.P3, 2.2, b"\0\xff'\n"), "RGB", "of the class"),
        (icc.profile(b"RGB ", {}), "RGB", "LittleCMS cannot use it"),
        (DISPLAY_P3.replace(b"acsp", b"ascp"), "RGB", "not one of ICC's"),
        (b"hello", "RGB", "cut short"),
    ],
)
def test_a_picture_with_a_profile_that_cannot_be_used_is_named_and_taken_as_srgb(
    tmp_path, caplog, profile, mode, reason
):
    levels = np.random.default_rng(0).integers(0, 256, (64, 3 if mode == "RGB" else 1))
    Image.fromarray(square(levels)).save(tmp_path / "a.png", icc_profile=profile)
    Image.fromarray(square(levels)).save(tmp_path / "b.png")
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("a caption")
    assert np.array_equal(read(tmp_path / "a.png", len(levels[0])), levels)
    scan(tmp_path, "text")
    (message,) = caplog.messages
    assert "taken_as_srgb=1" in message
    assert "a.png: its colour profile" in message
    assert reason in message
    assert "b.png" not in message


def test_a_jpeg_that_has_lost_a_part_of_its_profile_is_named(tmp_path):
    long = ADOBE_RGB + bytes(150_000)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.jpg", icc_profile=long)
    data = (tmp_path / "a.jpg").read_bytes()
    second = data.index(b"ICC_PROFILE\0\x02") - 4
    length = int.from_bytes(data[second + 2 : second + 4]) + 2
    (tmp_path / "a.jpg").write_bytes(data[:second] + data[second + length :])
    assert "cut short or damaged" in read_header(tmp_path / "a.jpg").colours


@pytest.mark.parametrize(
    ("chunk", "said"),
    [
        (pngs.chunk(b"gAMA", (100_000).to_bytes(4)), "its gAMA chunk says 1, and only colour profiles are applied"),
        (pngs.chunk(b"cHRM", pngs.numbers(31270, 32900, 68000, 32000, 26500, 69000, 15000, 6000)), "cHRM"),
        (pngs.chunk(b"gAMA", (45_455).to_bytes(4)), None),
        (pngs.chunk(b"cHRM", pngs.numbers(31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000)), None),
        (pngs.chunk(b"gAMA", (100_000).to_bytes(4)) + pngs.chunk(b"sRGB", b"\0"), None),
    ],
)
def test_a_png_whose_chunks_say_another_gamma_or_primaries_is_named(tmp_path, chunk, said):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    pngs.insert(tmp_path / "a.png", chunk)
    found = read_header(tmp_path / "a.png").colours
    assert found is None if said is None else said in found
