"""Loss and gradients through processes and gloo are those of one process on the plain full batch."""

import pytest
from crew import crew_of
from descriptions import described
from layouts import assert_same_step, can_run, merge, reference_step, steps_in_process
from tiers import quick_and_slow
from tiny_models import raw_inputs, tiny_dit, tiny_stable_diffusion

from diffusionpipe.planner import Layout

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
        "2 stages, 2 pipelines, sharded": Layout(**shared, stages=2, data_parallel=2, sharded=True),
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
    alone = {"batch": BATCH, "stages": 1, "data_parallel": 4, "sharded": True, "encode_chunk": 3, "buckets": 0}
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
