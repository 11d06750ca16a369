from dataclasses import replace

import pytest
from planner import synthetic

from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.workflows.planning.prediction_file import prediction_file, read_prediction, write_prediction

GRAPH = synthetic.unet().graph


@pytest.fixture
def plan():
    return build_plan(GRAPH, Layout(batch=8, stages=2, microbatches=4))


def predicted(plan):
    return simulate(plan.train, uniform_costs(plan.train))


def test_what_is_written_beside_a_plan_file_is_read_again(plan, tmp_path):
    path = write_prediction(predicted(plan), tmp_path / "plan.json")
    assert path == tmp_path / "plan.timeline.json"
    assert read_prediction(tmp_path / "plan.json", plan) == predicted(plan)


def test_without_a_file_nothing_is_predicted(plan, tmp_path):
    assert read_prediction(tmp_path / "plan.json", plan) is None


def test_the_prediction_of_another_plan_or_of_a_part_of_it_is_not_taken(plan, tmp_path, caplog):
    other = build_plan(GRAPH, Layout(batch=8, stages=2, microbatches=2))
    whole = predicted(plan)
    for timeline in (predicted(other), replace(whole, spans=whole.spans[1:])):
        write_prediction(timeline, tmp_path / "plan.json")
        assert read_prediction(tmp_path / "plan.json", plan) is None
        assert "of_another_plan" in caplog.text
        caplog.clear()


def test_a_broken_file_draws_nothing_and_is_named(plan, tmp_path, caplog):
    prediction_file(tmp_path / "plan.json").write_text("{}")
    assert read_prediction(tmp_path / "plan.json", plan) is None
    assert "plan.timeline.json" in caplog.text
