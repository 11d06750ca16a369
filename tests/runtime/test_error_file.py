import pytest
import torch

from diffusionpipe.errors import ConfigError
from diffusionpipe.runtime.error_file import note_of

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


def test_other_errors_keep_their_text():
    assert note_of(RuntimeError("boom"), "Traceback ... boom").message == "Traceback ... boom"
    assert note_of(ConfigError("training.batch: is 0")).message == "training.batch: is 0"


def test_an_interrupted_rank_leaves_one_line_and_the_status_of_the_signal() -> None:
    note = note_of(KeyboardInterrupt(), "Traceback ...\nKeyboardInterrupt\n")
    assert note.exit_code == 130
    assert len(note.message.splitlines()) == 1
    assert "Ctrl-C" in note.message
