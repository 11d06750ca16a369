"""Loss and gradients through processes and gloo are those of one process on the plain full batch."""

import pytest
from kit.crew import crew_of
from kit.descriptions import described
from kit.layout_cases import can_run, scattered
from kit.layouts import assert_same_step, merge, reference_step, steps_in_process
from kit.tiers import quick_and_slow
from kit.tiny_models import raw_inputs, tiny_dit, tiny_stable_diffusion
from kit.windowed import (
    STEPS,
    batches_of,
    distances_of,
    is_within_limits,
    layout_of,
    recurrence,
    windows_in_process,
)

from diffusionpipe.ir import Sharded
from diffusionpipe.ir.versions import Versions
from diffusionpipe.planner import Layout, build_plan

BATCH = 16
CHAINS = ("gpipe", "1f1b", "zb-h1")
OTHERS = ("interleaved", "zb-v", "chimera", "bitpipe", "dualpipe")
"""One family of each kind of placement: loop, V, two directions, two directions of Vs, two directions with I and W."""


def layouts_over_four_ranks(schedule: str) -> dict[str, Layout]:
    shared = {"batch": BATCH, "microbatches": 4, "schedule": schedule, "encode_chunk": 3}
    return {
        "4 stages": Layout(**shared, stages=4),
        "2 stages, both twice": Layout(**shared, stages=2, replicas=(2, 2)),
        "2 stages, 2 pipelines": Layout(**shared, stages=2, data_parallel=2),
        "2 stages, 2 pipelines, sharded": Layout(**shared, stages=2, data_parallel=2, sharded=Sharded.ALL),
    } | ({"3 stages, the first twice": Layout(**shared, stages=3, replicas=(2, 1, 1))} if schedule in CHAINS else {})


@pytest.fixture(scope="module")
def crew():
    with crew_of(4) as ranks:
        yield ranks


ALL = (*CHAINS, *OTHERS)
CASES = [(tiny_stable_diffusion, ALL), (tiny_dit, ALL), (tiny_dit, ("1f1b", "zb-v"))]


@pytest.mark.parametrize(("build", "schedules"), quick_and_slow(CASES, quick=CASES[-1:]))
def test_gradients_through_processes_are_those_of_one(crew, build, schedules):
    graph = build()
    expected = reference_step(graph, raw_inputs(graph, BATCH))
    model = described(graph)
    alone = {"batch": BATCH, "stages": 1, "data_parallel": 4, "sharded": Sharded.ALL, "encode_chunk": 3, "buckets": 0}
    layouts = {
        ("sharded", "at once"): Layout(**alone, microbatches=1),
        ("sharded", "block by block"): Layout(**alone, microbatches=2, schedule="gpipe", checkpointed=("*",)),
    } | {
        (schedule, name): layout
        for schedule in schedules
        for name, layout in layouts_over_four_ranks(schedule).items()
        if can_run(layout, model)
    }
    by_rank = crew.run(steps_in_process, build, list(layouts.values()), BATCH)
    for name, results in zip(layouts, zip(*by_rank, strict=True), strict=True):
        found = merge(results)
        assert found.gradients, name
        assert_same_step(found, expected)


WINDOWS = [(layout_of(Versions.STASHED, 4, 1), ("sgd", "momentum"))]
OTHER_WINDOWS = [
    (layout_of(Versions.PREDICTED, 2, 2, data_parallel=2), ("momentum",)),
    (layout_of(Versions.DELAYED, 4, 4), ("momentum",)),
    (layout_of(Versions.NEWEST, 4, 1), ("momentum", "adamw")),
    (layout_of(Versions.VERTICAL, 4, 4), ("sgd",)),
    (layout_of(Versions.STASHED, 2, 4, data_parallel=2, checkpointed=("*",)), ("adamw",)),
    (layout_of(Versions.STASHED, 2, 2, replicas=(2, 2)), ("momentum",)),
    (layout_of(Versions.STASHED, 3, 2, replicas=(1, 2, 1)), ("momentum",)),
]


@pytest.mark.parametrize(("build", "layouts"), quick_and_slow(
    [(tiny_dit, WINDOWS), (tiny_stable_diffusion, OTHER_WINDOWS)], quick=[(tiny_dit, WINDOWS)],
))  # fmt: skip
def test_windows_through_processes_are_the_recurrence(crew, build, layouts):
    graph = build()
    batches, stops = batches_of(graph), (4, STEPS)
    by_rank = crew.run(windows_in_process, build, layouts, stops, None)
    for number, (layout, names) in enumerate(layouts):
        plan = build_plan(described(graph), layout)
        start, expected = recurrence(graph, plan, batches, names, {0, *stops})
        found = distances_of(plan, names, start, expected, [results[number] for results in by_rank])
        assert is_within_limits(found), (layout.versions, found)


@pytest.mark.slow
def test_filled_windows_through_processes_are_the_recurrence(crew):
    layouts = [
        (layout_of(Versions.STASHED, 4, 1), ("momentum",)),
        (layout_of(Versions.STASHED, 2, 2, data_parallel=2), ("momentum",)),
        (layout_of(Versions.STASHED, 3, 2, replicas=(1, 2, 1)), ("sgd", "adamw")),
    ]
    graph, stops, fill = tiny_stable_diffusion(), (3, STEPS), 1
    model, batches = described(graph), batches_of(graph)
    by_rank = crew.run(windows_in_process, tiny_stable_diffusion, layouts, stops, None, fill)
    for number, (layout, names) in enumerate(layouts):
        plan = build_plan(model, layout, filler=scattered(fill))
        start, expected = recurrence(graph, plan, batches, names, {0, *stops})
        found = distances_of(plan, names, start, expected, [results[number] for results in by_rank])
        assert is_within_limits(found), (layout, found)


@pytest.mark.slow
def test_five_hundred_windows_with_random_delays_end(crew):
    """Each update of each rank waits up to 10 ms; every fifth of the way the pipeline is flushed."""
    layouts = [(layout_of(Versions.STASHED, 4, 1), ("sgd",))]
    for results in crew.run(windows_in_process, tiny_dit, layouts, (100, 200, 300, 400, 500), 7):
        assert len(results[0][1]) == 500


@pytest.mark.slow
def test_three_hundred_filled_windows_with_random_delays_end(crew):
    layouts = [(layout_of(Versions.STASHED, 4, 1), ("sgd",))]
    for results in crew.run(windows_in_process, tiny_dit, layouts, (100, 200, 300), 7, 2):
        assert len(results[0][1]) == 300
