import errno
import os

import pytest
import torch
from kit.full_disk import full_disk

from diffusionpipe.errors import ConfigError
from diffusionpipe.runtime.machine.error_file import note_of, read_error_file, write_error_file

REFUSED = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError(f"{REFUSED} 737280 bytes.\nmore"), f"out of memory ({REFUSED} 737280 bytes.).\n"),
        (MemoryError(), "out of memory (MemoryError)."),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), "Tried to allocate 2 GiB."),
    ],
)
def test_a_rank_without_memory_says_so_and_what_would_help_instead_of_a_traceback(error, says):
    note = note_of(error, "Traceback ...")
    assert says in note.message
    assert "pipeline.stages" in note.message
    assert "Traceback" not in note.message
    assert note.exit_code == 1


def test_a_thread_that_finds_no_memory_is_a_shortage_and_the_message_names_the_other_limit():
    message = note_of(RuntimeError("can't start new thread"), "Traceback ...").message
    assert message.startswith("out of memory (can't start new thread).\n")
    assert "ulimit -u" in message
    assert "Traceback" not in message


def test_other_errors_keep_their_text():
    assert note_of(RuntimeError("boom"), "Traceback ... boom").message == "Traceback ... boom"
    assert note_of(ConfigError("training.batch: is 0")).message == "training.batch: is 0"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_cannot_be_written_is_one_line_with_the_file_and_not_a_traceback(number):
    note = note_of(OSError(number, os.strerror(number), "runs/x/metrics.jsonl"), "Traceback ...")
    assert note.message.startswith(f"cannot write runs/x/metrics.jsonl: {os.strerror(number)}; ")
    assert "\n" not in note.message
    assert note.exit_code == 2


@pytest.mark.parametrize("number", [errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG])
def test_something_in_the_way_is_one_line_with_its_place_and_not_a_traceback(number):
    note = note_of(OSError(number, os.strerror(number), "runs/x/samples" + "x" * 1000), "Traceback ...")
    assert note.message.startswith("cannot use runs/x/samplesxxx")
    assert f": {os.strerror(number)}; " in note.message
    assert len(note.message) < 450
    assert note.exit_code == 2


def test_another_error_of_the_operating_system_keeps_its_traceback():
    assert note_of(OSError(errno.EBADF, "bad"), "Traceback ...").message == "Traceback ..."


def test_a_note_comes_back_and_a_full_disk_leaves_no_half_of_one(tmp_path):
    note = note_of(ConfigError("x" * 5000))
    assert write_error_file(tmp_path / "rank_0.error.json", note)
    assert read_error_file(tmp_path / "rank_0.error.json") == note
    (tmp_path / "rank_0.error.json").unlink()
    with full_disk(tmp_path) as folder:
        assert not write_error_file(folder / "rank_0.error.json", note)
        assert not [path for path in folder.iterdir() if "error" in path.name]


def test_an_interrupted_rank_leaves_one_line_and_the_status_of_the_signal() -> None:
    note = note_of(KeyboardInterrupt(), "Traceback ...\nKeyboardInterrupt\n")
    assert note.exit_code == 130
    assert len(note.message.splitlines()) == 1
    assert "Ctrl-C" in note.message
