"""Data folders and checkpoints with something odd in them: refused by name, at once."""

import json
import os

import pytest
import torch
from PIL import Image

from diffusionpipe.errors import CheckpointError, DataError
from diffusionpipe.trainer.checkpoint import read_state, save, verify
from diffusionpipe.trainer.dataset import scan
from diffusionpipe.trainer.overrides import override


def refusal(folder):
    with pytest.raises(DataError) as caught:
        scan(folder, "text")
    return str(caught.value)


@pytest.fixture
def data(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a")
    return tmp_path


@pytest.mark.parametrize("name", ["x.png", "a.txt", "metadata.jsonl"])
def test_a_fifo_in_a_data_folder_is_refused_without_waiting_for_a_writer(data, name):
    (data / name).unlink(missing_ok=True)
    os.mkfifo(data / name)
    if name == "x.png":
        (data / "x.txt").write_text("x")
    assert "not a regular file" in refusal(data)
    assert name in refusal(data)


def test_a_picture_that_is_a_link_to_an_endless_device_is_refused(data):
    (data / "x.png").symlink_to("/dev/zero")
    (data / "x.txt").write_text("x")
    assert "x.png: it is not a regular file" in refusal(data)


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"file_name": "a.png", "label": ' + "9" * 5000 + "}"], ids=["deep", "large"]
)
def test_a_line_of_metadata_that_cannot_be_read_is_named(data, line):
    (data / "metadata.jsonl").write_text(line + "\n")
    assert "metadata.jsonl line 1: " in refusal(data)


def test_a_byte_order_mark_is_no_part_of_a_caption(data):
    (data / "a.txt").write_bytes(b"\xef\xbb\xbfa blue tit\n")
    Image.new("RGB", (4, 4)).save(data / "b.png")
    (data / "metadata.jsonl").write_bytes(b'\xef\xbb\xbf{"file_name": "b.png", "text": "a robin"}\n')
    assert [sample.text for sample in scan(data, "text").samples] == ["a blue tit", "a robin"]


@pytest.mark.parametrize(
    "caption", [b"a\0b", "a".encode("utf-16-be"), b"x" * 200_000], ids=["NUL", "UTF-16", "endless"]
)
def test_a_caption_that_is_no_text_or_endless_is_refused_by_name(data, caption):
    (data / "a.txt").write_bytes(caption)
    assert "a.txt: " in refusal(data)


@pytest.mark.parametrize("value", ["[" * 100_000, "9" * 5000, "{a=" * 50_000], ids=["list", "number", "table"])
def test_an_override_that_toml_cannot_read_is_a_string(value):
    assert override({}, [f"training.steps={value}"]).table == {"training": {"steps": value}}


@pytest.fixture
def checkpoint(tmp_path):
    return save(tmp_path, 1, {"model.w": torch.zeros(2)}, {"step": 1}, keep=1)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_a_checkpoint_with_anything_but_files_is_refused_at_once(checkpoint, name, kind):
    (checkpoint / name).unlink()
    if kind == "fifo":
        os.mkfifo(checkpoint / name)
    elif kind == "device":
        (checkpoint / name).symlink_to("/dev/zero")
    else:
        (checkpoint / name).mkdir()
    with pytest.raises(CheckpointError, match=name):
        verify(checkpoint)
    if name == "state.json":
        with pytest.raises(CheckpointError, match=name):
            read_state(checkpoint)


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/passwd", "", "a/b"])
def test_a_manifest_that_names_files_elsewhere_is_refused(checkpoint, name):
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][0]["name"] = name
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="is not the name of a file of the checkpoint"):
        verify(checkpoint)
