import io
import logging

import pytest
from kit.screen_files import assert_screen, masked
from kit.terminal import last_state
from rich.console import Console

from diffusionpipe.cli.text.screen import ConsoleScreen
from diffusionpipe.trainer.reporting.progress import TrainingProgress
from diffusionpipe.trainer.reporting.screen import steps_of


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def run(clock, *, step_s=1.0, num_steps=25, first_step=0, console=None):
    console = console or Console(file=io.StringIO(), force_terminal=False)
    with TrainingProgress(
        num_steps=num_steps, batch=8, first_step=first_step, log_every=10, screen=ConsoleScreen(console), clock=clock
    ) as progress:
        for step in range(first_step, num_steps):
            clock.now += step_s
            progress.update(step, {"loss": 0.03123, "grad_norm": 1.5})
    return console.file


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="diffusionpipe.trainer.reporting.progress")
    return lambda: [record.getMessage() for record in caplog.records]


def test_without_a_terminal_there_is_a_line_at_the_first_step_every_ten_seconds_and_at_the_end(lines):
    run(Clock())
    assert [line.split()[0] for line in lines()] == ["step=1", "step=11", "step=21", "step=25"]


def test_a_line_gives_values_rate_and_time_left(lines):
    run(Clock())
    assert lines()[0] == "step=1 steps=25 loss=0.03123 grad_norm=1.5"
    assert lines()[1] == "step=11 steps=25 loss=0.03123 grad_norm=1.5 mean_samples_per_s=8 left_s=14"


def test_a_resumed_run_counts_from_where_it_begins(lines):
    run(Clock(), first_step=23)
    assert [line.split()[0] for line in lines()] == ["step=24", "step=25"]


def test_a_pause_counts_for_no_rate(lines):
    clock = Clock()
    console = Console(file=io.StringIO(), force_terminal=False)
    with TrainingProgress(num_steps=3, batch=8, screen=ConsoleScreen(console), clock=clock) as progress:
        for step in range(3):
            clock.now += 100
            progress.pause()
            clock.now += 2
            progress.update(step, {})
    assert lines()[-1] == "step=3 steps=3 mean_samples_per_s=4 left_s=0"


def test_a_terminal_shows_a_bar_and_nothing_is_logged(lines):
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    shown = run(Clock(), step_s=400.0, num_steps=20, console=console).getvalue()
    assert "20/20" in shown
    assert "loss 0.03123, 0.02 samples/s, 0:00 left" in shown
    assert lines() == []


@pytest.mark.parametrize("width", [80, 160])
def test_the_middle_of_a_run_shows_training_and_what_is_done_besides(width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    clock = Clock()
    screen = ConsoleScreen(console, clock=clock)
    with TrainingProgress(num_steps=1000, batch=8, screen=screen, clock=clock) as progress:
        for step in range(500):
            clock.now += 0.4
            progress.update(step, {"loss": 0.03123, "step_s": 0.4, "memory_peak_gib": 61.5})
        with screen.work("drawing samples") as work:
            steps_of(work)(12, 30)
            console.file.truncate(0)
            screen._bars.refresh()
            shown = last_state(console.file.getvalue().lstrip("\0").replace("\n", "\r\n"))
    assert_screen(f"train_middle_{width}", masked(shown, {r"(?m)\d:\d\d:\d\d$": "h:mm:ss"}))


def test_the_middle_of_a_run_in_a_pipe_is_a_line(lines):
    clock = Clock()
    with TrainingProgress(
        num_steps=1000, batch=8, screen=ConsoleScreen(Console(file=io.StringIO())), clock=clock
    ) as progress:
        for step in range(50):
            clock.now += 0.4
            progress.update(step, {"loss": 0.03123, "step_s": 0.4, "samples_per_s": 20.0, "bubble": 0.04})
    assert_screen("train_middle_pipe", lines()[-1])
