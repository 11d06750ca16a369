"""What a run says of its prediction, and the search for another layout beside it."""

import io
import logging
import os
from dataclasses import replace
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import pytest
from planner.correction.planted import layer_doubled, link_too_fast
from planner.correction.recordings import recorded_of
from rich.console import Console
from screen_files import assert_screen
from tiny_runs import recipe_of

from diffusionpipe.cli.check_text import check_lines, check_table
from diffusionpipe.cli.prediction_file import read_prediction
from diffusionpipe.cli.replanning import Found, Replanning, Request
from diffusionpipe.cli.run_check import Command, RunCheck, suggestion_text
from diffusionpipe.costs.files import write_cluster, write_profile
from diffusionpipe.ir.files import read_plan
from diffusionpipe.planner import choose, predicted_timeline
from diffusionpipe.planner.correction.correct import correct


@pytest.fixture(scope="module")
def found():
    true, planted = layer_doubled()
    present = choose(planted).plan()
    return correct(planted, present, recorded_of(true, present))


@pytest.mark.parametrize("width", [80, 160])
def test_a_terminal_shows_a_table(found, width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    console.print(check_table(found, Path("runs/birds/profile.corrected.json")))
    assert_screen(f"train_check_{width}", console.file.getvalue())


def test_a_pipe_gets_lines(found):
    lines = check_lines(found, Path("runs/birds/profile.corrected.json"))
    assert_screen("train_check_pipe", "\n".join(lines))


def test_data_workers_are_in_what_was_predicted_and_not_in_what_is_corrected(tmp_path):
    true, planted = layer_doubled()
    present = choose(planted).plan()
    recorded = recorded_of(true, present)
    write_profile(planted.profile, tmp_path / "profile.json")
    write_cluster(planted.cluster, tmp_path / "cluster.json")
    recipe = recipe_of(Path("models/sd"), Path("data/birds"), tmp_path)
    start = SimpleNamespace(recipe=recipe, plan=present, loading=0.1)
    found = correct(planted, present, recorded)
    check = RunCheck(Console(file=io.StringIO()), Command(recipe=Path("birds.toml"), overrides=(), ranks=2))
    check.begin(start)
    row = check.check(recorded, [1] * len(planted.cluster.devices))
    loading = 0.1 * (1 - predicted_timeline(planted.profile, present, planted.cluster).bubble)
    assert row["predicted_step_s"] == pytest.approx(found.predicted.step + loading)
    assert row["corrected_step_s"] == pytest.approx(found.corrected.step)
    assert check.correction.predicted.iteration == pytest.approx(found.predicted.iteration)


def test_the_command_takes_back_all_keys_that_the_plan_sets():
    recipe = recipe_of(
        Path("models/sd"),
        Path("data/birds"),
        Path("runs/birds"),
        pipeline={"stages": 2, "microbatches": 2, "fill": True, "splits": ["unet.mid"], "encode_chunk": "none"},
    )
    command = Command(recipe=Path("birds.toml"), overrides=("training.batch=4",), ranks=2)
    assert command.with_plan(Path("runs/birds/plan.suggested.json"), recipe) == (
        "diffusionpipe train birds.toml training.batch=4 pipeline.plan=runs/birds/plan.suggested.json "
        "pipeline.stages=none pipeline.microbatches=none 'pipeline.splits=[]' pipeline.fill=none "
        "--ranks 2 --resume latest"
    )


def test_a_suggestion_is_one_sentence_and_a_command():
    text = suggestion_text("1f1b, 2 stages", 0.2, 0.25, "diffusionpipe train")
    assert text == (
        "Another layout would be 25% faster by the corrected profile: 1f1b, 2 stages, 200.0 ms a step instead of "
        "250.0 ms. To use it, stop this run with Ctrl-C, which saves a checkpoint, and continue it with: "
        "diffusionpipe train"
    )


def test_a_run_says_that_no_other_layout_is_faster(found, tmp_path, caplog):
    check = RunCheck(Console(), Command(recipe=Path("birds.toml"), overrides=(), ranks=2))
    check.begin(SimpleNamespace(recipe=recipe_of(Path("models/sd"), Path("data/birds"), tmp_path)))
    check.correction = found
    check._search = SimpleNamespace(is_over=lambda: True, result=lambda: None)
    with caplog.at_level(logging.INFO):
        check.look()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"replan=no_change: no other layout would be more than 5 % faster by {tmp_path / 'profile.corrected.json'}"
    )


def request_in(folder, step):
    true, _ = link_too_fast()
    write_profile(true.profile, folder / "profile.json")
    write_cluster(true.cluster, folder / "cluster.json")
    return Request(
        profile=str(folder / "profile.json"),
        cluster=str(folder / "cluster.json"),
        plan=str(folder / "plan.json"),
        workload=true.workload,
        given=true.given,
        fill=None,
        sample_batch=0,
        step=step,
        parent=os.getpid(),
    )


def ended(search):
    while not search.is_over():
        sleep(0.05)
    return search


def test_a_search_beside_training_writes_the_plan_that_it_finds(tmp_path):
    search = ended(Replanning(request_in(tmp_path, 10.0), tmp_path / "errors"))
    result, best = search.result(), choose(link_too_fast()[0])
    assert result == Found(sizes=best.sizes, step=best.step)
    plan = read_plan(tmp_path / "plan.json")
    assert plan.train == best.plan().train
    assert read_prediction(tmp_path / "plan.json", plan) is not None


def test_a_search_that_finds_nothing_better_says_nothing(tmp_path):
    assert ended(Replanning(request_in(tmp_path, 1e-3), tmp_path / "errors")).result() is None
    assert not (tmp_path / "plan.json").exists()


def test_a_search_that_fails_leaves_its_reason_in_the_file(tmp_path):
    request = request_in(tmp_path, 10.0)
    search = ended(Replanning(replace(request, profile=str(tmp_path / "none.json")), tmp_path / "errors"))
    with pytest.raises(OSError, match="ended with status 1"):
        search.result()
    assert "none.json" in (tmp_path / "errors").read_text(encoding="utf-8")


def test_a_search_can_be_stopped_and_then_has_failed(tmp_path):
    search = Replanning(request_in(tmp_path, 10.0), tmp_path / "errors")
    search.stop()
    assert search.is_over()
    with pytest.raises(OSError, match="ended with status -9"):
        search.result()
