"""Data folders and checkpoints with something odd in them: refused by name, at once."""

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from diffusionpipe.errors import CheckpointError, DataError, RecipeError
from diffusionpipe.ir.input_file import read_named
from diffusionpipe.trainer.checkpoint import read_state, save, verify
from diffusionpipe.trainer.dataset import scan
from diffusionpipe.trainer.images import fingerprint, load_pixels
from diffusionpipe.trainer.overrides import override
from diffusionpipe.trainer.prompts import read_prompts
from diffusionpipe.trainer.recipe import DataSection
from diffusionpipe.trainer.recipe_file import load_recipe
from diffusionpipe.trainer.session import check_resumed


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


def test_a_copy_of_a_data_folder_is_the_same_data_and_a_replaced_picture_is_not(data, tmp_path_factory):
    before = scan(data, "text").contents
    copy = tmp_path_factory.mktemp("copy") / "data"
    shutil.copytree(data, copy, copy_function=shutil.copyfile)
    os.utime(copy / "a.png", (0, 0))
    assert scan(copy, "text").contents == before
    Image.new("RGB", (4, 4), "red").save(copy / "a.png")
    assert scan(copy, "text").contents != before


def test_a_picture_of_the_same_length_that_differs_in_one_byte_is_not_the_same(tmp_path):
    for name, middle in (("a", b"x"), ("b", b"y")):
        (tmp_path / name).write_bytes(bytes(9000) + middle + bytes(9000))
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")


def test_a_run_goes_on_with_the_same_pictures_only_and_a_state_without_a_fingerprint_is_accepted():
    identity = {"seed": 0, "picture files": "fingerprint 123"}
    assert check_resumed({"step": 3, "seed": 0}, identity, 5) == 3
    assert check_resumed({"step": 3, **identity}, identity, 5) == 3
    with pytest.raises(CheckpointError, match="picture files was 'fingerprint 456' and is 'fingerprint 123'"):
        check_resumed({"step": 3, **identity, "picture files": "fingerprint 456"}, identity, 5)


def test_a_picture_with_floating_point_levels_is_refused_instead_of_turning_black(data):
    Image.new("F", (4, 4), 0.5).save(data / "f.png", format="TIFF")
    (data / "f.txt").write_text("f")
    assert "f.png: ValueError: its levels are floating-point numbers" in refusal(data)
    with pytest.raises(DataError, match=r"f\.png: .*floating-point"):
        load_pixels(data / "f.png", resolution=4)


@pytest.mark.parametrize(
    ("text", "says"),
    [("steps = " + "9" * 5000, "not a TOML file"), ("x = " + "[" * 100_000, "nested too deeply")],
    ids=["large", "deep"],
)
def test_a_recipe_that_toml_cannot_read_is_refused_by_name(tmp_path, text, says):
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(RecipeError, match=rf"recipe\.toml: .*{says}"):
        load_recipe(tmp_path / "recipe.toml")


@pytest.mark.parametrize(("path", "says"), [("a" * 300, "255 between two slashes"), ("a\0b", "NUL character")])
def test_a_path_that_cannot_exist_is_refused_by_its_key(path, says):
    with pytest.raises(ValidationError, match=says):
        DataSection.model_validate({"train": path, "resolution": 16})


def test_prompts_from_a_device_that_never_ends_are_refused(monkeypatch):
    monkeypatch.setattr("diffusionpipe.trainer.prompts.MAX_PROMPTS", 2**20)
    with pytest.raises(RecipeError, match="/dev/zero: it has more than"):
        read_prompts(Path("/dev/zero"))


def test_a_plan_from_a_device_that_never_ends_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="it has more than 1,000 bytes"):
        read_named(Path("/dev/zero"), 1000)


def test_a_fifo_that_the_user_names_is_read(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_text, args=("a blue tit\na robin\n",))
    writer.start()
    assert [prompt.text for prompt in read_prompts(fifo)] == ["a blue tit", "a robin"]
    writer.join(20)
