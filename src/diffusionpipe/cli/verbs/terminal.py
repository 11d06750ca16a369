"""The terminal as the place where workflows say something: lines on stderr, a bar while it lasts."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from diffusionpipe.workflows.telling import Progress


class Terminal:
    """Shows the messages and the progress of workflows on stderr, because results go to stdout."""

    def say(self, text: str) -> None:
        """Writes the text as a line to stderr."""
        typer.echo(text, err=True)

    @contextmanager
    def progress(self, title: str, *, is_timed: bool = True) -> Iterator[Progress]:
        """A context whose function (work done, all work) shows a bar on a terminal, and nothing elsewhere."""
        from rich.console import Console

        from diffusionpipe.cli.text.screen import ConsoleScreen

        console = Console(stderr=True)
        with ConsoleScreen(console, speaks=console.is_terminal).work(title, is_timed=is_timed) as work:
            yield lambda done, total: work.show(done, total, {"done": f"{done}/{total}"})


TERMINAL = Terminal()
