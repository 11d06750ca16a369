"""What other packages say about things that we handle stays out of the log; all else of theirs stays in."""

import io
import logging
import warnings

import pytest
from rich.console import Console

from diffusionpipe.cli.verbs.output import ConsoleHandler, Without, log_to, quieten


@pytest.fixture(autouse=True)
def restored():
    names = ("torch._subclasses.fake_tensor", "transformers.utils.import_utils")
    before = {name: (list(logging.getLogger(name).handlers), list(logging.getLogger(name).filters)) for name in names}
    with warnings.catch_warnings():
        yield
    for name, (handlers, filters) in before.items():
        logging.getLogger(name).handlers[:], logging.getLogger(name).filters[:] = handlers, filters


@pytest.mark.parametrize(
    ("name", "noise", "genuine"),
    [
        (
            "transformers.utils.import_utils",
            "`CLIPImageProcessor` requires torchvision (not installed); falling back to `CLIPImageProcessorPil`",
            "`Foo` requires sentencepiece, which is not installed",
        ),
        (
            "torch._subclasses.fake_tensor",
            "failed while attempting to run meta for %s",
            "cache hit rate is low",
        ),
    ],
)
def test_noise_of_other_packages_is_left_out_and_their_other_messages_stay(caplog, name, noise, genuine):
    quieten()
    quieten()
    assert sum(isinstance(one, Without) for one in logging.getLogger(name).filters) == 1
    logging.getLogger(name).propagate = True
    with caplog.at_level(logging.WARNING, logger=name):
        logging.getLogger(name).addHandler(caplog.handler)
        logging.getLogger(name).error(noise, *(["aten.add"] if "%s" in noise else []))
        logging.getLogger(name).error(genuine)
        logging.getLogger(name).removeHandler(caplog.handler)
    assert {record.getMessage() for record in caplog.records} == {genuine}


def test_the_warning_about_float32_norms_is_left_out_and_other_warnings_stay():
    quieten()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", append=True)
        warnings.warn("Mismatch dtype between input and weight: input dtype = BFloat16", UserWarning, stacklevel=1)
        warnings.warn("Mismatch of something else", UserWarning, stacklevel=1)
    assert [str(one.message) for one in caught] == ["Mismatch of something else"]


def test_torch_warns_in_the_words_that_are_left_out():
    import torch

    norm = torch.nn.RMSNorm(8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        norm(torch.ones(2, 8, dtype=torch.bfloat16))
    assert all(str(one.message).startswith("Mismatch dtype between input and weight") for one in caught)


@pytest.mark.parametrize(
    ("rank", "is_terminal", "line"),
    [
        (0, False, "rank=0 step=1"),
        (0, True, "step=1"),
        (None, False, "step=1"),
        (1, True, "rank=1 step=1"),
    ],
)
def test_lines_name_their_rank_but_for_rank_0_on_a_terminal(rank, is_terminal, line):
    console = Console(file=io.StringIO(), force_terminal=is_terminal, color_system=None, width=20)
    log_to(console, rank)
    logging.getLogger("diffusionpipe.anything").warning("step=%d", 1)
    assert console.file.getvalue()[len("11:22:33 ") :] == f"{line}\n"


def test_only_rank_0_says_more_than_warnings():
    console = Console(file=io.StringIO())
    log_to(console, 1)
    logging.getLogger("diffusionpipe.anything").info("step=1")
    assert console.file.getvalue() == ""


def test_long_lines_and_brackets_are_written_as_they_are():
    console = Console(file=io.StringIO(), width=20)
    handler = ConsoleHandler(console)
    handler.emit(logging.makeLogRecord({"msg": "path=[bold]/a/long/path" * 5}))
    assert console.file.getvalue() == "path=[bold]/a/long/path" * 5 + "\n"
