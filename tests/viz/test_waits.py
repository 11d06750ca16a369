from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st
from planner import synthetic

from diffusionpipe.ir import SEND_OPS, Op, Phase, Span, Timeline, parse_action
from diffusionpipe.ir.flows import flows, serving
from diffusionpipe.passes import communicate
from diffusionpipe.planner import Layout, Setting
from diffusionpipe.planner.assembly.build import build_train_schedule
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.search.proposal import pricing_of
from diffusionpipe.schedules import one_f_one_b
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.timing.sends import waits_of
from diffusionpipe.viz.palette import UPDATE_NAME
from diffusionpipe.viz.waits import END, HOST, SUMS, TRANSFER, WORK, times_of_ranks

sizes = st.integers(1, 5)


def timed(stages, microbatches, comm=0):
    plain = one_f_one_b(stages, microbatches)
    schedule = communicate(plain, simulate(plain, uniform_costs(plain)))
    return simulate(schedule, uniform_costs(schedule, latency=comm)), schedule


@given(sizes, sizes, st.integers(0, 2))
def test_computing_and_waiting_of_a_rank_add_up_to_the_step(stages, microbatches, comm):
    timeline, schedule = timed(stages, microbatches, comm)
    for rank in times_of_ranks(timeline, waits_of(schedule), {}):
        spent = sum(rank.computing.values()) + sum(rank.by_cause().values())
        assert abs(spent - timeline.step) < 1e-9
        assert abs(sum(rank.computing.values()) - timeline.busy(rank.worker)) < 1e-9


def test_the_last_rank_waits_for_the_work_of_the_ranks_before_it_and_then_for_the_end():
    timeline, schedule = timed(3, 1)
    first, _, last = times_of_ranks(timeline, waits_of(schedule), {})
    assert [(wait.cause, wait.before, wait.sender) for wait in last.waits] == [(WORK, "2F0", 1), (END, "", None)]
    assert [(wait.cause, wait.before, wait.sender) for wait in first.waits] == [(WORK, "0B0", 1)]
    assert last.by_cause() == {WORK: 2, END: 4}  # two forwards before it, two backwards of two after it


def test_a_message_on_its_way_is_a_transfer():
    timeline, schedule = timed(2, 1, comm=3)
    waits = times_of_ranks(timeline, waits_of(schedule), {})[1].waits
    assert [(wait.cause, wait.seconds) for wait in waits[:2]] == [(WORK, 1), (TRANSFER, 3)]


def test_a_wait_without_a_message_is_the_host_and_a_sum_of_gradients_is_named():
    _, schedule = timed(1, 2)
    spans = [(0, 1, "0F0"), (3, 4, "0B0"), (4, 5, "0F1"), (5, 6, "0B1"), (6, 8, "0REDUCE_GRAD")]
    timeline = Timeline(
        num_workers=1,
        spans=tuple(Span(worker=0, action=parse_action(text), start=a, end=b) for a, b, text in spans),
        update=(Phase(worker=0, name="optimizer", start=9, end=10),),
    )
    (rank,) = times_of_ranks(timeline, waits_of(schedule), {})
    assert rank.by_cause() == {HOST: 2, SUMS: 2, END: 1}
    assert rank.computing[UPDATE_NAME] == 1
    assert Op.REDUCE_GRAD in {span.action.op for span in timeline.spans}


@given(st.integers(2, 3), st.integers(2, 5), st.floats(0.05, 0.4))
@settings(max_examples=15)
def test_a_wait_is_for_a_message_of_its_own_batch_never_for_one_of_the_next(stages, microbatches, latency):
    """Held against the flows of the schedule, with frozen outputs for the next batch among its messages."""
    batch = 2 * microbatches
    profile = synthetic.transformer(blocks=6)
    setting = Setting(profile=profile, cluster=synthetic.cluster(stages), workload=synthetic.workload(batch))
    layout = Layout(batch=batch, stages=stages, microbatches=microbatches)
    schedule, _ = build_train_schedule(setting.graph, layout, pricing=pricing_of(setting), filler=filler_of(setting))
    all_flows = flows(schedule)
    assert any(flow.is_ahead for flow in all_flows)
    timeline = simulate(schedule, uniform_costs(schedule, latency=latency))
    sends = {span.action.slot: span for span in timeline.spans if span.action.op in SEND_OPS}
    starts = {str(span.action): span.start for span in timeline.spans}
    sent = defaultdict(list)
    for index, slots in serving(schedule, all_flows).items():
        if not all_flows[index].is_ahead:
            sent[str(all_flows[index].consumer)] += [sends[slot].start for slot in slots]
    count = 0
    for rank in times_of_ranks(timeline, waits_of(schedule), {}):
        for action in {wait.before for wait in rank.waits if wait.sender is not None}:
            own = [wait for wait in rank.waits if wait.before == action]
            transfer = sum(wait.seconds for wait in own if wait.cause == TRANSFER)
            began = max(min(wait.start for wait in own), *sent[action])
            assert abs(transfer - (starts[action] - began)) < 1e-9
            count += 1
    assert count


def test_a_measured_wait_is_for_a_message_that_was_sent_before_it_and_its_own_send_is_a_transfer():
    _, schedule = timed(2, 2)
    slots = {str(action).partition(">")[0]: str(action) for order in schedule.orders for action in order}
    spans = [
        [(0, 1, "0F0"), (1, 1.5, slots["0SEND_F0"]), (1.5, 2.5, "0F1"), (2.5, 2.6, slots["0SEND_F1"])],
        [(2, 3, "1F0"), (3, 5, "1B0"), (5, 5.25, slots["1SEND_B0"]), (6, 7, "1F1")],
    ]
    timeline = Timeline(
        num_workers=2,
        source="measured",
        spans=tuple(
            Span(worker=rank, action=parse_action(text), start=start, end=end)
            for rank, own in enumerate(spans)
            for start, end, text in own
        ),
    )
    first, second = times_of_ranks(timeline, waits_of(schedule), {})
    assert [(wait.cause, wait.before, wait.seconds) for wait in first.waits][:1] == [(TRANSFER, "0F1", 0.5)]
    assert [(wait.cause, wait.before, wait.seconds, wait.sender) for wait in second.waits] == [
        (WORK, "1F0", 1, 0), (TRANSFER, "1F0", 1, 0), (TRANSFER, "1F1", 0.25, None), (TRANSFER, "1F1", 0.75, 0),
    ]  # fmt: skip
