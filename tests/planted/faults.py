"""Known faults as data: a text of one module, the text in its place, and the tests that must notice it."""

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "faults"
ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"


class FaultError(Exception):
    """A fault that does not fit the source of today."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One change of one module that makes it wrong."""

    module: str
    """The dotted name: it survives a move if the names of modules are rewritten. A script of the page: its path."""
    wrong: str
    old: str
    """Whole lines, or a part of a line, that the module has exactly once."""
    new: str
    tests: tuple[str, ...]
    """Files or node ids, from the root of the repository; those in src are doctests."""
    quick: bool = True
    """`make test` notices it: slow tests are left out."""
    drawn: bool = False
    """`draw.py` has drawn it."""
    unnoticed: str = ""
    """The reason why no test has to notice it."""

    def path_in(self, source: Path) -> Path:
        """The module's file in a folder of sources."""
        if "/" in self.module:
            return source / self.module
        path = source.joinpath(*self.module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def applied_to(self, text: str) -> str:
        """The module's text with the fault.

        Raises:
            FaultError: the old text is there never or several times, or is the new text.
        """
        count = text.count(self.old)
        if count != 1:
            where = "is not" if count == 0 else f"is {count} times"
            raise FaultError(f"{self.module}: the old text {where} in the module, write it anew: {self.old.strip()!r}")
        if self.old == self.new:
            raise FaultError(f"{self.module}: the new text is the old one: {self.old.strip()!r}")
        return text.replace(self.old, self.new)

    def faulty(self, source: Path) -> str:
        """The text of the module in `source` with the fault.

        Raises:
            FaultError: there is no such module, or the old text is not there exactly once.
        """
        path = self.path_in(source)
        if not path.is_file():
            raise FaultError(f"{self.module}: there is no such module; write its present name")
        return self.applied_to(path.read_text(encoding="utf-8"))


def faults_of(path: Path) -> Iterator[Fault]:
    """The faults of one file; a table `thrown_away` of drawn faults that change no behaviour is not among them."""
    for table in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]:
        yield Fault(**{**table, "tests": tuple(table["tests"])})


def all_faults(folder: Path = FOLDER) -> list[Fault]:
    """The faults of all files in their order."""
    return [fault for path in sorted(folder.glob("*.toml")) for fault in faults_of(path)]


def misfits(faults: Iterable[Fault], source: Path, root: Path = ROOT) -> list[str]:
    """One sentence for each fault that does not fit the source, or names a test file that does not exist."""
    found = []
    for fault in faults:
        try:
            text = fault.faulty(source)
            if fault.path_in(source).suffix == ".py":
                compile(text, fault.module, "exec")
        except (FaultError, SyntaxError) as error:
            found.append(str(error) if isinstance(error, FaultError) else f"{fault.module}: {error}: {fault.new!r}")
        found += [f"{fault.module}: no test is called {test}" for test in fault.tests if not _exists(test, root)]
    return found


def _exists(test: str, root: Path) -> bool:
    """Whether the file of a test is there, and the function that a node id names."""
    file, _, node = test.partition("::")
    path, name = root / file, node.partition("[")[0].rpartition("::")[2]
    return path.is_file() and (
        not name or re.search(rf"(def|class) {name}\b", path.read_text(encoding="utf-8")) is not None
    )
