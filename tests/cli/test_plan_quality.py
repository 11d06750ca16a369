"""`plan --quality` on runs that trained: its table, and what it says of runs that cannot answer."""

import json
import re
import shutil

import pytest
from kit.tiny_runs import recipe_of, save_dit, save_pictures, train_here

from diffusionpipe.cli import main
from diffusionpipe.trainer.recipe import recipe_to_toml
from diffusionpipe.trainer.reporting.metrics import read_metrics

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
STEPS = 25


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quality")
    save_dit(folder / "dit")
    save_pictures(folder / "data", count=40)
    recipe = recipe_of(
        folder / "dit",
        folder / "data",
        folder / "run",
        training={"steps": STEPS, "batch": 16, "noise_scale_every": 1},
        pipeline={"microbatches": 4},
    )
    assert train_here(recipe) == STEPS
    (folder / "recipe.toml").write_text(recipe_to_toml(recipe))
    return folder


@pytest.fixture
def plan_of(place, capsys):
    def plan(run, *more):
        with pytest.raises(SystemExit) as caught:
            main(["plan", str(place / "recipe.toml"), "--cluster", "rtx3090x4", "--quality", str(run), *more])
        shown = capsys.readouterr()
        return caught.value.code or 0, shown.out, " ".join(shown.err.split())

    return plan


def with_rows(place, name, change):
    """A copy of the run with other lines in its metrics."""
    folder = place / name
    shutil.copytree(place / "run", folder, dirs_exist_ok=True)
    rows = [change(number, row) for number, row in enumerate(read_metrics(place / "run"))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def known(number, row):
    return row | {"noise/gradient_square": 2.0, "noise/trace": 64.0} if "loss" in row else row


def test_every_step_is_measured_and_the_scale_appears_once_it_is_known(place):
    rows = [row for row in read_metrics(place / "run") if "loss" in row]
    assert all("noise/gradient_square" in row and "noise/trace" in row for row in rows)
    assert not any("noise_scale" in row for row in rows[:19])


def test_batches_are_compared_by_the_time_to_the_runs_loss(place, plan_of):
    code, shown, problem = plan_of(with_rows(place, "known", known), "--batch", "8,16,32")
    assert code == 0, problem
    assert "noise scale 32 samples; the run's loss took 25 steps with a batch of 16" in shown
    assert len(re.findall(r"^>", shown, re.MULTILINE)) == 1
    rows = re.findall(r"^>? +(\d+) +(\d) x (\d) +(\S+) +(\S+) +(\S+) +(\S+)$", shown, re.MULTILINE)
    assert {(int(batch), int(copies), int(stages)) for batch, copies, stages, *_ in rows} == {
        (batch, copies, 4 // copies) for batch in (8, 16, 32) for copies in (1, 2, 4)
    }
    for batch, _, _, rate, steps, hours, _ in rows:
        expected = 25 * (1 + 32 / int(batch)) / (1 + 32 / 16)
        assert float(steps) == pytest.approx(expected, abs=0.5)
        assert float(hours) == pytest.approx(expected * int(batch) / float(rate) / 3600, rel=0.02)
    assert "2 stages beat 2 times as many copies with 2 times the batch" in shown


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("few", lambda number, row: known(number, row) if number < 12 else {"step": row["step"], "loss": 1.0},
         "is not known yet: 12 measurements, and 20 are needed"),
        ("negative", lambda number, row: row | {"noise/gradient_square": -1.0, "noise/trace": 1.0},
         "is not known yet: 25 measurements are too noisy"),
        ("old", lambda number, row: {"step": row["step"], "loss": 1.0}, "or is older than these measurements"),
    ],
    ids=["few", "negative", "old"],
)  # fmt: skip
def test_a_run_without_a_number_says_why_and_no_number(place, plan_of, name, change, words):
    code, shown, problem = plan_of(with_rows(place, name, change))
    assert code == 2
    assert words in problem
    assert shown == ""


def test_a_run_with_nothing_smaller_than_its_batch_says_what_would_give_one(place, plan_of):
    recipe = recipe_of(
        place / "dit", place / "data", place / "whole", training={"steps": 1}, pipeline={"microbatches": 1}
    )
    assert train_here(recipe) == 1
    code, _, problem = plan_of(place / "whole")
    assert code == 2
    assert "one micro-batch and one group" in problem
    assert "set pipeline.microbatches = 2" in problem


def test_another_model_and_another_folder_are_refused(place, plan_of):
    run = with_rows(place, "other", known)
    text = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(text.replace(str(place / "dit"), str(place / "elsewhere")))
    code, _, problem = plan_of(run)
    assert (code, "trained another model" in problem) == (2, True)
    code, _, problem = plan_of(place / "data")
    assert (code, "is not the folder of a run" in problem) == (2, True)
    code, _, problem = plan_of(run, "--compare", "all")
    assert (code, "--compare: no effect on --quality" in problem) == (2, True)
