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

from diffusionpipe.errors import CheckpointError, ConfigError, DataError, RecipeError
from diffusionpipe.files.input_file import read_named
from diffusionpipe.trainer.checkpoints.checkpoint import clean, problem_of_folder, read_state, save, verify
from diffusionpipe.trainer.course.kept_facts import kept_facts
from diffusionpipe.trainer.course.run_identity import check_resumed
from diffusionpipe.trainer.data.decoding.images import PictureError, fingerprint, load_pixels
from diffusionpipe.trainer.data.scan.dataset import scan
from diffusionpipe.trainer.data.scan.skipped import read_skipped
from diffusionpipe.trainer.recipe import (
    DataSection,
    SamplingSection,
    TrainingSection,
    load_recipe,
    override,
    read_prompts,
)
from diffusionpipe.trainer.reporting.metrics import MetricsWriter, last_step
from diffusionpipe.trainer.step.spikes import kept_values


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


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "tensors.json", "rank-0.safetensors"])
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
    identity = {"prediction": "epsilon", "picture files": "fingerprint 123"}

    def resumed(**others):
        return check_resumed(kept_facts({"step": 3, "prediction": "epsilon", **others}, "step-3"), identity, 5)

    assert resumed() == resumed(**identity) == 3
    with pytest.raises(CheckpointError, match="picture files was 'fingerprint 456' and is 'fingerprint 123'"):
        resumed(**{"picture files": "fingerprint 456"})
    with pytest.raises(CheckpointError, match=r"^step-3 belongs to another run: prediction was 'v' and is 'epsilon'"):
        resumed(prediction="v")


@pytest.mark.parametrize("step", [None, "x", -1, 1.5, float("inf"), [], True])
def test_a_state_with_an_impossible_step_is_refused(step):
    with pytest.raises(CheckpointError, match=r"step-7: state\.json has the step"):
        kept_facts({"step": step}, "step-7")


@pytest.mark.parametrize("past", [3, [1.0], {"loss": 1.0}, {"loss": ["x"]}, {"loss": [float("nan")]}, {"loss": [None]}])
def test_a_state_with_impossible_past_values_is_refused(past):
    with pytest.raises(CheckpointError, match=r"state\.json has"):
        kept_values({"step": 1, "past_values": past})


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
    monkeypatch.setattr("diffusionpipe.trainer.recipe.prompts.MAX_PROMPTS", 2**20)
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


def test_links_in_a_circle_end_where_they_lead_back(data):
    for name in ("b", "c"):  # followed for ever, they would make 2^40 folders
        (data / name).symlink_to(".")
    elsewhere = data / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "back").symlink_to("..")
    assert [sample.name for sample in scan(data, "text").samples] == ["a.png"]


def test_a_link_to_another_folder_is_followed(data, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    shutil.copy(data / "a.png", other)
    shutil.copy(data / "a.txt", other)
    for name in ("one", "two"):
        (data / name).symlink_to(other)
    assert [sample.name for sample in scan(data, "text").samples] == ["a.png", "one/a.png", "two/a.png"]


@pytest.mark.parametrize("size", [(1, 60_000), (60_000, 1)])
def test_a_line_of_pixels_that_would_fill_the_memory_is_refused(data, size):
    Image.new("RGB", size).save(data / "a.png")
    assert f"a.png: ValueError: it has {size[0]} x {size[1]} pixels" in refusal(data)
    with pytest.raises(PictureError, match="one side may be at most 100 times the other"):
        load_pixels(data / "a.png", resolution=512)


@pytest.mark.parametrize("key", ["step", "sequence"])
@pytest.mark.parametrize("value", ["Infinity", "NaN", "1e999", "[]", "9" * 5000])
def test_a_manifest_with_an_impossible_number_is_refused_by_name(checkpoint, key, value):
    path = checkpoint / "manifest.json"
    path.write_text(path.read_text().replace(f'"{key}": 1', f'"{key}": {value}'))
    with pytest.raises(CheckpointError, match=r"manifest\.json of step-00000001 cannot be read"):
        verify(checkpoint)


@pytest.mark.parametrize("wanted", ["9" * 5000, "x" * 300, "a/" * 3000])
def test_a_checkpoint_that_can_have_no_such_name_does_not_exist(checkpoint, wanted):
    problem = problem_of_folder(checkpoint.parent.parent, wanted)
    assert "step-00000001" in problem
    assert len(problem) < 1000


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_leftover_that_is_no_folder_goes_and_the_target_of_a_link_stays(checkpoint, tmp_path, kind):
    (tmp_path / "precious").mkdir()
    left = checkpoint.with_name(".step-00000009.writing")
    if kind == "link":
        left.symlink_to(tmp_path / "precious")
    else:
        left.write_text("x")
    assert clean(tmp_path) == (left.name,)
    assert not left.is_symlink()
    assert not left.exists()
    assert (tmp_path / "precious").is_dir()


@pytest.mark.parametrize(
    "line", ['{"step": "x", "loss": 1}', '{"step": null}', '{"step": ' + "9" * 5000 + "}", "[" * 3000, '{"step": [1]}']
)
def test_lines_of_metrics_that_no_run_has_written_are_left_out(tmp_path, line):
    own = '{"step": 1, "loss": 0.5}'
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n{own}\n")
    assert last_step(tmp_path) == 1
    MetricsWriter(tmp_path, resume_step=1).close()
    assert (tmp_path / "metrics.jsonl").read_text() == f"{own}\n"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (os.mkfifo, "it is not a regular file"),  # it would be waited for
        (os.mkdir, "it is not a regular file"),
        (lambda path: path.symlink_to("/dev/full"), "it is not a regular file"),
        (lambda path: path.symlink_to("nothing/here"), "it is a link to nothing"),
        (lambda path: path.symlink_to("/proc/self/mem"), "Input/output error"),  # a regular file that reads badly
    ],
)
def test_metrics_that_are_no_file_are_refused_at_once(tmp_path, make, says):
    make(tmp_path / "metrics.jsonl")
    assert last_step(tmp_path) == 0
    with pytest.raises(ConfigError, match=rf"metrics\.jsonl: {says}; remove it"):
        MetricsWriter(tmp_path, resume_step=1)


@pytest.mark.parametrize("line", ["[]", "{", '{"step": "a"}', "[" * 3000])
def test_a_damaged_list_of_skipped_pictures_is_refused_by_line(tmp_path, line):
    (tmp_path / "skipped.jsonl").write_text(f"{line}\n")
    with pytest.raises(DataError, match=r"skipped\.jsonl line 1: "):
        read_skipped(tmp_path)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        (DataSection, "workers", 100_000),  # each is a process: they would bring the machine down
        (DataSection, "resolution", 10**12),
        (TrainingSection, "batch", 10**12),
        (TrainingSection, "steps", 10**30),
        (TrainingSection, "seed", 10**30),
        (SamplingSection, "steps", 10**9),
        (SamplingSection, "seed", 2**63),
        (SamplingSection, "labels", [10**30]),
    ],
)
def test_a_number_that_no_machine_can_serve_is_refused_by_its_key(section, key, value):
    needed = {DataSection: {"train": "x", "resolution": 8}, TrainingSection: {"steps": 1, "batch": 1}}
    with pytest.raises(ValidationError, match=f"(?s){key}.*should be less than"):
        section.model_validate({**needed.get(section, {}), key: value})
