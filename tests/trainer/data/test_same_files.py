"""Ranks whose folders differ are refused before a run, with the file named."""

import shutil
import tarfile
from dataclasses import replace

import pytest
from kit.tiny_runs import save_pictures

from diffusionpipe.errors import DataError
from diffusionpipe.trainer.data.scan import same_files
from diffusionpipe.trainer.data.scan.dataset import Condition, scan
from diffusionpipe.trainer.data.scan.same_files import agree_on_files
from diffusionpipe.trainer.data.scan.scanning import examine_place


@pytest.fixture
def folder(tmp_path):
    return save_pictures(tmp_path / "data", 6)


def of_rank(job, dataset, folders):
    """The refusal of a rank, whose data lie in a folder of its own."""
    try:
        agree_on_files(replace(dataset, folder=folders[job.membership.rank]))
    except DataError as error:
        return str(error)
    return "agreed"


@pytest.mark.slow
def test_ranks_with_another_picture_or_without_one_stop_with_the_file_named(folder, tmp_path, crew):
    dataset = scan(folder, Condition.TEXT)
    other = shutil.copytree(folder, tmp_path / "other")
    assert crew.run(of_rank, dataset, (folder, other)) == ["agreed"] * 2
    (other / "004.png").write_bytes((other / "004.png").read_bytes() + b"x")
    first, second = crew.run(of_rank, dataset, (folder, other))
    size = (folder / "004.png").stat().st_size
    assert f"004.png has {size:,} bytes on rank 0 and has {size + 1:,} bytes on rank 1; give all" in first
    assert first.rpartition("/")[2] == second.rpartition("/")[2]
    (other / "002.png").unlink()
    assert (
        f"002.png has {size:,} bytes on rank 0 and is missing on rank 1"
        in crew.run(of_rank, dataset, (folder, other))[0]
    )


def test_shards_are_compared_and_at_most_256_pictures(folder, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(same_files, "agree", lambda action: told.append(action()) or [told[-1]])
    dataset = scan(folder, Condition.TEXT)
    agree_on_files(replace(dataset, samples=dataset.samples * 100))
    assert len(told[0].split()) == 200
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        tar.add(folder / "000.png", "a.png")
    agree_on_files(examine_place(tmp_path / "s.tar", Condition.NOTHING)[0])
    assert told[1] == str((tmp_path / "s.tar").stat().st_size)
