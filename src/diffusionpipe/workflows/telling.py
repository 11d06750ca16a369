"""The messages of a workflow while it works: a caller with a screen hands it in; silent by default."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Progress = Callable[[int, int], None]
"""A function that is called with (work done, all work)."""


class Telling(Protocol):
    """Shows the words and progress of a workflow to its user."""

    def say(self, text: str) -> None:
        """Show a line of text beside the results."""

    def progress(self, title: str, *, is_timed: bool = True) -> AbstractContextManager[Progress]:
        """A context that shows its block as work of this title; it gives a function to call with the progress.

        `is_timed`: the block may measure times, so nothing is drawn beside it but at these calls.
        """


class Silence:
    """A `Telling` that shows nothing."""

    def say(self, text: str) -> None:
        """Ignore the text."""

    @contextmanager
    def progress(self, title: str, *, is_timed: bool = True) -> Iterator[Progress]:
        """Give a function that does nothing with the progress, and show no bar."""
        yield lambda done, total: None


SILENCE = Silence()
