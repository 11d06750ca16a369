"""Timelines of steps whose copies have cut their samples into micro-batches of their own."""

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from diffusionpipe.ir import Edge, Mesh
from diffusionpipe.ir.files import TIMELINE, from_text, to_text
from diffusionpipe.ir.own_schedules import in_one_table
from diffusionpipe.passes import communicate, connect_blocks
from diffusionpipe.runtime.recording.clocks import RankClock, RankTrace, timeline_of
from diffusionpipe.schedules import one_f_one_b
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.timing.sends import waits_of, waits_of_step
from diffusionpipe.viz.perfetto import perfetto
from diffusionpipe.viz.waits import times_of_ranks

STAGES = 2


def step_of(microbatches):
    """A step of this many micro-batches on two stages, and its simulated times."""
    edge = Edge(producer=0, consumer=1, tensors=(f"x{microbatches}",), gradients=(f"x{microbatches}",))
    silent = connect_blocks(one_f_one_b(STAGES, microbatches), [edge])
    schedule = communicate(silent, simulate(silent, uniform_costs(silent)))
    return schedule, simulate(schedule, uniform_costs(schedule))


def measured(plan, copies):
    """The timeline of a run by `plan` in which each copy has this many micro-batches."""
    steps = [step_of(count) for count in copies]
    clock = RankClock(machine="here", is_device=False, met=0.0, began=0.0)
    traces = [
        RankTrace(clock=clock, spans=tuple(s for s in times.spans if s.worker == worker), update=(), schedule=schedule)
        for schedule, times in steps
        for worker in range(STAGES)
    ]
    return timeline_of(Mesh(data_parallel=len(copies), pipeline=STAGES), plan, traces), steps


@settings(max_examples=10)
@given(st.integers(1, 4), st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_each_copy_waits_as_it_would_alone_by_its_own_schedule(planned, copies):
    plan, _ = step_of(planned)
    timeline, steps = measured(plan, copies)
    assert from_text(to_text(timeline, TIMELINE), TIMELINE, source="timeline") == timeline
    drawn, _ = in_one_table(timeline, plan)
    found = times_of_ranks(drawn, waits_of_step(timeline, plan), {})
    for copy, (schedule, times) in enumerate(steps):
        own = replace(times, source="measured", memory=())
        slower = max(one.makespan for _, one in steps) - own.makespan
        for worker, alone in enumerate(times_of_ranks(own, waits_of(schedule), {})):
            joint = found[STAGES * copy + worker]
            assert joint.computing == alone.computing
            senders = [wait.sender for wait in joint.waits if wait.sender is not None]
            assert senders == [STAGES * copy + wait.sender for wait in alone.waits if wait.sender is not None]
            assert sum(wait.seconds for wait in joint.waits) == sum(wait.seconds for wait in alone.waits) + slower


def test_a_trace_names_the_tensors_of_each_copy_s_own_messages(tmp_path):
    """The copies have more messages than the plan, whose table of messages is too short for them."""
    plan, _ = step_of(2)
    timeline, _ = measured(plan, [3, 5])
    drawn, table = in_one_table(timeline, plan)
    perfetto(drawn, tmp_path / "trace.json", schedule=table)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tensors = {
        (event["pid"] // STAGES, event["args"]["tensors"])
        for event in events
        if event["ph"] == "X" and "tensors" in event["args"]
    }
    assert tensors == {(0, "x3"), (1, "x5")}


def test_a_step_by_the_plan_keeps_its_numbers():
    plan, times = step_of(3)
    timeline = replace(times, source="measured")
    assert in_one_table(timeline, plan) == (timeline, plan)
    assert waits_of_step(timeline, plan) == waits_of(plan)
