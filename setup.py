"""Wheels carry the examples of the checkout, for `diffusionpipe example`; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithExamples(build_py):
    """Copies examples/ to diffusionpipe/examples of the built package."""

    def run(self) -> None:
        """Build the package; an editable one reads the checkout's folder."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "diffusionpipe", "examples")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("examples", target, ignore=shutil.ignore_patterns("__pycache__", "runs"))


setup(cmdclass={"build_py": WithExamples})
