import json

import pytest
from PIL import Image

from diffusionpipe.errors import DataError
from diffusionpipe.trainer.data.scan.dataset import Sample, examine, scan


def picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), "red").save(path)


def metadata(folder, *rows):
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def message(folder, need="text", **options):
    with pytest.raises(DataError) as caught:
        scan(folder, need, **options)
    return str(caught.value)


def test_metadata_and_sidecars_are_read_in_all_folders_and_sorted_by_name(tmp_path):
    for name in ("b.png", "a/1.JPG", "a/2.webp", "c.bmp", "d.jpeg", ".hidden.png", ".cache/x.png", "._b.png"):
        picture(tmp_path / name)
    metadata(tmp_path, {"file_name": "b.png", "text": "b"}, {"file_name": "a/1.JPG", "text": "one", "label": 1})
    metadata(tmp_path / "a", {"file_name": "2.webp", "text": "two"})
    (tmp_path / "c.txt").write_text("c\n")
    (tmp_path / "d.txt").write_text("")
    (tmp_path / "b.txt").write_text("the metadata wins")
    assert scan(tmp_path, "text").samples == (
        Sample(name="a/1.JPG", text="one", label=1),
        Sample(name="a/2.webp", text="two"),
        Sample(name="b.png", text="b"),
        Sample(name="c.bmp", text="c"),
        Sample(name="d.jpeg", text=""),
    )


def test_labels_need_no_text_and_text_no_label(tmp_path):
    picture(tmp_path / "a.png")
    metadata(tmp_path, {"file_name": "a.png", "label": 0})
    assert scan(tmp_path, "label").samples == (Sample(name="a.png", label=0),)
    assert "1 picture without a caption" in message(tmp_path, "text")


def test_pictures_and_clips_of_other_kinds_are_counted_in_one_sentence(tmp_path):
    for name in ("a.png", "b.gif", "c/d.TIFF", "e.gif"):
        picture(tmp_path / name)
    (tmp_path / "f.mp4").touch()
    (tmp_path / "a.txt").write_text("a")
    dataset, found = examine(tmp_path, "text")
    assert [sample.name for sample in dataset.samples] == ["a.png"]
    assert found.overlooked == (
        "4 files end in .gif .mp4 .tiff: convert them, e.g. to .png; clips are read with data.frames",
    )
    (tmp_path / "a.png").unlink()
    assert "holds no pictures; expected files ending in .jpg" in message(tmp_path)
    assert "4 files end in .gif .mp4 .tiff, not read" in message(tmp_path)


def test_a_folder_that_is_missing_or_without_pictures_is_named(tmp_path):
    assert f"{tmp_path / 'x'}: no such folder" in message(tmp_path / "x")
    (tmp_path / "notes.txt").write_text("hello")
    assert f"{tmp_path}: holds no pictures; expected files ending in .jpg" in message(tmp_path)


def test_every_kind_of_problem_is_reported_at_once_by_name(tmp_path):
    for name in ("good.png", "bare.png", "odd.png"):
        picture(tmp_path / name)
    (tmp_path / "broken.png").write_text("no picture")
    (tmp_path / "odd.txt").write_bytes(b"\xff")
    metadata(tmp_path, {"file_name": "good.png", "text": "x"}, {"file_name": "gone.png", "text": "x"}, {"text": "x"})
    with (tmp_path / "metadata.jsonl").open("a") as file:
        file.write('{"file_name": "broken.png", "text": "x"}\n')
    text = message(tmp_path)
    for part in (
        "1 line of metadata that cannot be used:\n    metadata.jsonl line 3: file_name is missing",
        "1 picture named in metadata that does not exist",
        "    gone.png",
        "1 caption that cannot be read:\n    odd.txt:",
        "1 picture without a caption",
        "    bare.png",
        "1 picture that cannot be read:\n    broken.png: UnidentifiedImageError",
    ):
        assert part in text
    assert "good.png" not in text


def test_headers_are_left_to_another_rank_when_asked(tmp_path):
    (tmp_path / "a.png").write_text("no picture")
    (tmp_path / "a.txt").write_text("a")
    assert len(scan(tmp_path, "text", check_headers=False).samples) == 1


def test_an_error_names_ten_examples_and_counts_the_rest(tmp_path):
    for number in range(13):
        picture(tmp_path / f"{number:02d}.png")
    lines = message(tmp_path).splitlines()
    assert lines[1].startswith("  13 pictures without a caption")
    assert lines[2:] == [f"    {number:02d}.png" for number in range(10)] + ["    and 3 more"]


def test_a_picture_that_steers_belongs_to_its_sample_and_is_none_itself(tmp_path):
    for name in ("a/1.png", "a/edges/1.png", "b.png"):
        picture(tmp_path / name)
    metadata(tmp_path / "a", {"file_name": "1.png", "text": "one", "conditioning_image": "edges/1.png"})
    metadata(tmp_path, {"file_name": "b.png", "text": "b"})
    assert scan(tmp_path, "text").samples == (
        Sample(name="a/1.png", text="one", condition="a/edges/1.png"),
        Sample(name="b.png", text="b"),
    )


def test_a_picture_that_steers_and_is_steered_is_a_sample_too(tmp_path):
    for name in ("a.png", "b.png", "edges.png"):
        picture(tmp_path / name)
    steered = {"a": "a", "b": "a"}  # one by itself
    lines = [{"file_name": f"{k}.png", "text": k, "conditioning_image": f"{v}.png"} for k, v in steered.items()]
    metadata(tmp_path, *lines, {"file_name": "edges.png", "text": "edges"})
    assert [(sample.name, sample.condition) for sample in scan(tmp_path, "text").samples] == [
        ("a.png", "a.png"),
        ("b.png", "a.png"),
        ("edges.png", None),
    ]


def test_a_picture_that_steers_must_exist_and_be_readable(tmp_path):
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    metadata(
        tmp_path,
        {"file_name": "a.png", "text": "a", "conditioning_image": "gone.png"},
        {"file_name": "b.png", "text": "b", "conditioning_image": "broken.png"},
    )
    said = message(tmp_path)
    assert "does not exist" in said
    assert "gone.png" in said
    assert "broken.png: UnidentifiedImageError" in said
