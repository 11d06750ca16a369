from pathlib import Path

import pytest
import typer

from diffusionpipe.cli import app
from gpu.__main__ import BY_HAND, MEASUREMENTS, Measurement, lines_of, run


def test_every_command_has_a_limit_below_ten_minutes_above_the_time_that_it_needs():
    everything = (*MEASUREMENTS, *BY_HAND)
    assert all(one.expected < one.limit < 600 for one in everything)
    lines = lines_of(everything, Path("out"))
    assert sum(line.endswith("not run on a GPU yet") for line in lines) == len(everything)
    assert "--out out/doctor.json" in "\n".join(lines)  # as it can be typed


@pytest.mark.parametrize(
    "one", [one for one in (*MEASUREMENTS, *BY_HAND) if "diffusionpipe" in one.command], ids=lambda one: one.name
)
def test_our_command_line_takes_the_options(one):
    command = typer.main.get_command(app)
    words = list(one.command[one.command.index("diffusionpipe") + 1 :])
    verb = command.get_command(command.make_context("diffusionpipe", list(words)), words[0])
    verb.make_context(words[0], words[1:])  # raises where an option is unknown


def test_a_command_that_hangs_costs_its_limit_and_the_next_one_runs(tmp_path):
    waits = Measurement(name="hangs", shows="", command=("-c", "import time; time.sleep(60)"), limit=0.3, expected=0.1)
    works = Measurement(name="works", shows="", command=("-c", "print('{out}')"), limit=30, expected=0.1)
    found = run((waits, works), tmp_path)
    assert [one["status"] for one in found] == ["over its limit of 0 s", "0"]
    assert (tmp_path / "works.log").read_text() == f"{tmp_path}\n"
