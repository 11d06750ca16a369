"""The terminal as the place where workflows say something: lines on stderr, a bar while it lasts."""

from collections.abc import Callable

import typer


class ProgressBar:
    """A bar with the time left, as a function (work done, all work); gone at the end."""

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
    """`workflows.telling.Telling` of a command: results go to stdout, so this goes to stderr."""

    def say(self, text: str) -> None:
        """Show a line."""
        typer.echo(text, err=True)

    def progress(self) -> ProgressBar:
        """Show a bar while the block runs."""
        return ProgressBar()


TERMINAL = Terminal()
