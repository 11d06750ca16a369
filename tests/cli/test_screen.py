import io
import logging
import re
import time

import pytest
from rich.console import Console

from diffusionpipe.cli.text.screen import ConsoleScreen, ConsoleWork
from diffusionpipe.cli.verbs.terminal import TERMINAL


def screen(**options):
    return ConsoleScreen(Console(file=io.StringIO(), force_terminal=False), **options)


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="diffusionpipe.cli.text.screen")
    return lambda: [record.getMessage() for record in caplog.records]


def wait_for(lines, count):
    deadline = time.monotonic() + 20
    while len(lines()) < count and time.monotonic() < deadline:
        time.sleep(0.005)


def test_short_work_is_not_logged(lines):
    with screen(patience=60).work("saving"):
        pass
    assert lines() == []


def test_long_work_is_logged_again_and_again_with_how_far_it_is(lines):
    with screen(patience=0.01, log_every=0.01).work("loading weights") as work:
        work.show(1, 4, {"parameters": "1B/4B"})
        wait_for(lines, 2)
    assert len(lines()) >= 2
    assert re.fullmatch(r"loading weights parameters=1B/4B elapsed_s=\d+( left_s=\d+)?", lines()[-1])
    count = len(lines())
    time.sleep(0.05)
    assert len(lines()) == count


def test_the_time_left_is_in_proportion():
    now = [0.0]
    work = ConsoleWork("loading", lambda: now[0])
    now[0] = 6.0
    assert work.line() == "loading elapsed_s=6"
    work.show(2, 3)
    assert work.line() == "loading elapsed_s=6 left_s=3"


def test_the_time_left_falls_while_nothing_new_is_done_and_is_left_out_once_it_is_over():
    """What was done in 23 s is the pace, however long the next part takes."""
    now = [0.0]
    work = ConsoleWork("measuring", lambda: now[0])
    now[0] = 23.0
    work.show(1, 30)
    lines = []
    for now[0] in (23.0, 33.0, 43.0, 700.0):
        lines.append(work.line().partition(" left_s=")[2])
    assert lines == ["667", "657", "647", ""]


def test_work_with_a_budget_is_never_said_to_last_longer():
    now = [0.0]
    work = ConsoleWork("measuring", lambda: now[0], budget=60.0)
    now[0] = 23.0
    work.show(1, 30)
    assert work.line().endswith(" left_s=37")
    now[0] = 61.0
    assert "left_s" not in work.line()


def test_ranks_that_do_not_speak_show_nothing(lines):
    console = Console(file=io.StringIO(), force_terminal=True)
    silent = ConsoleScreen(console, speaks=False, patience=0.0)
    with silent.work("loading") as work, silent.bar("training") as bar:
        work.show(1, 2)
        bar.write(1, 2, "half")
        time.sleep(0.02)
    assert console.file.getvalue() == ""
    assert lines() == []


@pytest.mark.parametrize("is_timed", [False, True])
def test_a_terminal_shows_a_bar_that_goes(lines, is_timed):
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    now = [0.0]
    shown = ConsoleScreen(console, patience=0.0, clock=lambda: now[0])
    with shown.work("measuring layers", is_timed=is_timed) as work:
        now[0] = 1.0
        work.show(3, 4, {"layer": "3/4", "batch_size": 2})
        shown._bars.refresh()
    assert "measuring layers" in console.file.getvalue()
    assert "layer 3/4, batch size 2" in console.file.getvalue()
    assert lines() == []


def test_work_within_a_bar_shares_its_display_and_leaves_it():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    shown = ConsoleScreen(console)
    with shown.bar("training") as bar:
        bar.write(3, 6, "3/6")
        with shown.work("saving"):
            shown._bars.refresh()
        assert [task.description for task in shown._bars.tasks] == ["training"]
    last = console.file.getvalue().split("training")[-1]
    assert "3/6" in last
    assert "saving" not in last


def test_progress_of_a_workflow_has_a_title_and_the_time_left_on_a_terminal_alone(monkeypatch, capsys):
    monkeypatch.setattr("diffusionpipe.cli.text.screen.REFRESH", 0.0)
    with TERMINAL.progress("reading pictures") as report:
        report(1, 4)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with TERMINAL.progress("reading pictures") as report:
        report(1, 4)
    shown = capsys.readouterr().err
    assert "reading pictures" in shown
    assert re.search(r"done 1/4, \d+ s left", shown)
