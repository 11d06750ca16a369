"""Names that were written on another system find their pictures, and captions are found in every usual place."""

import json
from unicodedata import normalize

import pytest
from PIL import Image

from diffusionpipe.errors import DataError
from diffusionpipe.trainer.data.scan.dataset import scan
from diffusionpipe.trainer.data.scan.names import Names, sidecars_of

NAMES = {form: normalize(form, "vögel/blaumeise-é.png") for form in ("NFC", "NFD")}


def picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4)).save(path)


def metadata(folder, *rows, name="metadata.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def texts(folder, need="text"):
    return {sample.name: sample.text for sample in scan(folder, need).samples}


def refusal(folder):
    with pytest.raises(DataError) as caught:
        scan(folder, "text")
    return str(caught.value)


@pytest.mark.parametrize(("stored", "written"), [("NFC", "NFD"), ("NFD", "NFC"), ("NFD", "NFD")])
def test_names_with_accents_match_in_both_forms(tmp_path, stored, written):
    picture(tmp_path / NAMES[stored])
    picture(tmp_path / "edge.png")
    line = {"file_name": NAMES[written], "text": "a bird"}
    metadata(tmp_path, line, {"file_name": "edge.png", "text": "e", "conditioning_image": NAMES[written]})
    assert texts(tmp_path)["edge.png"] == "e"
    metadata(tmp_path, line, {"file_name": "edge.png", "text": "e"})
    assert texts(tmp_path) == {NAMES[stored]: "a bird", "edge.png": "e"}


@pytest.mark.parametrize(("stored", "written"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_captions_beside_pictures_match_in_both_forms(tmp_path, stored, written):
    picture(tmp_path / normalize(stored, "é.png"))
    (tmp_path / normalize(written, "é.txt")).write_text("a bird")
    assert texts(tmp_path) == {normalize(stored, "é.png"): "a bird"}


def test_a_picture_with_the_exact_name_comes_first_and_two_others_are_not_guessed():
    both = Names(NAMES.values())
    assert [both.find(name) for name in NAMES.values()] == list(NAMES.values())
    mixed = "vo\u0308gel/blaumeise-é.png"
    assert both.find(mixed) == mixed


def test_a_picture_that_is_described_in_both_forms_is_refused(tmp_path):
    picture(tmp_path / NAMES["NFC"])
    metadata(tmp_path, *({"file_name": name, "text": "x"} for name in NAMES.values()))
    assert "is described twice, under names that mean the same" in refusal(tmp_path)


def test_backslashes_of_windows_are_slashes_unless_a_file_has_them(tmp_path):
    for name in ("owls/1.png", "owls/b/2.png", "odd\\3.png"):
        picture(tmp_path / name)
    metadata(
        tmp_path,
        {"file_name": ".\\owls\\1.png", "text": "1", "conditioning_image": "owls\\b\\2.png"},
        {"file_name": "odd\\3.png", "text": "3"},
    )
    assert texts(tmp_path) == {"owls/1.png": "1", "odd\\3.png": "3"}


def test_a_name_with_other_capital_letters_is_explained(tmp_path):
    picture(tmp_path / "owls/One.PNG")
    (tmp_path / "owls/One.txt").write_text("x")
    metadata(tmp_path, {"file_name": "OWLS\\one.png", "text": "x"})
    assert "OWLS\\one.png (the folder has owls/One.PNG)" in refusal(tmp_path)


def test_captions_in_capital_letters_and_of_other_trainers_are_read(tmp_path):
    for name in ("a.PNG", "b.png", "c.png", "d.png"):
        picture(tmp_path / name)
    for name in ("a.TXT", "b.caption", "c.CAPTION", "d.txt", "d.caption"):
        (tmp_path / name).write_text(name)
    found = {"a.PNG": "a.TXT", "b.png": "b.caption", "c.png": "c.CAPTION", "d.png": "d.txt"}
    assert texts(tmp_path) == found
    assert sidecars_of(["x.png"], ["x.TXT", "x.txt", "x.caption"]) == {"x.png": "x.txt"}


@pytest.mark.parametrize(
    "content",
    [
        [{"file_name": "a.png", "text": "one"}, {"file_name": "b\\c.png", "text": "two", "label": 2}],
        {"a.png": "one", "b/c.png": "two"},
        {"a.png": {"text": "one"}, "b/c.png": {"text": "two"}},
    ],
)
def test_a_simple_metadata_json_is_read(tmp_path, content):
    picture(tmp_path / "a.png")
    picture(tmp_path / "b/c.png")
    (tmp_path / "metadata.json").write_text(json.dumps(content))
    assert texts(tmp_path) == {"a.png": "one", "b/c.png": "two"}


def test_a_metadata_json_says_only_what_nothing_else_says(tmp_path):
    for name in ("a.png", "b.png", "c.png"):
        picture(tmp_path / name)
    (tmp_path / "metadata.json").write_text(json.dumps({"a.png": "weak", "b.png": "weak", "c.png": "weak"}))
    metadata(tmp_path, {"file_name": "a.png", "text": "strong"})
    (tmp_path / "b.txt").write_text("strong")
    assert texts(tmp_path) == {"a.png": "strong", "b.png": "strong", "c.png": "weak"}


def test_what_is_wrong_in_a_metadata_json_is_named(tmp_path):
    picture(tmp_path / "a.png")
    (tmp_path / "metadata.json").write_text(json.dumps([{"file_name": "a.png", "text": 3}, {"file_name": "x.png"}]))
    said = refusal(tmp_path)
    assert "metadata.json entry 1: text is 3; expected a string" in said
    assert "    x.png" in said


@pytest.mark.parametrize("content", ['{"name": "birds", "version": 1}', "[1, 2]", "[]", "{", "[" * 100_000])
def test_a_metadata_json_that_says_something_else_is_told_to_the_log(tmp_path, caplog, content):
    picture(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "metadata.json").write_text(content)
    assert texts(tmp_path) == {"a.png": "a"}
    (message,) = caplog.messages
    assert "left_out=metadata.json" in message
    assert 'remedy="write metadata.jsonl"' in message


def test_missing_captions_name_the_files_that_could_hold_them(tmp_path):
    picture(tmp_path / "a.png")
    for name in ("data.parquet", "captions.tsv"):
        (tmp_path / name).touch()
    said = refusal(tmp_path)
    assert "(captions.tsv and 1 more is not read: write its rows into metadata.jsonl)" in said
