"""Prints the least versions that pyproject.toml allows, as pip's constraints: `make oldest`.

torch is that of constraints.txt, because a CPU build of the least one is not to be had everywhere; so are the tools of
the extra dev, which nobody needs to train.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
NEWEST = ("torch",)
"""Packages whose least version is not tried."""
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9_-]+)>=(?P<least>[0-9.]+)(,.*)?")


def least_versions() -> dict[str, str]:
    """The least version of each package that users get, by its name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(line for name, lines in extras.items() if name != "dev" for line in lines)]
    return dict(_least(line) for line in asked)


def _least(line: str) -> tuple[str, str]:
    found = _REQUIREMENT.fullmatch(line)
    assert found is not None, f"pyproject.toml: {line} does not state a least version"
    return found["name"], found["least"]


def constraints() -> Iterator[str]:
    """Lines for pip: least versions, and those of constraints.txt for torch and the tools."""
    least = least_versions()
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tools = {re.split(r"[>=\[<]", line)[0] for line in project["optional-dependencies"]["dev"]} | {*NEWEST}
    yield from (line for line in pinned if line.partition("==")[0] in tools)
    yield from (f"{name}=={version}" for name, version in least.items() if name not in NEWEST)


if __name__ == "__main__":
    sys.stdout.write("\n".join(constraints()) + "\n")
