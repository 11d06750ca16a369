"""A screen that a listener hears: the watchdog learns of work, also on ranks that show nothing."""

import io
from contextlib import contextmanager
from functools import partial
from itertools import count

import pytest
from kit.screen_files import masked
from rich.console import Console

from diffusionpipe.cli.text.screen import ConsoleScreen
from diffusionpipe.trainer.reporting.screen import Heard, NoScreen, steps_of


class Listener:
    def __init__(self):
        self.heard = []

    @contextmanager
    def phase(self, name):
        self.heard.append(f"begin {name}")
        yield
        self.heard.append(f"end {name}")

    def advance(self):
        self.heard.append("advance")


def console(is_terminal):
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=90)
    return ConsoleScreen(console, clock=partial(next, count(1.0)))


@pytest.mark.parametrize("screen", [NoScreen(), console(True), console(False)], ids=["none", "terminal", "pipe"])
def test_a_listener_hears_the_same_of_work_whoever_shows_it_and_nothing_of_bars(screen):
    listener = Listener()
    heard = Heard(screen, listener)
    assert heard.columns == screen.columns
    with heard.bar("training") as bar:
        bar.write(1, 2, "half")
        with heard.work("drawing", is_timed=True) as work:
            steps_of(work)(1, 4)
            work.write(1, 4, "")
    assert listener.heard == ["begin drawing", "advance", "end drawing"]


def test_a_heard_screen_draws_what_the_screen_draws():
    shown, heard = console(True), console(True)
    for screen in (shown, Heard(heard, Listener())):
        with screen.work("drawing", is_timed=True) as work:
            work.show(3, 4, {"step": "3/4"})
    assert "step 3/4" in heard.console.file.getvalue()
    texts = [masked(one.console.file.getvalue(), {r"0:00:\d\d": "#"}) for one in (heard, shown)]
    assert texts[0] == texts[1]


def test_only_a_terminal_has_columns():
    assert (console(True).columns, console(False).columns, NoScreen().columns) == (90, None, None)
    assert ConsoleScreen(Console(force_terminal=True), speaks=False).columns is None
