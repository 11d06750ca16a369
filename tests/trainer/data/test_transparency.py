"""What is transparent becomes white, in every mode of a picture and in clips."""

import av
import numpy as np
import pytest
from kit import pngs
from PIL import Image

from diffusionpipe.trainer.data.decoding.clips import FrameSelection, load_clip
from diffusionpipe.trainer.data.decoding.images import load_levels

SIDE = 4
DARK, LIGHT = 51, 204
"""Levels that grey of 4 bits has too. The upper half of each picture is dark, and the lower half light."""


def read(path, channels=3):
    return load_levels(path, size=(SIDE, SIDE), channels=channels).numpy()


def halves(upper, lower):
    return np.array([[upper] * SIDE] * 2 + [[lower] * SIDE] * 2)


def with_alpha(mode):
    """A picture whose upper half is dark and transparent."""
    colours = {"LA": (DARK, LIGHT), "RGBA": ((DARK,) * 3, (LIGHT,) * 3)}[mode]
    upper, lower = (np.append(colour, alpha) for colour, alpha in zip(colours, (0, 255), strict=True))
    return Image.fromarray(halves(upper, lower).astype(np.uint8))


def palette(transparency, path):
    picture = Image.fromarray(halves(0, 1).astype(np.uint8)).convert("L")
    picture.putpalette([DARK] * 3 + [LIGHT] * 3)
    picture.save(path, transparency=transparency)


def grey(bits, path):
    most = 2**bits - 1
    levels = halves(DARK, LIGHT) * most // 255
    trns = pngs.chunk(b"tRNS", int(levels[0, 0]).to_bytes(2))
    path.write_bytes(pngs.png(SIDE, SIDE, bits=bits, kind=0, rows=pngs.packed(levels, bits), chunks=trns))


def colour_16(path):
    levels = np.repeat(halves(DARK, LIGHT)[..., None] * 257, 3, axis=2)
    trns = pngs.chunk(b"tRNS", (DARK * 257).to_bytes(2) * 3)
    path.write_bytes(pngs.png(SIDE, SIDE, bits=16, kind=2, rows=pngs.packed(levels, 16), chunks=trns))


def grey_alpha_16(path):
    levels = np.stack([halves(DARK, LIGHT) * 257, halves(0, 65535)], axis=-1)
    path.write_bytes(pngs.png(SIDE, SIDE, bits=16, kind=4, rows=pngs.packed(levels, 16)))


MADE = {
    "RGBA": lambda path: with_alpha("RGBA").save(path),
    "LA": lambda path: with_alpha("LA").save(path),
    "palette, one entry": lambda path: palette(0, path),
    "palette, bytes": lambda path: palette(bytes((0, 255)), path),
    "RGB": lambda path: with_alpha("RGBA").convert("RGB").save(path, transparency=(DARK, DARK, DARK)),
    "grey of 4 bits": lambda path: grey(4, path),
    "grey of 8 bits": lambda path: grey(8, path),
    "grey of 16 bits": lambda path: grey(16, path),
    "colours of 16 bits": colour_16,
    "grey and alpha of 16 bits": grey_alpha_16,
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("channels", [1, 3])
def test_what_is_transparent_becomes_white_in_every_mode(tmp_path, kind, channels):
    MADE[kind](tmp_path / "a.png")
    assert (read(tmp_path / "a.png", channels) == halves(255, LIGHT)).all()


@pytest.mark.parametrize(("bits", "levels"), [(1, (0, 255)), (2, (85, 170))])
def test_grey_of_few_bits_has_its_transparent_level_too(tmp_path, bits, levels):
    stored = halves(*levels) * (2**bits - 1) // 255
    for name, level in (("upper", stored[0, 0]), ("lower", stored[-1, 0])):
        trns = pngs.chunk(b"tRNS", int(level).to_bytes(2))
        rows = pngs.packed(stored, bits)
        (tmp_path / f"{name}.png").write_bytes(pngs.png(SIDE, SIDE, bits=bits, kind=0, rows=rows, chunks=trns))
    assert (read(tmp_path / "upper.png") == halves(255, levels[1])).all()
    assert (read(tmp_path / "lower.png") == halves(levels[0], 255)).all()


def test_a_picture_in_webp_that_is_half_transparent_is_laid_over_white(tmp_path):
    Image.new("RGBA", (SIDE, SIDE), (0, 0, 0, 128)).save(tmp_path / "a.webp", lossless=True, exact=True)
    assert (read(tmp_path / "a.webp") == 127).all()


@pytest.mark.parametrize(("name", "codec", "form"), [("a.mov", "qtrle", "argb"), ("a.mkv", "ffv1", "bgra")])
def test_what_is_transparent_in_a_clip_becomes_white(tmp_path, name, codec, form):
    pixels = np.concatenate([halves(DARK, LIGHT)[..., None].repeat(3, 2), halves(0, 255)[..., None]], axis=2)
    large = pixels.repeat(8, axis=0).repeat(8, axis=1).astype(np.uint8)
    with av.open(str(tmp_path / name), "w") as container:
        stream = container.add_stream(codec, rate=8)
        stream.height, stream.width, stream.pix_fmt = 32, 32, form
        for _ in range(3):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(large, format="rgba").reformat(format=form)))
        container.mux(stream.encode(None))
    levels = load_clip(tmp_path / name, size=(32, 32), taken=FrameSelection(frames=2)).numpy()
    assert (levels == halves(255, LIGHT).repeat(8, axis=0).repeat(8, axis=1)).all()
