"""Pictures that are large, or that hold much text, are read; far larger ones are refused before memory is taken."""

import tracemalloc
import zlib

import pytest
from kit import pngs
from PIL import Image, PngImagePlugin

from diffusionpipe.errors import ConfigError
from diffusionpipe.trainer.data.decoding.images import PictureError, load_levels, read_header, upright_size
from diffusionpipe.trainer.inference.sample_file import read_origin

GRAPH = "a node of a graph; " * 200_000
"""About 4 MB, which ComfyUI writes for large graphs."""


def blank(width, height, chunks=b"", *, rows=None):
    """A white file of one bit a pixel, with the first `rows` of its rows; None: all."""
    row = b"\0" + b"\xff" * ((width + 7) // 8)
    return pngs.png(width, height, bits=1, kind=0, rows=row * (height if rows is None else rows), chunks=chunks)


@pytest.mark.parametrize("kind", ["zTXt", "iTXt", "tEXt"])
@pytest.mark.parametrize("is_behind", [False, True], ids=["before the pixels", "behind the pixels"])
def test_a_picture_with_much_text_is_read(tmp_path, kind, is_behind):
    info = PngImagePlugin.PngInfo()
    if kind == "iTXt":
        info.add_itxt("workflow", GRAPH, zip=True)
    else:
        info.add_text("workflow", GRAPH, zip=kind == "zTXt")
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 8), "red").save(path, pnginfo=info)
    if is_behind:
        data = path.read_bytes()
        start = data.index(kind.encode()) - 4
        end = start + 12 + int.from_bytes(data[start : start + 4])
        path.write_bytes(data[:start] + data[end:-12] + data[start:end] + data[-12:])
    assert read_header(path).problem is None
    assert load_levels(path, size=(8, 8))[0].min() == 255


def test_a_picture_with_a_large_profile_is_read(tmp_path):
    profile = pngs.chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(3 * 2**20)))
    (tmp_path / "a.png").write_bytes(blank(8, 8, profile))
    assert read_header(tmp_path / "a.png").problem is None
    assert load_levels(tmp_path / "a.png", size=(8, 8)).min() == 255


def test_text_that_would_fill_the_memory_is_refused_by_a_sentence(tmp_path):
    packer = zlib.compressobj()
    text = b"".join(packer.compress(bytes(2**20)) for _ in range(65)) + packer.flush()
    (tmp_path / "a.png").write_bytes(blank(8, 8, pngs.chunk(b"zTXt", b"x\0\0" + text)))
    said = read_header(tmp_path / "a.png").problem
    assert "it holds a text or a colour profile of more than 64 MiB; save it without" in said


def test_a_header_of_189_megapixels_is_sound(tmp_path):
    (tmp_path / "a.png").write_bytes(blank(13_750, 13_750, rows=2))
    assert read_header(tmp_path / "a.png").problem is None
    assert upright_size(tmp_path / "a.png") == (13_750, 13_750)


@pytest.mark.slow
def test_a_picture_of_189_megapixels_is_read(tmp_path):
    (tmp_path / "a.png").write_bytes(blank(13_750, 13_750))
    assert load_levels(tmp_path / "a.png", size=(8, 8), channels=1).min() == 255


def test_a_picture_of_more_pixels_than_most_memories_hold_is_refused_before_memory_is_taken(tmp_path):
    (tmp_path / "a.png").write_bytes(blank(65_000, 65_000, rows=2))
    tracemalloc.start()
    said = read_header(tmp_path / "a.png").problem
    with pytest.raises(PictureError, match="at most 32,000 x 32,000 are read"):
        load_levels(tmp_path / "a.png", size=(8, 8))
    with pytest.raises(ConfigError, match="at most 32,000 x 32,000 are read"):
        read_origin(tmp_path / "a.png")
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()
    assert "it has 65,000 x 65,000 pixels; at most 32,000 x 32,000 are read: make it smaller" in said
