"""What a run says of its prediction, and the search for another layout beside it."""

import io
import logging
import os
from dataclasses import replace
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import pytest
from kit.screen_files import assert_screen
from kit.tiny_runs import recipe_of
from planner.correction.planted import layer_doubled, link_too_fast
from planner.correction.recordings import recorded_of
from rich.console import Console

from diffusionpipe.cli.text.check_text import ConsoleReport, causes_text, check_lines, check_table, others_text
from diffusionpipe.costs.files import write_cluster, write_profile
from diffusionpipe.costs.loading import JobDataWorkers, added_by, exactly
from diffusionpipe.ir.files import read_plan
from diffusionpipe.planner import choose, predicted_timeline
from diffusionpipe.planner.correction.causes import Cause, LoadingTimes
from diffusionpipe.planner.correction.correct import correct
from diffusionpipe.workflows.planning.prediction_file import read_prediction
from diffusionpipe.workflows.training.replanning import FoundLayout, Replanning, Request, training_of
from diffusionpipe.workflows.training.run_check import Command, RunCheck, suggestion_text
from diffusionpipe.workflows.training.run_facts import numbers_of_stages


@pytest.fixture(scope="module")
def checked():
    """A correction, and the numbers of its plan's stages."""
    true, planted = layer_doubled()
    present = choose(planted).plan()
    recorded = replace(recorded_of(true, present), others=0.016, num_disturbed=3)
    loading = LoadingTimes(predicted=0.01, measured=0.014)
    return correct(planted, present, recorded, loading), numbers_of_stages(present)


@pytest.fixture(scope="module")
def found(checked):
    return checked[0]


PROFILE = Path("runs/birds/profile.corrected.json")


@pytest.mark.parametrize("width", [80, 160])
def test_a_terminal_shows_a_table(checked, width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    found, stages = checked
    console.print(check_table(found, PROFILE, stages))
    assert_screen(f"train_check_{width}", console.file.getvalue())


def test_a_pipe_gets_lines(checked):
    found, stages = checked
    assert_screen("train_check_pipe", "\n".join(check_lines(found, PROFILE, stages)))


def test_one_stage_has_no_number(checked):
    found, _ = checked
    lines = "\n".join(check_lines(found, PROFILE, dict.fromkeys(range(9), 0)))
    assert "forwards took" in lines
    assert "of stage" not in lines


def test_causes_are_told_in_milliseconds_of_the_step_and_what_is_nothing_is_not():
    named = {"forwards": 0.012, "loading": 0.004, "waiting for messages": -0.001, "update": 1e-5}
    causes = [Cause(name=name, seconds=seconds) for name, seconds in named.items()]
    assert causes_text(causes) == (
        "forwards 12.0 ms longer, loading 4.0 ms longer, waiting for messages 1.0 ms shorter"
    )
    assert causes_text(causes[3:]) == "as predicted"


def test_what_other_programs_used_is_told_or_unknown():
    true, planted = layer_doubled()
    recorded = recorded_of(true, choose(planted).plan())
    assert others_text(recorded) == "unknown"
    assert others_text(replace(recorded, others=0.031)) == "3 % of the cores"
    assert others_text(replace(recorded, others=0.031, num_disturbed=2)) == "3 % of the cores, 2 of 15 steps left out"


def test_a_prediction_that_is_not_judged_says_why(caplog):
    check = RunCheck(
        ConsoleReport(Console(file=io.StringIO())), Command(recipe=Path("birds.toml"), overrides=(), ranks=2)
    )
    with caplog.at_level(logging.INFO):
        check.give_up((6, 50), 0.404)
    (record,) = caplog.records
    assert record.getMessage() == ('checked_steps=6-50 prediction="not judged: other programs used 40 % of the cores"')
    assert check.correction is None


@pytest.mark.parametrize("used", [(), (0.03, 0.03)], ids=["unknown", "measured"])
def test_data_workers_are_in_what_was_predicted_and_not_in_what_is_corrected(tmp_path, used):
    true, planted = layer_doubled()
    present = choose(planted).plan()
    recorded = replace(recorded_of(true, present), loading=used)
    write_profile(planted.profile, tmp_path / "profile.json")
    write_cluster(planted.cluster, tmp_path / "cluster.json")
    recipe = recipe_of(Path("models/sd"), Path("data/birds"), tmp_path)
    workers = JobDataWorkers(machines=("a", "a"), cores=(2, 2), batches=(exactly(0.1),) * 2, workers=1)
    start = SimpleNamespace(recipe=recipe, plan=present, loading=workers)
    found = correct(planted, present, recorded)
    check = RunCheck(
        ConsoleReport(Console(file=io.StringIO())), Command(recipe=Path("birds.toml"), overrides=(), ranks=2)
    )
    check.begin(start)
    row = check.check(recorded, [1] * len(planted.cluster.devices))
    timeline = predicted_timeline(planted.profile, present, planted.cluster)

    def added(seconds):
        own = replace(workers, batches=(exactly(seconds),) * 2)
        return added_by(own, iteration=timeline.makespan, bubble=timeline.bubble, copies=1).usual

    assert row["predicted_step_s"] == pytest.approx(found.predicted.step + added(0.1))
    assert row["corrected_step_s"] == pytest.approx(found.corrected.step)
    assert check.correction.predicted.iteration == pytest.approx(found.predicted.iteration)
    told = sum(cause.seconds for cause in check.correction.causes if cause.name == "loading")
    assert told == pytest.approx(added(0.03) - added(0.1) if used else 0)


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
    check = RunCheck(ConsoleReport(Console()), Command(recipe=Path("birds.toml"), overrides=(), ranks=2))
    check.begin(SimpleNamespace(recipe=recipe_of(Path("models/sd"), Path("data/birds"), tmp_path)))
    check.correction = found
    check._search = SimpleNamespace(is_over=lambda: True, result=lambda: None)
    with caplog.at_level(logging.INFO):
        check.look()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"replan=no_change: no other layout would be more than 5 % faster by {tmp_path / 'profile.corrected.json'}"
    )


def test_a_run_says_why_no_search_for_another_layout_can_start_and_goes_on(found, tmp_path, caplog, monkeypatch):
    def refused(request, errors):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("diffusionpipe.workflows.training.replanning.Replanning", refused)
    sections = {"plan": "auto", "microbatches": None, "encode_chunk": None}
    start = SimpleNamespace(
        recipe=recipe_of(Path("models/sd"), Path("data/birds"), tmp_path, pipeline=sections),
        plan=SimpleNamespace(mesh=SimpleNamespace(num_ranks=2)),
        model=None,
        hosts=("a", "a"),
    )
    check = RunCheck(ConsoleReport(Console()), Command(recipe=Path("birds.toml"), overrides=(), ranks=2))
    check._start_search(start, found)
    check.look()
    assert [record.getMessage() for record in caplog.records] == [
        "replan=failed reason=Resource temporarily unavailable"
    ]


def request_in(folder, step):
    true, _ = link_too_fast()
    write_profile(true.profile, folder / "profile.json")
    write_cluster(true.cluster, folder / "cluster.json")
    return Request(
        profile=str(folder / "profile.json"),
        cluster=str(folder / "cluster.json"),
        plan=str(folder / "plan.json"),
        training=training_of(true.workload),
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
    assert result == FoundLayout(sizes=best.sizes, step=best.step)
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
