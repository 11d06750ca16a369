"""Folders and files that machines make are overlooked and counted; pictures that cannot be read may be left out."""

import json

import pytest
from PIL import Image

from diffusionpipe.errors import DataError
from diffusionpipe.ir.words import counted
from diffusionpipe.trainer.data.scan.dataset import ScanRules, examine, scan
from diffusionpipe.trainer.data.scan.dataset_problems import (
    problems_of_captions,
    problems_of_conditions,
    problems_of_labels,
)
from diffusionpipe.trainer.data.scan.listing import OVERLOOKED_FILES, OVERLOOKED_FOLDERS
from diffusionpipe.trainer.data.scan.skipped import FILE, Skipped, Skipping, count_skipped, read_skipped


@pytest.fixture
def data(tmp_path):
    for name in ("a.png", "b.png", "c.png"):
        path = tmp_path / "data" / name
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)
        path.with_suffix(".txt").write_text(name)
    (tmp_path / "run").mkdir()
    return tmp_path / "data"


def names(folder, **rules):
    return [sample.name for sample in scan(folder, "text", rules=ScanRules(**rules)).samples]


def overlooked(folder):
    """The sentences about files that are not used."""
    return examine(folder, "text")[1].overlooked


def refusal(folder, **rules):
    with pytest.raises(DataError) as caught:
        names(folder, **rules)
    return str(caught.value)


@pytest.mark.parametrize("name", [*OVERLOOKED_FOLDERS, ".ipynb_checkpoints", "@EADIR"])
def test_the_pictures_in_folders_that_machines_make_are_overlooked_and_counted(data, name):
    inner = data / "deep" / name / "a.png"
    inner.mkdir(parents=True)
    (inner / "SYNOPHOTO_THUMB_M.jpg").write_bytes(b"a thumbnail of another kind")
    (data / name).mkdir()
    assert names(data) == ["a.png", "b.png", "c.png"]
    (message,) = overlooked(data)
    assert "names that machines make" in message
    assert f"2 of {'names that begin with a dot' if name[0] == '.' else name.replace('EADIR', 'eaDir')}" in message


def test_files_that_machines_make_are_overlooked_and_counted(data):
    for name in (*OVERLOOKED_FILES, "._a.png", ".DS_Store"):
        (data / name).write_bytes(b"x")
    assert names(data) == ["a.png", "b.png", "c.png"]
    (message,) = overlooked(data)
    assert "1 of Thumbs.db" in message
    assert "2 of names that begin with a dot" in message


def test_every_other_file_is_counted_with_the_reason(data):
    for name in ("x.psd", "y.PSD", "z.safetensors", "notes"):
        (data / name).write_bytes(b"x")
    (data / "rows.parquet").write_bytes(b"x")
    (data / "lone.caption").write_text("a")
    (data / "A.caption").write_text("that of a.png, in whose place a.txt counts")
    (data / "gone").symlink_to("nowhere")
    (data / "round").symlink_to("round")
    assert overlooked(data) == (
        "1 file could hold captions, e.g. rows.parquet: only metadata.jsonl, metadata.csv and metadata.json are read",
        "2 captions have no pictures of the same name, e.g. A.caption",
        "2 links point nowhere, e.g. gone",
        "4 files end in .psd .safetensors without an ending: of no use here",
    )


def test_pictures_and_captions_that_point_nowhere_are_refused_by_a_sentence_each(data):
    (data / "a.png").unlink()
    (data / "a.png").symlink_to("nowhere")
    (data / "b.txt").unlink()
    (data / "b.txt").symlink_to("b.txt")
    (data / "metadata.jsonl").symlink_to("nowhere")
    said = refusal(data)
    assert "a.png: it is a link to nothing" in said
    assert "b.txt: it is a link to nothing" in said
    assert "metadata.jsonl: it is a link to nothing" in said


def test_metadata_of_an_overlooked_picture_says_why_it_is_not_found(data):
    (data / "metadata.jsonl").write_text('{"file_name": "lost+found/x.png", "text": "x"}\n')
    assert "1 picture named in metadata that does not exist" in refusal(data)
    assert "lost+found/x.png (lost+found is never read)" in refusal(data)


def break_headers(data):
    (data / "a.png").write_bytes(b"")
    (data / "b.png").write_bytes(b"no picture")


def test_a_refusal_of_pictures_to_train_on_names_the_key_that_leaves_them_out(data):
    break_headers(data)
    said = refusal(data, may_skip=True)
    assert '2 pictures that cannot be read (repair or remove them; data.on_error = "skip" leaves out up to' in said
    assert "a.png: it is empty" in said
    assert "on_error" not in refusal(data)


def test_pictures_with_bad_headers_are_left_out_and_listed_once(data, tmp_path, caplog):
    break_headers(data)
    skipping = Skipping(folder=tmp_path / "run", most=2)
    for _ in range(2):  # a resumed run reads its data again
        assert names(data, may_skip=True, skipping=skipping) == ["c.png"]
    assert "left_out=2" in caplog.text
    lines = [json.loads(line) for line in (tmp_path / "run" / FILE).read_text().splitlines()]
    assert [(line["skipped"], line["step"], line["instead"]) for line in lines] == [
        ("a.png", None, None),
        ("b.png", None, None),
    ]
    assert lines[0]["reason"] == "it is empty"
    assert count_skipped(tmp_path / "run", 100) == 0, "no sample of a step was replaced"


def test_more_pictures_with_bad_headers_than_allowed_stop_the_run(data, tmp_path):
    break_headers(data)
    said = refusal(data, skipping=Skipping(folder=tmp_path / "run", most=1))
    assert "2 pictures cannot be decoded, more than data.max_skipped = 1" in said


def test_pictures_left_out_before_and_replaced_later_count_together(data, tmp_path):
    break_headers(data)
    skipping = Skipping(folder=tmp_path / "run", most=2)
    names(data, skipping=skipping)
    with pytest.raises(DataError, match="3 pictures cannot be decoded"):
        skipping.note(Skipped(step=1, position=0, skipped="c.png", instead="d.png", reason="x"))
    assert count_skipped(tmp_path / "run", 2) == 1
    assert len(read_skipped(tmp_path / "run")) == 3


def test_a_sample_whose_steering_picture_is_damaged_is_left_out_too(data, tmp_path):
    (data / "a.png").write_bytes(b"")
    (data / "metadata.jsonl").write_text('{"file_name": "b.png", "text": "b", "conditioning_image": "a.png"}\n')
    assert names(data, skipping=Skipping(folder=tmp_path / "run", most=9)) == ["c.png"]


def test_a_folder_of_which_nothing_is_left_is_refused(data, tmp_path):
    for path in data.glob("*.png"):
        path.write_bytes(b"")
    said = refusal(data, skipping=Skipping(folder=tmp_path / "run", most=9))
    assert "none of its pictures can be read; repair them" in said


def test_sentences_about_one_speak_of_one(data):
    assert counted(1, "pictures that do not exist") == "1 picture that does not exist"
    assert counted(1200, "pictures that do not exist") == "1,200 pictures that do not exist"
    for name in ("b", "c"):
        (data / f"{name}.png").unlink()
    (data / "metadata.jsonl").write_text('{"file_name": "a.png", "label": 1}\n')
    found = scan(data, "label")
    assert "1 picture has no caption" in problems_of_captions(found)[0]
    assert '1 picture has no "conditioning_image"' in problems_of_conditions(found)[0]
    assert "1 picture has no label below 1" in problems_of_labels(found, 1)[0]
