"""The files of a run's data: what the run began with stays, and what is new enters at the next epoch, if it may."""

import json

import pytest
from PIL import Image

from diffusionpipe.errors import CheckpointError, DataError
from diffusionpipe.trainer.course.preparation import _in_order
from diffusionpipe.trainer.data.scan.data_files import (
    FILE,
    Continuation,
    DataFiles,
    Generation,
    continued,
    first_ledger,
    read_ledger,
    write_ledger,
)
from diffusionpipe.trainer.data.scan.dataset import examine
from diffusionpipe.trainer.data.survey import Folder

OLD = {name: f"{number:016x}" for number, name in enumerate(("a.png", "b.png", "c.png"))}
NEW = {"a0.png": "f" * 16, "z.png": "e" * 16}


def at(position, *, may_grow=True):
    return Continuation(position=position, may_grow=may_grow, noun="pictures")


def grown(ledger, files, position, **rules):
    return continued(ledger, files, list(files), at(position, **rules))


def refusal(files, position=4, **rules):
    with pytest.raises(CheckpointError) as caught:
        grown(first_ledger(OLD), files, position, **rules)
    return str(caught.value)


@pytest.mark.parametrize("position", [0, 1, 3, 7])
def test_the_same_files_go_on(position):
    assert grown(first_ledger(OLD), OLD, position, may_grow=False) == first_ledger(OLD)


@pytest.mark.parametrize(("position", "since"), [(0, 0), (1, 3), (3, 3), (4, 6), (6, 6)])
def test_new_files_enter_with_the_next_epoch(position, since):
    found = grown(first_ledger(OLD), OLD | NEW, position)
    assert found.generations == (Generation(since=0, files=OLD), Generation(since=since, files=NEW))
    assert grown(found, OLD | NEW, position, may_grow=False) == found, "they were allowed once"


def test_new_files_are_refused_by_the_key_that_allows_them():
    said = refusal(OLD | NEW, may_grow=False)
    assert said.startswith("data.train is not the data of this run: 2 pictures are new, e.g. a0.png.\n")
    assert "Set data.allow_growth = true, so that new ones enter at the next epoch, or start a new run in" in said


def test_files_that_are_gone_or_different_are_refused_whether_or_not_the_data_may_grow():
    files = {"b.png": "d" * 16, "c.png": OLD["c.png"], **NEW}
    for may_grow in (True, False):
        said = refusal(files, may_grow=may_grow)
        assert "1 picture is gone, e.g. a.png" in said
        assert "1 picture or caption is different, e.g. b.png" in said
        assert "2 pictures are new" in said
        assert "Restore them as they were and set data.allow_growth = true" in said
    assert "allow_growth" not in refusal({name: OLD[name] for name in ("a.png", "b.png")})


def test_what_has_been_announced_but_has_not_entered_may_change_or_go():
    first = grown(first_ledger(OLD), OLD | NEW, 4)
    left = {**OLD, "z.png": "1" * 16}
    found = grown(first, left, 5, may_grow=False)
    assert found.generations[1:] == (Generation(since=6, files={"z.png": "1" * 16}),)
    assert grown(first, OLD, 5, may_grow=False) == first_ledger(OLD)
    with pytest.raises(CheckpointError, match=r"1 picture is gone, e\.g\. a0\.png"):
        grown(first, left, 7)


def test_data_may_grow_again_also_after_a_return_to_an_earlier_step():
    first = grown(first_ledger(OLD), OLD | NEW, 7)  # from 9 on
    again = grown(first, OLD | NEW | {"y.png": "0" * 16}, 1)
    assert [one.since for one in again.generations] == [0, 9, 3]
    later = grown(again, OLD | NEW | {"y.png": "0" * 16, "x.png": "2" * 16}, 12)
    # epochs: 0 to 3 with 3 pictures, 3 to 7 and 7 to 11 with 4, 11 to 17 with 6
    assert later.generations[-1] == Generation(since=17, files={"x.png": "2" * 16})


def test_a_ledger_comes_back_from_its_file(tmp_path):
    assert read_ledger(tmp_path) is None
    ledger = DataFiles(generations=(Generation(since=0, files={"a\udcff.png": "1"}), Generation(since=4, files=NEW)))
    write_ledger(tmp_path, ledger)
    assert read_ledger(tmp_path) == ledger


@pytest.mark.parametrize(
    "wrong", ["", "{}", "[]", '{"generations": 3}', '{"generations": [{"since": -1, "files": {}}]}', "[" * 10_000]
)
def test_a_file_that_is_no_ledger_is_refused_by_name(tmp_path, wrong):
    (tmp_path / FILE).write_text(wrong)
    with pytest.raises(DataError, match=r"data\.json cannot be read: .*restore it, or start a new run"):
        read_ledger(tmp_path)


def test_a_ledger_is_readable_json(tmp_path):
    write_ledger(tmp_path, first_ledger(OLD))
    assert json.loads((tmp_path / FILE).read_text()) == {"generations": [{"since": 0, "files": OLD}]}


def test_new_pictures_are_numbered_behind_the_others_with_their_sizes(tmp_path):
    def save(name, side):
        Image.new("RGB", (side, side)).save(tmp_path / name)
        (tmp_path / name).with_suffix(".txt").write_text(name)

    save("b.png", 3)
    save("d.png", 4)
    before = first_ledger(examine(tmp_path, "text")[1].files)
    save("a.png", 5)
    save("c.png", 6)
    scanned = Folder(*examine(tmp_path, "text"))
    ledger = grown(before, scanned.findings.files, 3)
    found = _in_order(scanned, ledger)
    assert [sample.name for sample in found.dataset.samples] == ["b.png", "d.png", "a.png", "c.png"]
    assert [size[0] for size in found.findings.sizes] == [3, 4, 5, 6]
    assert found.dataset.growth == ((4, 2),)
    (tmp_path / "b.txt").write_text("another caption")
    with pytest.raises(CheckpointError, match=r"1 picture or caption is different, e\.g\. b\.png"):
        grown(before, examine(tmp_path, "text")[1].files, 3)
