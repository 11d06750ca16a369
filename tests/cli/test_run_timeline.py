import re
from dataclasses import replace

import pytest

from diffusionpipe.ir import Mesh, Phase, Plan
from diffusionpipe.runtime.recording.clocks import RankClock, RankTrace, timeline_of
from diffusionpipe.schedules import one_f_one_b
from diffusionpipe.schedules.several.opposed import opposed
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.viz.gantt import gantt, panel_of
from diffusionpipe.workflows.report.plan import PlanPage
from diffusionpipe.workflows.training.run_timeline import predicted_panel, timeline_title


def schedule_of(num_stages):
    return one_f_one_b(num_stages, 4)


def plan_of(mesh):
    schedule = schedule_of(mesh.pipeline)
    return Plan(mesh=mesh, blocks=(), train=schedule, validate=schedule, sample=(schedule,))


def measured(mesh, slow=()):
    """Every rank as the simulator says, the copies in `slow` twice as slow, each with an update of 1."""
    traces = []
    for rank in range(mesh.num_ranks):
        copy, worker = mesh.place(rank)
        factor = 2 if copy in slow else 1
        timeline = simulate(
            plan_of(mesh).train, uniform_costs(plan_of(mesh).train, forward=factor, backward=2 * factor)
        )
        spans = tuple(span for span in timeline.spans if span.worker == worker)
        end = timeline.makespan
        update = (Phase(worker=rank, name="optimizer", start=end, end=end + 1),)
        clock = RankClock(machine="here", is_device=False, met=0.0, began=0.0)
        traces.append(RankTrace(clock=clock, spans=spans, update=update))
    return timeline_of(mesh, plan_of(mesh).train, traces)


def texts(path):
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


@pytest.mark.parametrize("adjacent", [1, 2])
def test_the_ranks_of_all_copies_are_in_one_timeline(adjacent):
    mesh = Mesh(data_parallel=2, pipeline=2, adjacent=adjacent)
    timeline = measured(mesh)
    assert timeline.num_workers == 4
    assert timeline.copies == (((0, 1), (2, 3)) if adjacent == 1 else ((0, 2), (1, 3)))
    assert [timeline.busy(rank) for rank in range(4)] == [12] * 4
    assert {span.action.stage for span in timeline.spans if span.worker == timeline.copies[1][1]} == {1}


def test_a_picture_has_a_row_for_every_rank_and_spans_the_step(tmp_path):
    mesh = Mesh(data_parallel=2, pipeline=2)
    gantt([panel_of("measured", measured(mesh, slow=[1]))], tmp_path / "a.svg")
    written = texts(tmp_path / "a.svg")
    assert [f"rank {rank}" in written for rank in range(5)] == [True] * 4 + [False]
    assert "optimizer" in written
    assert "measured · step 31000 ms: iteration 30000, update 1000 · bubble 40.0%" in written


def test_of_many_copies_the_fastest_the_median_and_the_slowest_are_drawn(tmp_path):
    mesh = Mesh(data_parallel=10, pipeline=2)
    panel = panel_of("measured", measured(mesh, slow=[4]))
    names = [name for _, name in panel.rows]
    assert len(names) == 6
    assert names[-2:] == ["slowest: rank 8", "slowest: rank 9"]
    gantt([panel], tmp_path / "a.svg")
    assert set(names) <= set(texts(tmp_path / "a.svg"))


def test_the_prediction_of_one_pipeline_names_the_ranks_that_it_is_of():
    def rows(mesh):
        timeline = replace(measured(Mesh(pipeline=mesh.pipeline)), copies=())
        return [name for _, name in predicted_panel(timeline, mesh).rows]

    assert rows(Mesh(pipeline=2)) == ["rank 0", "rank 1"]
    assert rows(Mesh(data_parallel=3)) == ["each rank"]
    assert rows(Mesh(data_parallel=2, pipeline=2)) == ["ranks 0, 2", "ranks 1, 3"]
    assert rows(Mesh(data_parallel=4, pipeline=2, adjacent=4)) == ["ranks 0 to 3", "ranks 4 to 7"]


@pytest.mark.parametrize(
    ("mesh", "title"),
    [
        (Mesh(), "one rank: 4 micro-batches, batch 4"),
        (Mesh(data_parallel=2), "data parallelism: 2 ranks, 4 micro-batches each, batch 8"),
        (Mesh(data_parallel=2, shard=2), "sharded data parallelism: 2 ranks, 4 micro-batches each, batch 8"),
        (Mesh(pipeline=2), "1f1b: 2 ranks, 4 micro-batches, batch 4"),
        (Mesh(data_parallel=2, pipeline=2), "1f1b: 4 ranks in 2 copies of the pipeline, 4 micro-batches each, batch 8"),
    ],
)
def test_the_title_calls_data_parallelism_by_its_name(mesh, title):
    assert timeline_title(plan_of(mesh)) == title


def test_the_title_counts_the_micro_batches_of_each_model():
    """Together they are no number by which the batch is cut."""
    plan = replace(plan_of(Mesh(pipeline=2)), train=opposed(2, (4, 2)))
    assert timeline_title(plan).startswith("opposed: 2 ranks, 4 + 2 micro-batches, batch")


@pytest.mark.parametrize(
    ("counts", "title"),
    [
        ([3], "1f1b: 2 ranks, 3 micro-batches by tokens, batch 4"),
        ([5, 5], "1f1b: 4 ranks in 2 copies of the pipeline, 5 micro-batches by tokens each, batch 8"),
        ([5, 3], "1f1b: 4 ranks in 2 copies of the pipeline, 3 to 5 micro-batches by tokens each, batch 8"),
    ],
)
def test_the_title_counts_the_micro_batches_of_the_timed_step_and_not_the_plans(counts, title):
    mesh = Mesh(data_parallel=len(counts), pipeline=2)
    own = tuple(one_f_one_b(2, count) for count in counts)
    assert timeline_title(plan_of(mesh), replace(measured(mesh), schedules=own)) == title
    assert timeline_title(plan_of(mesh), measured(mesh)) == timeline_title(plan_of(mesh))
    timed = replace(measured(mesh), schedules=own)
    page = PlanPage(plan=plan_of(mesh), file="", predicted="", source="", actual=timed, alternatives={})
    assert page.title() == title
