"""Pictures of validation that lie in the folder of training are not trained on."""

import json

import pytest
from kit.tiny_runs import recipe_of
from PIL import Image

from diffusionpipe.errors import DataError
from diffusionpipe.trainer.data.scan.dataset import ScanRules, examine, scan


@pytest.fixture
def data(tmp_path):
    for name in ("a.png", "b/1.png", "held-out/x.png", "held-out/deep/y.png"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)
        path.with_suffix(".txt").write_text(name)
    return tmp_path / "data"


def names(folder, apart):
    return [sample.name for sample in scan(folder, "text", rules=ScanRules(apart=apart)).samples]


def test_a_folder_of_validation_within_that_of_training_is_left_out_with_one_line(data):
    assert names(data, data / "held-out") == ["a.png", "b/1.png"]
    _, found = examine(data, "text", rules=ScanRules(apart=data / "held-out"))
    assert found.overlooked == (f"2 pictures are in {data / 'held-out'}, which is used apart",)
    assert names(data / "held-out", data) == ["deep/y.png", "x.png"]


def test_training_within_validation_is_left_out_of_validation(data):
    assert names(data, data / "b") == ["a.png", "held-out/deep/y.png", "held-out/x.png"]


def test_a_link_to_the_folder_of_validation_is_left_out_too(data, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (data / "held-out").rename(elsewhere)
    (data / "linked").symlink_to(elsewhere)
    assert names(data, elsewhere) == ["a.png", "b/1.png"]
    (tmp_path / "alias").symlink_to(data / "b")
    assert names(data, tmp_path / "alias") == ["a.png", "linked/deep/y.png", "linked/x.png"]


def test_metadata_of_training_may_describe_pictures_of_validation_and_steer_by_them(data):
    lines = [
        {"file_name": "held-out/x.png", "text": "x"},
        {"file_name": "a.png", "text": "a", "conditioning_image": "held-out/deep/y.png"},
    ]
    (data / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert names(data, data / "held-out") == ["a.png", "b/1.png"]


def test_training_data_that_are_all_of_validation_are_refused_with_the_reason(data):
    for name in ("a.png", "b/1.png"):
        (data / name).unlink()
    with pytest.raises(DataError, match=r"holds no pictures.*2 pictures are used apart, in .*held-out"):
        names(data, data / "held-out")


def test_a_run_trains_without_the_pictures_of_its_validation(data, tmp_path, caplog, monkeypatch):
    from diffusionpipe.trainer.course import preparation

    class Opened:
        recipe = recipe_of(
            tmp_path, data, tmp_path / "run", data={"validation": str(data / "held-out")}, validation={"every": 1}
        )
        model = type("Model", (), {"inputs": {}})

    monkeypatch.setattr(preparation, "check_optimizer", lambda _: None)
    work = type("Work", (), {"show": lambda *_: None})()
    train, held_out = preparation._scan(Opened, work, (), [])
    assert [sample.name for sample in train.samples] == ["a.png", "b/1.png"]
    assert [sample.name for sample in held_out.samples] == ["deep/y.png", "x.png"]
    assert not caplog.messages
    same = {"data": Opened.recipe.data.model_copy(update={"validation": data})}
    Opened.recipe = Opened.recipe.model_copy(update=same)
    assert len(preparation._scan(Opened, work, (), [])[0].samples) == 4
    assert "data.validation is the folder of data.train" in caplog.text
