"""CPU seconds of tests, with all processes that they start: on a shared machine the clock on the wall says little.

Processes that a test starts count when it has waited for them, ranks of the fork server (crew.py) while they live too.
Where there is no /proc, ranks count when the fork server ends: as seconds of the run, not of a test.
"""

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Generator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

SHOWN = 20
"""Tests and files that the end of a run names."""

_TICKS = os.sysconf("SC_CLK_TCK")


class CpuSeconds:
    """A plugin of pytest: what each test takes, summed over the workers of pytest-xdist."""

    def __init__(self) -> None:
        self._at_last_report = 0.0
        self._of_workers = 0.0
        self._tests: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._at_last_report = self._at_last_report or seconds_of_tree()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = seconds_of_tree()
        report.cpu_seconds = max(0.0, now - self._at_last_report)  # type: ignore[attr-defined] # travels to the controller
        self._at_last_report = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tests[report.nodeid.partition("@")[0]] += getattr(report, "cpu_seconds", 0.0)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        stop_fork_server()
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["cpu_seconds"] = seconds_of_tree()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._of_workers += getattr(node, "workeroutput", {}).get("cpu_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._tests:
            return
        total = time.process_time() + (self._of_workers or seconds_of_tree() - time.process_time())
        terminalreporter.section(f"{total:.0f} CPU seconds, {sum(self._tests.values()):.0f} of them in tests")
        files: Counter[str] = Counter()
        for name, seconds in self._tests.items():
            files[name.partition("::")[0]] += seconds
        for heading, found in (("dearest tests", self._tests), ("dearest files", files)):
            terminalreporter.write_line(heading)
            for name, seconds in found.most_common(SHOWN):
                terminalreporter.write_line(f"{seconds:8.2f} s  {name}")
        if (table := os.environ.get("CPU_SECONDS")) is not None:
            lines = (f"{seconds:.3f}\t{name}\n" for name, seconds in self._tests.most_common())
            Path(table).write_text("".join(lines), encoding="utf-8")


def seconds_of_tree() -> float:
    """CPU seconds so far of this process, of the fork server and of what both have started."""
    own = os.times()
    living = [child.pid for child in multiprocessing.active_children()]
    if (server := _fork_server_process()) is not None and server not in living:
        living.append(server)
    return time.process_time() + own.children_user + own.children_system + sum(map(_seconds_of, living))


def stop_fork_server() -> None:
    """Ends the server and waits for it, so that what it and its ranks have taken counts as this process's."""
    if _fork_server_process() is not None:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _fork_server_process() -> int | None:
    process: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return process


def _seconds_of(process: int | None) -> float:
    """Of a process and of those of its children for which it has waited."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS
