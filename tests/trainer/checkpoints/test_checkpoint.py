import errno
import importlib.util
import json
import logging
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from kit.forked import Forked
from kit.full_disk import REASONS, full_disk

from diffusionpipe.errors import CheckpointError
from diffusionpipe.runtime.job.shared_file_system import check_shared_file_system
from diffusionpipe.trainer.checkpoints import checkpoint
from diffusionpipe.trainer.checkpoints.checkpoint import (
    clean,
    latest,
    load,
    read,
    resolve,
    save,
    saved_checkpoints,
    verify,
)
from diffusionpipe.trainer.checkpoints.tensor_files import stored_tensors

SCRIPT = Path(__file__).with_name("checkpoint_ranks.py")
SPEC = importlib.util.spec_from_file_location("checkpoint_ranks", SCRIPT)
ranks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(ranks)


def run_ranks(scenario, folder, size):
    """What each rank saw, None for one that died."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [[str(SCRIPT), scenario, str(folder), str(rank), str(size)] for rank in range(size)]
    scripts = [f"import runpy, sys; sys.argv = {words}; runpy.run_path(sys.argv[0], run_name='__main__')"
               for words in arguments]  # fmt: skip
    for process in [Forked(script, environment) for script in scripts]:
        process.wait(timeout=120)
        process.close()
    found = [folder / f"{scenario}-{rank}.json" for rank in range(size)]
    return [json.loads(path.read_text()) if path.exists() else None for path in found]


@pytest.fixture(scope="module")
def after_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_ranks("save_on_two", folder, 2)


def small(step):
    return {"model.w": torch.arange(100.0) + step, "model.n": torch.tensor(step)}


def write(run, *steps, keep=10):
    for step in steps:
        path = save(run, step, small(step), {"step": step}, keep=keep)
    return path


def content(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


# Several ranks.


@pytest.mark.parametrize("case", ["no space on rank 1", "real limit on rank 1", "no space for the manifest"])
def test_a_rank_that_cannot_write_fails_all_ranks_and_the_message_names_the_last_good_checkpoint(after_two, case):
    _, seen = after_two
    assert seen[0][case] == seen[1][case]
    assert "could not be written" in seen[0][case]
    assert ("rank 0:" if "manifest" in case else "rank 1:") in seen[0][case]
    assert "step-00000003" in seen[0][case]


def test_failed_saves_leave_exactly_the_kept_checkpoints(after_two):
    _, seen = after_two
    assert seen[0]["folders after failures"] == ["step-00000002", "step-00000003"]


def test_two_ranks_that_mean_different_tensors_by_one_name_are_refused(after_two):
    assert "shared is" in after_two[1][0]["unequal replicas"]


def test_a_folder_that_ranks_do_not_share_is_found_at_the_start(after_two):
    _, seen = after_two
    assert [rank["shared folder"] for rank in seen] == [None, None]
    assert all("ranks 1" in rank["folder of each rank"] for rank in seen)
    assert seen[0]["left in the folder"] == []


def test_what_two_ranks_saved_loads_exactly_on_one(after_two):
    folder, _ = after_two
    wanted = ranks.whole(3)
    found = {name: torch.full_like(tensor, -1) for name, tensor in wanted.items()}
    path = folder / "run" / "checkpoints" / "step-00000003"
    assert read(path, found) == {"step": 3}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_both_ranks_write_and_a_replica_is_written_once(after_two):
    path = after_two[0] / "run" / "checkpoints" / "step-00000003"
    assert {"rank-0.safetensors", "rank-1.safetensors"} <= content(path).keys()
    assert stored_tensors(path).keys() == ranks.whole(3).keys()


def test_a_checkpoint_to_which_a_rank_gives_nothing_can_be_read(after_two):
    path = after_two[0] / "lone" / "checkpoints" / "step-00000001"
    verify(path)
    wanted = ranks.whole(1)
    found = {name: torch.full_like(tensor, -1) for name, tensor in wanted.items()}
    assert read(path, found) == {"step": 1}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.fixture(scope="module")
def after_three(after_two, tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    shutil.copytree(after_two[0] / "run", folder / "run")
    return run_ranks("load_on_three", folder, 3)


def test_what_two_ranks_saved_loads_exactly_on_three(after_three):
    assert [rank["step"] for rank in after_three] == [3, 3, 3]
    assert all(rank["equal"] for rank in after_three)


def test_a_name_missing_for_one_rank_stops_all_ranks(after_three):
    assert all("rank 2: step-00000003 has no tensors model.new.weight" in rank["missing"] for rank in after_three)


def test_a_flipped_bit_stops_all_ranks_before_anything_is_loaded(after_three):
    assert len({rank["flipped"] for rank in after_three}) == 1
    assert "rank-1.safetensors was altered" in after_three[0]["flipped"]
    assert "step-00000002" in after_three[0]["flipped"]
    assert all(rank["untouched"] for rank in after_three)


def test_a_rank_that_dies_leaves_no_checkpoint_and_its_peer_an_error_of_the_transport(tmp_path):
    seen = run_ranks("die_while_saving", tmp_path, 2)
    assert seen[1] is None
    assert seen[0]["error"] not in (None, "CheckpointError")
    assert latest(tmp_path / "run") is None
    assert clean(tmp_path / "run") == (".step-00000009.writing",)
    assert os.listdir(tmp_path / "run" / "checkpoints") == []


# One process.


def test_one_process_saves_and_loads_without_a_process_group_or_a_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = write(tmp_path, 7)
        found = {name: torch.zeros_like(tensor) for name, tensor in small(7).items()}
        assert load(path, found) == {"step": 7}
    assert all(torch.equal(found[name], tensor) for name, tensor in small(7).items())


def test_the_last_k_are_kept(tmp_path):
    write(tmp_path, 1, 2, 3, 4, keep=2)
    assert [path.name for path in saved_checkpoints(tmp_path)] == ["step-00000003", "step-00000004"]


def test_after_a_return_to_an_earlier_step_the_newly_written_checkpoint_is_the_latest_and_survives(tmp_path):
    write(tmp_path, 10, 20, 30)
    path = write(tmp_path, 15, keep=2)
    assert latest(tmp_path) == path
    assert [p.name for p in saved_checkpoints(tmp_path)] == ["step-00000030", "step-00000015"]


def test_saving_a_step_again_replaces_it(tmp_path):
    write(tmp_path, 5)
    save(tmp_path, 5, {"model.w": torch.ones(2)}, {"step": 5, "second": True}, keep=2)
    found = {"model.w": torch.zeros(2)}
    assert load(resolve(tmp_path, 5), found) == {"step": 5, "second": True}
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000005"]


def test_a_full_disk_keeps_the_bytes_of_the_last_good_checkpoint(tmp_path, monkeypatch):
    good = write(tmp_path, 1)
    before = content(good)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "describe_files", full)
    with pytest.raises(CheckpointError, match=r"step 2 could not be written: OSError.*No space left") as caught:
        write(tmp_path, 2, keep=1)
    assert str(good) in str(caught.value)
    assert content(good) == before
    assert os.listdir(good.parent) == [good.name]


def test_a_disk_that_fills_while_tensors_are_written_is_named(tmp_path):
    tensors = {"model.w": torch.zeros(20_000)}
    with (
        full_disk(tmp_path, free=16384) as folder,
        pytest.raises(CheckpointError, match=rf"step 2 could not be written: .*({REASONS})"),
    ):
        save(folder, 2, tensors, {"step": 2}, keep=1)


def test_a_failing_rename_puts_the_replaced_checkpoint_back(tmp_path, monkeypatch):
    good = write(tmp_path, 1)
    before = content(good)
    rename = Path.rename

    def failing(self, target):
        if self.name.endswith(".writing"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError):
        write(tmp_path, 1)
    assert content(good) == before


def test_leftovers_of_interrupted_saves_are_removed_and_a_replaced_checkpoint_returns(tmp_path, caplog):
    good = write(tmp_path, 1)
    good.rename(good.with_name(f".{good.name}.replaced"))
    (good.parent / ".step-00000002.writing").mkdir()
    (good.parent / ".step-00000002.writing" / "rank-0.safetensors").write_bytes(b"half")
    with caplog.at_level(logging.WARNING):
        assert len(clean(tmp_path)) == 2
    assert os.listdir(good.parent) == [good.name]
    verify(good)


def test_an_empty_run_needs_no_cleaning(tmp_path):
    assert clean(tmp_path) == ()


def damage_by_cutting(path):
    path.write_bytes(path.read_bytes()[:-1])


def damage_by_a_flipped_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def damage_by_removal(path):
    path.unlink()


@pytest.mark.parametrize("name", ["rank-0.safetensors", "tensors.json", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", [damage_by_cutting, damage_by_a_flipped_bit, damage_by_removal])
def test_a_damaged_file_is_named_and_the_previous_good_checkpoint_offered(tmp_path, name, damage):
    write(tmp_path, 1, 2, 3, 4)
    (tmp_path / "checkpoints" / "step-00000003" / "rank-0.safetensors").unlink()
    bad = resolve(tmp_path, "latest")
    assert bad.name == "step-00000004"
    if name == "manifest.json":
        damage = damage_by_removal if damage is damage_by_removal else lambda path: path.write_text("{")
    damage(bad / name)
    with pytest.raises(CheckpointError) as caught:
        load(bad, small(0))
    assert name in str(caught.value)
    assert "step-00000002; resume with --resume 2" in str(caught.value)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        verify(bad)


def test_a_damaged_first_checkpoint_has_no_earlier_one_to_offer(tmp_path):
    damage_by_cutting(write(tmp_path, 1) / "state.json")
    with pytest.raises(CheckpointError, match="no earlier good one"):
        verify(resolve(tmp_path, 1))


def test_missing_names_other_shapes_and_other_types_are_listed(tmp_path):
    path = write(tmp_path, 1)
    wrong = {"model.w": torch.zeros(3), "model.n": torch.tensor(1.0), "model.x": torch.zeros(1)}
    with pytest.raises(CheckpointError) as caught:
        load(path, wrong)
    message = str(caught.value)
    assert "no tensors model.x" in message
    assert "model.w is ((100,), torch.float32) in step-00000001, but ((3,)" in message
    assert "model.n is ((), torch.int64)" in message


@pytest.mark.parametrize("name", ["rank-9.safetensors", ".hidden", "notes"])
def test_a_file_that_the_manifest_does_not_list_is_refused_by_name(tmp_path, name):
    write(tmp_path, 1, 2)
    path = resolve(tmp_path, "latest")
    (path / name).mkdir() if name == "notes" else (path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=f"'{name}' is not in manifest.json") as caught:
        load(path, small(0))
    assert "resume with --resume 1" in str(caught.value)


def test_a_file_whose_record_was_taken_out_of_the_manifest_is_refused(tmp_path):
    path = write(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"] = [record for record in manifest["files"] if record["name"] != "rank-0.safetensors"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"'rank-0.safetensors' is not in manifest.json"):
        verify(path)


def manifest_to_an_endless_link(path):
    path.unlink()
    path.symlink_to("/dev/zero")
    return "is not a regular file"


def manifest_to_a_pipe(path):
    path.unlink()
    os.mkfifo(path)
    return "is not a regular file"


def manifest_to_a_folder(path):
    path.unlink()
    path.mkdir()
    return "Is a directory"


def manifest_of_a_huge_size(path):
    os.truncate(path, 2**40)
    return "more than 268,435,456 bytes"


def manifest_of_a_deep_list(path):
    path.write_text("[" * 100_000)
    return "nested too deeply"


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "change",
    [
        manifest_to_an_endless_link,
        manifest_to_a_pipe,
        manifest_to_a_folder,
        manifest_of_a_huge_size,
        manifest_of_a_deep_list,
    ],
)
def test_a_manifest_that_cannot_be_read_or_never_ends_is_refused(tmp_path, change):
    path = write(tmp_path, 1)
    problem = change(path / "manifest.json")
    with pytest.raises(CheckpointError, match=f"manifest.json of step-00000001 cannot be read: .*{problem}"):
        verify(path)


@pytest.mark.parametrize("name", ["../1", "/etc/passwd", "", ".", "a/b", 3, None])
def test_a_manifest_names_files_of_its_folder_alone(tmp_path, name):
    path = write(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][0]["name"] = name
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"is not the name of a file of the checkpoint|values of other types"):
        verify(path)


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path):
    path = write(tmp_path, 1)
    (path / "rank-0.safetensors").unlink()
    os.mkfifo(path / "rank-0.safetensors")
    with pytest.raises(CheckpointError, match=r"rank-0.safetensors: it is not a regular file"):
        verify(path)


# Which one is meant.


@pytest.mark.parametrize("wanted", ["latest", 2, "2", "00000002"])
def test_a_checkpoint_is_found_by_word_and_by_step(tmp_path, wanted):
    path = write(tmp_path, 1, 2)
    assert resolve(tmp_path, wanted) == path


def test_a_checkpoint_is_found_by_the_path_to_it_to_its_run_and_to_the_folder_between(tmp_path):
    path = write(tmp_path / "run", 1, 2)
    for wanted in (path, path.parent, path.parent.parent, str(path)):
        assert resolve(tmp_path / "other", wanted) == path


def test_what_is_there_is_listed_if_the_wanted_checkpoint_is_not(tmp_path):
    run, other = tmp_path / "run", tmp_path / "pictures"
    write(run, 1, 2)
    other.mkdir()
    (other / "cat.png").touch()
    cases = {
        3: "no checkpoint of step 3; .*step-00000001, step-00000002",
        str(run / "nowhere"): "does not exist; .*step-00000001, step-00000002",
        str(other / "cat.png"): "is a file",
        str(other): "has no checkpoint; .*contains cat.png",
    }
    for wanted, message in cases.items():
        with pytest.raises(CheckpointError, match=message):
            resolve(run, wanted)
    with pytest.raises(CheckpointError, match=r"contains cat\.png"):
        resolve(other, "latest")
    with pytest.raises(CheckpointError, match="is not a folder"):
        resolve(tmp_path / "nothing", "latest")


def test_one_process_shares_every_folder_that_it_can_write(tmp_path):
    check_shared_file_system(tmp_path / "run")
    assert os.listdir(tmp_path / "run") == []
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write into"):
        check_shared_file_system(tmp_path / "file")
