"""Times of all ranks on one clock, held against brute force over all shifts."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.causality import assert_read_after_sent

from diffusionpipe.ir import Mesh, Span
from diffusionpipe.passes import communicate
from diffusionpipe.runtime.recording.clocks import MessageTimes, RankClock, RankTrace, lateness, starts_of, timeline_of
from diffusionpipe.schedules import one_f_one_b
from diffusionpipe.simulator import simulate, uniform_costs


def clock(machine="a", *, met=0.0, began=0.0, is_device=False):
    return RankClock(machine=machine, is_device=is_device, met=met, began=began)


def test_ranks_of_one_machine_keep_their_times_however_late_they_leave_the_barrier():
    clocks = [clock(met=7.0, began=7.5), clock(met=9.0, began=9.25)]
    assert starts_of(clocks, [MessageTimes(0, 5.0, 1, 3.25)]) == [0.0, 1.75]
    assert starts_of(clocks, [MessageTimes(0, 5.0, 1, 2.0)]) == [0.0, 1.75]  # one clock is not moved against itself


def test_machines_leave_the_barrier_together_and_the_first_of_each_counts():
    clocks = [clock("a", met=1.0, began=1.5), clock("b", met=103.0, began=103.0), clock("b", met=101.0, began=102.0)]
    assert starts_of(clocks, []) == [0.0, 1.5, 0.5]


def test_a_machine_whose_messages_would_be_read_before_they_are_sent_is_moved_with_all_its_ranks():
    clocks = [clock("a"), clock("b", met=50.0, began=50.0), clock("b", met=51.0, began=51.0)]
    assert starts_of(clocks, [MessageTimes(0, 4.0, 1, 1.5)]) == [0.0, 2.5, 3.5]
    assert starts_of(clocks, [MessageTimes(1, 4.0, 0, 1.5)]) == [2.5, 0.0, 1.0]


def test_a_device_has_a_clock_of_its_own():
    clocks = [clock(is_device=True), clock(is_device=True)]
    assert starts_of(clocks, [MessageTimes(0, 4.0, 1, 1.5)]) == [0.0, 2.5]


def test_clocks_that_contradict_each_other_stay():
    clocks = [clock("a"), clock("b")]
    assert starts_of(clocks, [MessageTimes(0, 4.0, 1, 3.0), MessageTimes(1, 4.0, 0, 3.0)]) == [0.0, 0.0]


def test_a_rank_is_late_by_the_time_since_the_first_of_its_machine():
    assert lateness([3.0, 12.0, 2.5, 10.0], ["a", "b", "a", "b"]) == [0.5, 2.0, 0.0, 0.0]


times = st.integers(0, 6)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 2), times, st.integers(0, 2), times), max_size=6))
def test_the_shifts_are_the_least_of_all_that_leave_no_message_read_before_it_is_sent(drawn):
    readings = [MessageTimes(a, float(sent), b, float(read)) for a, sent, b, read in drawn if a != b]
    found = starts_of([clock(name) for name in "abc"], readings)
    legal = [
        shifts
        for shifts in product(range(13), repeat=3)
        if all(shifts[one.sender] + one.sent <= shifts[one.reader] + one.read for one in readings)
    ]
    least = min(legal, key=sum, default=(0, 0, 0))
    assert found == [shift - min(least) for shift in least]


@given(st.integers(2, 4), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_a_simulated_step_read_by_clocks_of_several_machines_is_legal_again(stages, microbatches, random):
    """True times that the machines' clocks and late exits from the barrier have changed."""
    plain = one_f_one_b(stages, microbatches)
    schedule = communicate(plain, simulate(plain, uniform_costs(plain)))
    mesh = Mesh(data_parallel=2, pipeline=stages)
    traces, machines = [], [random.randrange(3) for _ in range(mesh.num_ranks)]
    shown = [random.uniform(0, 1e6) for _ in range(3)]
    for rank in range(mesh.num_ranks):
        group, worker = mesh.place(rank)
        true = simulate(schedule, uniform_costs(schedule, forward=1 + group, latency=0.25))
        first, exit_ = random.uniform(0, 0.5), random.uniform(0, 5)
        spans = [
            Span(worker=worker, action=span.action, start=span.start - first, end=span.end - first)
            for span in true.spans
            if span.worker == worker
        ]
        own = clock(str(machines[rank]), met=shown[machines[rank]] + exit_, began=shown[machines[rank]] + first + 5)
        traces.append(RankTrace(clock=own, spans=tuple(spans), update=()))
    timeline = timeline_of(mesh, schedule, traces)
    assert timeline.copies == ((tuple(range(stages))), tuple(range(stages, 2 * stages)))
    assert_read_after_sent(timeline, schedule, mesh)
    for rank, trace in enumerate(traces):
        own = [span for span in timeline.spans if span.worker == rank]
        assert [span.end - span.start for span in own] == pytest.approx([s.end - s.start for s in trace.spans])
