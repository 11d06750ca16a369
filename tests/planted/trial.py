"""One fault in a copy of the source, and the tests that are named for it."""

import compileall
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from planted.faults import ROOT, SOURCE, Fault
from planted.witness import COPY, REPORT

ORIGINS = """
import multiprocessing, subprocess, sys
ask = f"__import__('importlib.util').util.find_spec('{sys.argv[1]}').origin"
child = subprocess.run([sys.executable, "-c", f"print({ask})"], capture_output=True, text=True)
with multiprocessing.get_context("forkserver").Pool(1) as pool:
    print(eval(ask), child.stdout.strip(), pool.apply(eval, (ask,)), sep="\\n")
"""
"""Prints from where a process, a program that it starts and a rank of its fork server import a package."""
NO_TESTS = 5
"""The exit status of pytest that ran none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the tests ended."""

    failed: tuple[str, ...]
    """The tests that failed; with a fault at most the first."""
    problem: str
    """The reason why the tests say nothing, such as a limit; else empty."""
    cpu_s: float
    """With all processes that the tests started and waited for."""

    @property
    def is_noticed(self) -> bool:
        """Whether a test failed."""
        return bool(self.failed)


@contextmanager
def compiled_copy(source: Path = SOURCE) -> Iterator[Path]:
    """A compiled copy of a folder of sources: one for all faults, so that none compiles the modules again."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder) / "whole"
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        compileall.compile_dir(copy, quiet=1)
        yield copy


@contextmanager
def planted(fault: Fault, whole: Path) -> Iterator[Path]:
    """A copy of a compiled copy with the fault; files that stay the same are links.

    Raises:
        FaultError: the fault does not fit.
    """
    text = fault.faulty(whole)
    with tempfile.TemporaryDirectory(prefix="fault-", dir=whole.parent) as folder:
        copy = Path(folder) / "src"
        shutil.copytree(whole, copy, copy_function=os.link)
        path = fault.path_in(copy)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
        path.unlink()  # a link: the copy of all faults stays as it is
        path.write_text(text, encoding="utf-8")
        yield copy


def environment_of(copy: Path) -> dict[str, str]:
    """The environment of tests that import the package of a copy: its folder comes before an editable install."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(copy), str(Path(__file__).parents[1])]),
        "PYTHONDONTWRITEBYTECODE": "",
        "OMP_NUM_THREADS": "1",
    }


def strangers(copy: Path) -> list[str]:
    """The files from which a test, or a process that it starts, imports the package that should come from the copy."""
    (package,) = (path.parent.name for path in copy.glob("*/__init__.py"))
    command = [sys.executable, "-c", ORIGINS, package]
    said = subprocess.run(command, env=environment_of(copy), capture_output=True, text=True, check=True).stdout
    return [origin for origin in said.splitlines() if not Path(origin).is_relative_to(copy)]


def run_tests(
    tests: Iterable[str], copy: Path, *, quick: bool, stop: bool, limit_s: float, root: Path = ROOT
) -> Outcome:
    """Run tests of `root` with the package of `copy`; `stop` ends them at the first failure."""
    report = copy.parent / "failed.txt"
    report.unlink(missing_ok=True)
    paths = [str(copy / test.removeprefix("src/")) if test.startswith("src/") else test for test in tests]
    command = [sys.executable, "-m", "pytest", "-p", "planted.witness", "-n", "0", "--tb=no", f"--rootdir={root}"]
    command += [
        "-c",
        str(root / "pyproject.toml"),
        *(["-x"] if stop else []),
        "-m",
        "not slow" if quick else "",
        *paths,
    ]
    environment = environment_of(copy) | {COPY: str(copy), REPORT: str(report)}
    status, cpu_s, output = _ended(command, environment, root, limit_s)
    failed = tuple(report.read_text(encoding="utf-8").splitlines()) if report.exists() else ()
    problem = ""
    if status is None:
        problem = f"no end after {limit_s:.0f} s"
    elif status == NO_TESTS:
        problem = "no test was run: is each name right, and does make test run it?"
    elif status and not failed:
        problem = f"pytest ended with {status}: {' '.join(output.strip().splitlines()[-3:])}"
    return Outcome(failed=failed, problem=problem, cpu_s=cpu_s)


def _ended(
    command: Sequence[str], environment: dict[str, str], folder: Path, limit_s: float
) -> tuple[int | None, float, str]:
    """Exit status (None: the limit ended it), CPU seconds and output of a command and its children."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            _, wait_status, used = os.wait4(process.pid, 0)
        finally:
            timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(wait_status)
        output.seek(0)
        return None if is_late.is_set() else process.returncode, _cpu_s(used), output.read()


def _cpu_s(used: resource.struct_rusage) -> float:
    return used.ru_utime + used.ru_stime


def try_fault(fault: Fault, whole: Path, *, limit_s: float, root: Path = ROOT) -> Outcome:
    """Run the tests of a fault with the fault.

    Raises:
        FaultError: the fault does not fit.
    """
    with planted(fault, whole) as copy:
        return run_tests(fault.tests, copy, quick=fault.quick, stop=True, limit_s=limit_s, root=root)


def broken_tests(faults: Sequence[Fault], whole: Path, *, limit_s: float, root: Path = ROOT) -> tuple[list[str], float]:
    """The named tests that fail, or say nothing, without any fault, and the CPU seconds that all of them take."""
    broken, cpu_s = [], 0.0
    for quick in (True, False):
        tests = list(dict.fromkeys(test for fault in faults if fault.quick == quick for test in fault.tests))
        if tests:
            outcome = run_tests(tests, whole, quick=quick, stop=False, limit_s=limit_s, root=root)
            broken += [*outcome.failed, *([outcome.problem] if outcome.problem else [])]
            cpu_s += outcome.cpu_s
    return broken, cpu_s
