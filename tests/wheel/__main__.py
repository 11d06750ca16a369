"""Tries an installed wheel in an empty folder, without the checkout.

    cd $(mktemp -d) && ENVIRONMENT/bin/python -P CHECKOUT/tests/wheel/__main__.py CHECKOUT

Prints a line for each thing that works; the first one that does not ends it with the status 1.
"""

import doctest
import importlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

MODULES = {
    "av": "av",
    "bitsandbytes": "bitsandbytes",
    "mlxtend": "mlxtend",
    "ortools": "ortools.sat.python.cp_model",
    "peft": "peft",
    "prodigyopt": "prodigyopt",
    "pytorch-optimizer": "pytorch_optimizer",
    "schedulefree": "schedulefree",
    "scikit-learn": "sklearn",
    "tensorboard": "tensorboard",
}
"""The module of each package of an extra whose name is not the package's own."""
SHORT = ("training.steps=3", "training.batch=8", "learning_rate.warmup_steps=0", "data.validation=none",
         "validation.every=none", "sampling.every=none", "checkpoint.every=3")  # fmt: skip


def main(checkout: Path) -> int:
    """The exit status."""
    steps: Sequence[tuple[str, Callable[[], object]]] = (
        ("the package lies outside the checkout", lambda: _is_installed(checkout)),
        ("each package of an extra imports", lambda: _extras(checkout)),
        ("the doctests of the door hold", _doctests),
        ("a schedule is drawn", lambda: _said("33.33%", "schedule", "1f1b", "--ranks", "3", "--microbatches", "4")),
        ("a shipped model is planned", lambda: _run("plan", "--model", "sd-1.5", "--cluster", "rtx4090x2",
                                                    "--batch", "16", "--out", "plan.json")),
        ("the plan is shown", lambda: _said("bubble", "plan", "show", "plan.json")),
        ("a report of it is written", lambda: _report("plan.json")),
        ("an example is written", lambda: _run("example", "digits")),
        ("its data are made", lambda: _call(sys.executable, "examples/digits/dataset.py", "--out", "runs/digits-data")),
        ("two ranks train", lambda: _run("train", "examples/digits/recipe.toml", "--ranks", "2", *SHORT)),
        ("a picture is drawn", lambda: _run("sample", "runs/digits", "--prompt", "the digit 3", "--steps", "2")),
    )  # fmt: skip
    for name, step in steps:
        try:
            step()
        except (AssertionError, ImportError, subprocess.CalledProcessError) as error:
            output = getattr(error, "output", None)
            print(f"FAILED: {name}: {error}", output or "", sep="\n")
            return 1
        print(f"ok: {name}", flush=True)
    return 0


def _call(*words: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        words,
        env=environment,
        check=True,
        text=True,
        encoding="utf-8",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.stdout


def _run(*words: str) -> str:
    return _call(str(Path(sys.executable).with_name("diffusionpipe")), *words)


def _said(text: str, *words: str) -> None:
    output = _run(*words)
    assert text in output, f"{text!r} is not in its output: {output}"


def _report(plan: str) -> None:
    _run("report", plan, "--out", "report.html")
    page = Path("report.html").read_text(encoding="utf-8")
    assert "<script" in page, "the page has no timeline"


def _is_installed(checkout: Path) -> None:
    import diffusionpipe

    place = Path(str(diffusionpipe.__file__)).resolve()
    assert not place.is_relative_to(checkout / "src"), place
    assert not Path("examples").exists()


def _extras(checkout: Path) -> None:
    extras = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    for extra, packages in extras.items():
        for requirement in packages if extra != "dev" else ():
            name = requirement.partition(">")[0].partition("[")[0].strip()
            importlib.import_module(MODULES.get(name, name.replace("-", "_")))


def _doctests() -> None:
    import diffusionpipe as dp

    tried = 0
    for name in sorted(
        {str(getattr(dp, one).__module__) for one in dp.__all__ if hasattr(getattr(dp, one), "__module__")}
    ):
        found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
        assert not found.failed, f"{found.failed} of {found.attempted} doctests of {name} fail"
        tried += found.attempted
    assert tried, "the door has no doctests"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
