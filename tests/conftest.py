"""Marks as slow what slow_tests.txt lists, keeps tests with shared fixtures in one process, and times no example."""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from kit.cpu_seconds import CpuSeconds
from kit.kept_results import results_kept
from kit.signals import hear_all_signals

if TYPE_CHECKING:
    from kit.crew import Crew

# The first runs with the source of the commit that it records, the second warms up the fork server of `make torture`.
collect_ignore = ["golden/record.py", "torture/warm.py"]

# Examples are not timed: the machine that runs the tests is shared. They are the same in each run, so that a change is
# judged by itself; `make explore` draws others, and 600 of them.
settings.register_profile("same", deadline=None, max_examples=20, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=600)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

LIST = Path(__file__).parent / "slow_tests.txt"
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
"""As the launcher gives it to ranks: no stack traces of c10d."""
SIGNS = ("", "!", "*", "+")
"""How a line of it begins; see there."""


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault(LOG_LEVEL, "FATAL")  # torch reads it at its import, and ranks are forked later
    config.pluginmanager.register(CpuSeconds())
    keeping = results_kept()  # before xdist starts its workers, and they their ranks
    keeping.__enter__()
    config.add_cleanup(lambda: keeping.__exit__(None, None, None))
    hear_all_signals()


@pytest.hookimpl(tryfirst=True)  # before tests are left out by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lines = [line.strip() for line in LIST.read_text(encoding="utf-8").splitlines()]
    listed = {sign: names_with(sign, lines) for sign in SIGNS}
    for item in items:
        kinds = [sign for sign in SIGNS if item.nodeid.startswith(listed[sign])]
        is_slow = ("" in kinds or "*" in kinds) and "!" not in kinds
        if is_slow:
            item.add_marker(pytest.mark.slow)
        if is_slow and "*" in kinds and "+" not in kinds:
            item.add_marker(pytest.mark.night)
        is_shared = has_shared_fixtures(item.path) or "crew" in getattr(item, "fixturenames", ())
        if is_shared and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    if config.args_source is not pytest.Config.ArgsSource.ARGS:  # all tests are collected
        names = [item.nodeid for item in items]
        every = [line for one in listed.values() for line in one]
        if unknown := [line for line in every if not any(name.startswith(line) for name in names)]:
            raise pytest.UsageError(f"{LIST.name} names tests that do not exist: {', '.join(unknown)}")


def names_with(sign: str, lines: list[str]) -> tuple[str, ...]:
    """The names, or beginnings of names, of the lines that begin with a sign; "" for those without one."""
    ours = [line for line in lines if line and (line[0] == sign if sign else line[0] not in "#!*+")]
    return tuple(line.removeprefix(sign).strip() for line in ours)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # torch and the tests themselves are no garbage: looking at them again and again takes 7 % of the time
    gc.set_threshold(50_000, 50, 100)  # and at young objects of models another 4 %
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    os.environ.pop(LOG_LEVEL, None)  # launchers have to set it for their ranks
    if session.config.getvalue("loadgroup"):
        apart = [item for item in session.items if item.get_closest_marker("xdist_group") and "@" not in item.nodeid]
        if apart:  # pytest 9.2 has a name that pytest-xdist 3.8 cannot change
            raise pytest.UsageError("this pytest ignores groups of pytest-xdist; install what constraints.txt names")
    if "torch" not in sys.modules:
        return  # none of these tests has ranks
    from kit.crew import fork_server_of_this_process, start_fork_server

    if sys.platform == "linux":
        fork_server_of_this_process()  # all is imported, and no test has computed
    else:
        start_fork_server()  # before a test starts it with fewer imports


@pytest.fixture(autouse=True)
def untouched_log() -> "Iterator[None]":
    """The logger as it is after an import: the command line gives it a level and a handler, which would stay.

    A test that leaves the log of the whole process off fails: a later one would find no message.
    """
    package = logging.getLogger("diffusionpipe")
    package.handlers.clear()
    package.setLevel(logging.NOTSET)
    off = logging.root.manager.disable
    yield
    left, logging.root.manager.disable = logging.root.manager.disable, off
    assert left == off, f"logging.disable({left}) is still in force"


@pytest.fixture(scope="module")
def crew() -> "Iterator[Crew]":
    """Two ranks, the same for all tests of a file."""
    from kit.crew import crew_of

    with crew_of(2) as ranks:
        yield ranks


@pytest.fixture
def forked_ranks() -> "Iterator[None]":
    """Ranks that the launcher starts in this process begin with all imports done."""
    from kit.nursery import nursery_here

    with nursery_here():
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """This process computes with one thread, as the ranks of a crew do, so that the bits are equal."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_trace() -> Iterator[None]:
    """Models that are alike are traced and described once, see cuts.py and descriptions.py."""
    from unittest import mock

    from kit.cuts import traced_once
    from kit.descriptions import described

    from diffusionpipe.trainer.model import members

    with traced_once(), mock.patch.object(members, "describe", described):
        yield


@cache
def has_shared_fixtures(path: Path) -> bool:
    """Whether a file makes something once for all of its tests, which each process would make again."""
    return path.suffix == ".py" and 'scope="module"' in path.read_text(encoding="utf-8")
