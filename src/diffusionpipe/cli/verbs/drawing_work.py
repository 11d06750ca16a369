"""The progress of drawing on a terminal or in a log."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusionpipe.trainer.inference.cascade_drawing import OnStep


@contextmanager
def drawing_work(rank: int | None = None) -> "Iterator[OnStep]":
    """A function of the denoising steps done and of all of them, which rank 0 and a process without a rank (None) show.

    A bar on a terminal, gone at the end; elsewhere a line of the log now and then.
    """
    from rich.console import Console

    from diffusionpipe.cli.verbs.output import log_to
    from diffusionpipe.trainer.reporting.screen import Screen, steps_of

    screen = Screen(Console(stderr=True), speaks=not rank)
    log_to(screen.console, rank)
    with screen.work("drawing") as work:
        yield steps_of(work)
