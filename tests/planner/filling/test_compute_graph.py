from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner.filling.fill_cases import random_case

from diffusionpipe.ir import Op
from diffusionpipe.ir.action import COMPUTE_OPS
from diffusionpipe.passes import shard_parameters
from diffusionpipe.planner.assembly.buckets import subdivide
from diffusionpipe.planner.filling.compute_graph import compute_graph
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.simulator import simulate, uniform_costs


@given(st.integers(0, 10_000))
def test_waits_are_those_of_the_simulator(seed):
    case = random_case(seed, max_workers=4, max_samples=32)
    timeline = simulate(case.schedule, case.costs)
    for worker, gaps in enumerate(case.graph.gaps):
        spans = [s for s in timeline.spans if s.worker == worker and s.action.op is not Op.REDUCE_GRAD]
        ends = [0.0, *(span.end for span in spans)]
        waits = [(end, span.start) for end, span in zip(ends, spans, strict=False) if span.start > end]
        assert [gap.start for gap in gaps] == pytest.approx([start for start, _ in waits])
        assert [gap.end for gap in gaps] == pytest.approx([end for _, end in waits])


def slack_of(graph, makespan):
    """By event how much later it may start in an iteration of this time."""
    latest = graph.times.latest_starts(makespan)
    return [latest[event] - graph.times.start(event) for event in range(1, len(latest))]


@given(st.integers(0, 10_000), st.floats(0, 0.5))
def test_latest_starts_leave_slack_everywhere_and_none_on_the_critical_path(seed, more):
    graph = random_case(seed, max_workers=4, max_samples=32).graph
    makespan = graph.makespan * (1 + more)
    slack = slack_of(graph, makespan)
    assert min(slack) == pytest.approx(makespan - graph.makespan, abs=1e-6 * makespan)


@given(st.integers(1, 6), st.integers(1, 3), st.sampled_from(["1f1b", "gpipe"]), st.integers(0, 10_000))
def test_waits_for_gathers_are_those_of_the_simulator(blocks, microbatches, family, seed):
    schedule = subdivide(REGISTRY[family](1, microbatches), blocks, is_breadth_first=True)
    schedule = shard_parameters(schedule)
    random = Random(seed)
    costs = replace(
        uniform_costs(schedule),
        unshards=tuple(random.uniform(0, 3) for _ in range(blocks)),
        reduces=tuple(random.uniform(0, 3) for _ in range(blocks)),
    )
    graph, timeline = compute_graph(schedule, costs), simulate(schedule, costs)
    assert graph.makespan == pytest.approx(timeline.makespan)
    spans = [span for span in timeline.spans if span.action.op in COMPUTE_OPS]
    ends = [0.0, *(span.end for span in spans)]
    waits = [(end, span.start) for end, span in zip(ends, spans, strict=False) if span.start > end + 1e-9]
    found = [(gap.start, gap.end) for gap in graph.gaps[0] if gap.end > gap.start + 1e-9]
    assert found == [pytest.approx(wait) for wait in waits]
    slack = slack_of(graph, graph.makespan)
    assert min(slack) == pytest.approx(0, abs=1e-9)
