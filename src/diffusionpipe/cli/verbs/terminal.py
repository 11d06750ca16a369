"""The terminal as the place where workflows say something: lines on stderr, a bar while it lasts."""

from collections.abc import Callable

import typer


class ProgressBar:
    """A context with a function (work done, all work) that shows a bar with the time left.

    The bar is gone at the end.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("profiling"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,  # rich would leave an empty line
        )
        self._task = self._bar.add_task("profiling", total=None)

    def __enter__(self) -> Callable[[int, int], None]:
        self._bar.__enter__()
        return lambda done, total: self._bar.update(self._task, completed=done, total=total)

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()


class Terminal:
    """Shows the messages and the progress of workflows on stderr, because results go to stdout."""

    def say(self, text: str) -> None:
        """Writes the text as a line to stderr."""
        typer.echo(text, err=True)

    def progress(self) -> ProgressBar:
        """A context whose function (work done, all work) shows a bar."""
        return ProgressBar()


TERMINAL = Terminal()
