import subprocess
import sys

import pytest
from PIL import Image

from diffusionpipe.trainer.data.scan.captions import Description, read_caption, read_metadata
from diffusionpipe.trainer.data.scan.names import sidecars_of


def test_names_are_relative_to_the_folder_of_their_metadata(tmp_path):
    (tmp_path / "cats").mkdir()
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "./dogs/1.png", "text": "a dog", "other": 1}\n\n')
    (tmp_path / "cats/metadata.jsonl").write_text('{"file_name": "1.png", "label": 3}')
    metadata = read_metadata(tmp_path, ["cats/metadata.jsonl", "metadata.jsonl"])
    assert metadata.descriptions == {"cats/1.png": Description(label=3), "dogs/1.png": Description(text="a dog")}
    assert metadata.problems == ()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"file_name": "b.png",}', "not JSON"),
        ('["b.png"]', "expected an object"),
        ('{"text": "a"}', "file_name is missing"),
        ('{"file_name": "b.png", "text": 7}', "text is 7; expected a string"),
        ('{"file_name": "b.png", "label": true}', "label is true; expected a whole number"),
        ('{"file_name": "b.png", "label": -1}', "label is -1"),
        ('{"file_name": "b.png", "conditioning_image": 3}', "conditioning_image is 3; expected the name"),
        ('{"file_name": "./a.png"}', "a.png is described twice"),
    ],
)
def test_a_bad_line_is_reported_with_its_number_and_the_others_are_kept(tmp_path, line, problem):
    (tmp_path / "metadata.jsonl").write_text(f'{{"file_name": "a.png"}}\n{line}\n{{"file_name": "c.png"}}\n')
    metadata = read_metadata(tmp_path, ["metadata.jsonl"])
    assert sorted(metadata.descriptions) == ["a.png", "c.png"]
    assert len(metadata.problems) == 1
    assert metadata.problems[0].startswith("metadata.jsonl line 2: ")
    assert problem in metadata.problems[0]


def test_line_separators_inside_a_caption_do_not_break_the_line(tmp_path):
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "one\u2028two"}\n', encoding="utf-8")
    assert read_metadata(tmp_path, ["metadata.jsonl"]).descriptions["a.png"].text == "one\u2028two"


def test_a_sidecar_is_read_without_the_spaces_around_it(tmp_path):
    (tmp_path / "a.b.txt").write_text(" a seven \n")
    assert read_caption(tmp_path / "a.b.txt") == "a seven"
    assert sidecars_of(["a.b.png", "other.png"], ["a.b.txt"]) == {"a.b.png": "a.b.txt"}
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="decode"):
        read_caption(tmp_path / "bad.txt")


def test_a_csv_describes_pictures_as_the_lines_of_json_do(tmp_path):
    text = '\ufefffile_name,text,label,other\r\n"1.png","a dog, asleep",,x\r\n2.png,"two\nlines",3,\r\n3.png,,,\r\n'
    (tmp_path / "metadata.csv").write_text(text, encoding="utf-8", newline="")
    metadata = read_metadata(tmp_path, ["metadata.csv"])
    assert not metadata.problems
    assert metadata.descriptions == {
        "1.png": Description(text="a dog, asleep"),
        "2.png": Description(text="two\nlines", label=3),
        "3.png": Description(),
    }


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("b.png,a dog, asleep", "line 3: more cells than columns; put a text with commas between quotes"),
        (",a dog", "line 3: file_name is missing"),
        ("a.png,again", "line 3: a.png is described twice; keep one of the lines"),
        ('b.png,"a dog', "line 3: not CSV: unexpected end of data"),
    ],
)
def test_a_bad_row_of_a_csv_is_reported_with_its_line(tmp_path, row, problem):
    (tmp_path / "metadata.csv").write_text(f"file_name,text\na.png,a cat\n{row}", encoding="utf-8")
    metadata = read_metadata(tmp_path, ["metadata.csv"])
    assert list(metadata.descriptions) == ["a.png"]
    assert [found for found in metadata.problems if problem in found]


def test_a_label_in_a_csv_is_a_whole_number(tmp_path):
    (tmp_path / "metadata.csv").write_text("file_name,label\na.png,owl\n", encoding="utf-8")
    assert read_metadata(tmp_path, ["metadata.csv"]).problems == (
        'metadata.csv line 2: label is "owl"; expected a whole number from 0',
    )


MEASURED = """
import resource, sys
from pathlib import Path
from diffusionpipe.trainer.data.scan.dataset import examine
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    examine(Path(sys.argv[1]), "text")
except Exception as error:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
    print(error)
"""


@pytest.mark.slow
def test_a_million_lines_of_metadata_that_are_no_use_are_one_short_error_in_bounded_memory(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    lines = (f'{{"file_name": "{number:07}.png", "text": "a caption, {number}"}}\n' for number in range(1_000_000))
    (tmp_path / "metadata.jsonl").write_text("".join(lines))
    command = [sys.executable, "-c", MEASURED, str(tmp_path)]
    peak, *said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert int(peak) < 800 * 2**20
    assert len(said) < 20
    assert "cannot be trained on" in said[0]
