"""The import contract of pyproject.toml is kept, and it notices when it is broken."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"


def lint(folder):
    """The linter's status and report on the package in `folder`/src."""
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, 'src'); {PROGRAM}"],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return result.returncode, result.stdout + result.stderr


def copied(folder):
    """A copy of the package whose imports can be changed."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_the_contract_is_kept(tmp_path):
    status, report = lint(copied(tmp_path))
    assert status == 0, report


FORBIDDEN = [
    ("schedules/families/gpipe.py", "import torch", "never import torch"),
    ("ir/action.py", "from torch import Tensor", "never import torch"),
    ("simulator/simulate.py", "def later():\n    import torch", "never import torch"),
    (
        "planner/assembly/partition.py",
        "from diffusionpipe.models.graphs import graph",
        "Planning never imports execution",
    ),
    ("runtime/engine/executor.py", "from diffusionpipe.passes import communicate", "Execution never imports planning"),
    ("workflows/device.py", "import typer", "print nothing"),
    (
        "cli/verbs/doctor.py",
        "from diffusionpipe.trainer.launching.launch import launch",
        "The command line reaches the trainer and models through workflows",
    ),
    ("trainer/optim/ema.py", "from diffusionpipe.trainer.course import run", "The trainer, from top to bottom"),
    ("files/unlisted.py", "from diffusionpipe.ir import Plan", "The hourglass, from top to bottom"),
    ("runtime/unlisted.py", "", "The runtime, from top to bottom"),
]
"""Module, line, and the contract that it breaks."""


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """The report on a copy with all of these lines: what is said of each broken contract, by its name."""
    package = copied(tmp_path_factory.mktemp("broken"))
    for module, line, _ in FORBIDDEN:
        path = package / "src" / "diffusionpipe" / module
        path.write_text(f"{path.read_text() if path.exists() else ''}\n\n{line}\n")
    status, report = lint(package)
    assert status != 0
    _, *sections = re.split(r"^(.+)\n-+\n", report.partition("Broken contracts")[2], flags=re.MULTILINE)
    return dict(zip(sections[::2], sections[1::2], strict=True))


@pytest.mark.parametrize(("module", "line", "contract"), FORBIDDEN)
def test_a_forbidden_import_breaks_it(broken, module, line, contract):
    (said,) = [said for name, said in broken.items() if contract in name]
    name = f"diffusionpipe.{module.removesuffix('.py').replace('/', '.')}"
    assert name in said, said
