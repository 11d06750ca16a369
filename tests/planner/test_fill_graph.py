import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner.fill_cases import random_case

from diffusionpipe.ir import Op
from diffusionpipe.simulator import simulate


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


@given(st.integers(0, 10_000), st.floats(0, 0.5))
def test_latest_starts_leave_slack_everywhere_and_none_on_the_critical_path(seed, more):
    graph = random_case(seed, max_workers=4, max_samples=32).graph
    makespan = graph.makespan * (1 + more)
    slack = [late - early for late, early in zip(graph.latest_starts(makespan), graph.starts, strict=True)]
    assert min(slack) == pytest.approx(makespan - graph.makespan, abs=1e-6 * makespan)
