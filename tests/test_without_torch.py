"""The planning half plans on machines without torch, and so do its tests: they are found in a second or two."""

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
PLANNING = re.search(r"tests/,(.*)\)", (TESTS.parent / "Makefile").read_text(encoding="utf-8"))[1].split()
"""The folders of `make test-planning`."""
HEAVY = ("torch", "diffusers", "transformers")
COLLECTION = """
import sys, pytest
status = pytest.main(["--collect-only", "-qq", "-p", "no:terminalreporter", *sys.argv[1:]])
print(int(status), *({HEAVY} & sys.modules.keys()))
"""


def collected(*paths, environment=None):
    """The status of a collection in a process of its own, and what that process has then imported."""
    script = COLLECTION.replace("{HEAVY}", repr(set(HEAVY)))
    words = [sys.executable, "-c", script, *map(str, paths)]
    # A worker's variables would make it a worker of the run that it is a test of.
    own = {name: value for name, value in (environment or os.environ).items() if not name.startswith("PYTEST_")}
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=TESTS.parent, env=own)
    return done.stdout.splitlines()[-1].split()


def test_collecting_the_planning_half_imports_no_torch():
    assert {"ir", "planner", "viz"} < set(PLANNING)
    assert collected(*(TESTS / folder for folder in PLANNING)) == ["0"]


def test_a_test_that_imports_torch_is_noticed(tmp_path):
    (tmp_path / "torch.py").touch()  # of this name, but loaded at once
    (tmp_path / "test_planted.py").write_text("import torch\n\n\ndef test_nothing():\n    pass\n")
    found = collected(tmp_path / "test_planted.py", environment=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert found == ["0", "torch"]
