"""The messages of a workflow while it works: a caller with a screen hands it in; silent by default."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Progress = Callable[[int, int], None]
"""Told (work done, all work)."""


class Telling(Protocol):
    """A place for the words of a workflow."""

    def say(self, text: str) -> None:
        """Show a line beside the results."""

    def progress(self) -> AbstractContextManager[Progress]:
        """Show a bar while the block runs."""


class Silence:
    """Says nothing."""

    def say(self, text: str) -> None:
        """Show nothing."""

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Show no bar."""
        yield lambda done, total: None


SILENCE = Silence()
