import errno
import logging

import pytest
import torch
from kit.crew import crew_of

from diffusionpipe.errors import CheckpointError
from diffusionpipe.trainer.checkpoints import manifest
from diffusionpipe.trainer.checkpoints.checkpoint import latest, problem_of_folder, save, saved_checkpoints
from diffusionpipe.trainer.course.resuming import checkpoint_of, resume_of_attempt


def write(run, *steps, keep=10):
    for step in steps:
        save(run, step, {"model.w": torch.arange(100.0) + step}, {"step": step}, keep=keep)


def damage(run, step, name="rank-0.safetensors"):
    file = run / "checkpoints" / f"step-{step:08d}" / name
    file.write_bytes(file.read_bytes()[:-10])


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_auto_starts_anew_where_there_is_nothing_and_goes_on_with_the_newest_where_there_is(tmp_path):
    assert problem_of_folder(tmp_path / "new", "auto") is None
    assert checkpoint_of(tmp_path / "new", "auto") is None
    write(tmp_path, 2, 4)
    assert problem_of_folder(tmp_path, "auto") is None
    assert checkpoint_of(tmp_path, "auto").name == "step-00000004"


@pytest.mark.parametrize("name", ["rank-0.safetensors", "manifest.json"])
def test_auto_skips_what_is_damaged_and_says_what_it_costs(tmp_path, caplog, name):
    write(tmp_path, 2, 5, 9)
    damage(tmp_path, 9, name)
    damage(tmp_path, 5, name)
    with caplog.at_level(logging.WARNING):
        assert checkpoint_of(tmp_path, "auto").name == "step-00000002"
    first, second = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "step-00000009 reason=" in first
    assert name in first
    assert "kept_as=step-00000009.damaged continues_from=step-00000002 lost_steps=7" in first
    assert "lost_steps=3" in second
    assert names(tmp_path) == ["step-00000002", "step-00000005.damaged", "step-00000009.damaged"]
    assert checkpoint_of(tmp_path, "auto").name == "step-00000002", "the next restart has nothing to skip"


def test_a_skipped_checkpoint_takes_no_place_among_those_to_keep(tmp_path):
    """One without a readable manifest counts as the latest, so it would push out what the run saves next."""
    write(tmp_path, 9)
    damage(tmp_path, 9, "manifest.json")
    assert checkpoint_of(tmp_path, "auto") is None
    write(tmp_path, 3, keep=1)
    assert latest(tmp_path).name == "step-00000003"
    write(tmp_path, 9)
    damage(tmp_path, 9)
    assert checkpoint_of(tmp_path, "auto").name == "step-00000003"
    assert names(tmp_path) == ["step-00000003", "step-00000009.damaged", "step-00000009.damaged-2"]


def test_a_checkpoint_that_may_not_be_read_is_no_damaged_one(tmp_path, monkeypatch):
    def refuse(number):
        def describe(folder, name):
            raise OSError(number, "no", name)

        monkeypatch.setattr(manifest, "_describe", describe)

    write(tmp_path, 2)
    refuse(errno.EACCES)
    with pytest.raises(CheckpointError, match="PermissionError"):
        checkpoint_of(tmp_path, "auto")
    assert names(tmp_path) == ["step-00000002"]
    refuse(errno.EIO)
    assert checkpoint_of(tmp_path, "auto") is None


def test_a_named_checkpoint_is_verified_before_anything_else_and_never_replaced(tmp_path):
    write(tmp_path, 2, 4)
    damage(tmp_path, 4)
    with pytest.raises(CheckpointError, match=r"step-00000004 is damaged.*\n.*--resume 2"):
        checkpoint_of(tmp_path, "latest")
    assert checkpoint_of(tmp_path, "2").name == "step-00000002"
    assert len(saved_checkpoints(tmp_path)) == 2


def test_two_ranks_agree_on_the_checkpoint(tmp_path):
    write(tmp_path, 2, 4)
    damage(tmp_path, 4)
    with crew_of(2) as crew:
        found = crew.run(find, tmp_path)
    assert [path.name for path in found] == ["step-00000002"] * 2


def find(job, run):
    return checkpoint_of(run, "auto")


@pytest.mark.parametrize(
    ("resume", "attempt", "expected"), [(None, 0, None), (None, 1, "auto"), ("latest", 1, "latest"), ("5", 2, "5")]
)
def test_a_restart_of_torchrun_implies_auto_unless_a_checkpoint_is_named(resume, attempt, expected):
    assert resume_of_attempt(resume, attempt) == expected
