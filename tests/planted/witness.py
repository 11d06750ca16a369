"""A plugin of pytest: writes which test failed first, and refuses a package that is not the copy with the fault."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

REPORT = "PLANTED_REPORT"
"""The environment variable with the file for the failed test."""
COPY = "PLANTED_COPY"
"""The environment variable with the folder that the package must come from."""


def pytest_sessionstart(session: pytest.Session) -> None:
    copy = Path(os.environ[COPY])
    for package in (path.parent.name for path in copy.glob("*/__init__.py")):
        spec = find_spec(package)
        if spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(copy):
            raise pytest.UsageError(f"{package} is imported from {spec and spec.origin}, not from the copy {copy}")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(f"{report.nodeid} (cannot be imported)")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _write(report.nodeid)


def _write(name: str) -> None:
    with Path(os.environ[REPORT]).open("a", encoding="utf-8") as file:
        file.write(f"{name}\n")
