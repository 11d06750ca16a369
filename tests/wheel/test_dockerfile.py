"""The image is made of lines that a shell can run, and the wheel's trial reads the same project."""

import importlib.util
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def trial():
    spec = importlib.util.spec_from_file_location("wheel_trial", Path(__file__).with_name("__main__.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_line_of_the_image_that_runs_is_one_line():
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    runs = [line for line in lines if line.startswith("RUN ")]
    assert runs, "make wheel-test runs these lines"
    assert not [line for line in runs if line.endswith("\\")]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = re.findall(r"\.\[([a-z,]+)\]", " ".join(runs))
    assert named
    assert set(",".join(named).split(",")) <= set(extras)


def test_an_extra_that_does_not_import_fails_the_trial(monkeypatch, capsys):
    wheel = trial()
    monkeypatch.setitem(wheel.MODULES, "peft", "no_such_module")
    monkeypatch.setattr(wheel, "_is_installed", lambda checkout: None)
    assert wheel.main(ROOT) == 1
    assert "FAILED: each package of an extra imports: No module named 'no_such_module'" in capsys.readouterr().out
