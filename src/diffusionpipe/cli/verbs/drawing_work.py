"""The progress of drawing on a terminal or in a log."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusionpipe.workflows.telling import Progress


@contextmanager
def drawing_work(rank: int | None = None) -> "Iterator[Progress]":
    """A context with a function (denoising steps done, all steps) that shows them: a bar on a terminal, else lines.

    Only rank 0 and a process without a rank (None) show them. The bar is gone at the end.
    """
    from rich.console import Console

    from diffusionpipe.cli.text.screen import ConsoleScreen
    from diffusionpipe.cli.verbs.output import log_to

    screen = ConsoleScreen(Console(stderr=True), speaks=not rank)
    log_to(screen.console, rank)
    with screen.work("drawing") as work:
        yield lambda done, total: work.show(done, total, {"step": f"{done}/{total}"})
