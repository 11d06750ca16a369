from collections import Counter
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.strategies import costs_of, lookaheads, relabelled, schedules, streams

from diffusionpipe.errors import ScheduleError
from diffusionpipe.ir import (
    MESSAGE_OPS,
    RECV_OPS,
    SEND_OPS,
    Action,
    Edge,
    Message,
    Op,
    Pipeline,
    Placement,
    Range,
    Schedule,
    Share,
    Stage,
    parse_action,
)
from diffusionpipe.ir.flows import TIMED_OPS
from diffusionpipe.passes import communicate, insert_encoding, reduce_gradients, replicate
from diffusionpipe.schedules import forward_only, gpipe, one_f_one_b
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.timing import Streams
from diffusionpipe.timing.legal import check


def actions(text):
    return tuple(parse_action(word) for word in text.split())


def explicit(schedule, lookahead=1):
    return communicate(schedule, simulate(schedule, uniform_costs(schedule)), lookahead=lookahead)


def problems(schedule, **options):
    with pytest.raises(ScheduleError) as caught:
        check(schedule, **options)
    return caught.value.problems


def with_order(schedule, worker, order):
    return replace(schedule, orders=(*schedule.orders[:worker], tuple(order), *schedule.orders[worker + 1 :]))


def with_pipeline(schedule, **changes):
    placement = schedule.placement
    pipelines = (replace(placement.pipelines[0], **changes), *placement.pipelines[1:])
    return replace(schedule, placement=replace(placement, pipelines=pipelines))


def with_stage(schedule, index, **changes):
    stages = list(schedule.placement.stages)
    stages[index] = replace(stages[index], **changes)
    return replace(schedule, placement=replace(schedule.placement, stages=tuple(stages)))


def swapped(order, i, j):
    order = list(order)
    order[i], order[j] = order[j], order[i]
    return tuple(order)


@given(st.data(), lookaheads)
def test_every_generator_and_every_pass_is_legal_under_both_stream_rules(data, lookahead):
    schedule = data.draw(schedules())
    check(schedule)
    costs = data.draw(costs_of(schedule))
    messages = communicate(schedule, simulate(schedule, costs), lookahead=lookahead)
    for rule in Streams:
        check(messages, streams=rule)


@given(st.data())
def test_relabelling_workers_keeps_a_schedule_legal(data):
    schedule = data.draw(schedules())
    permutation = data.draw(st.permutations(range(schedule.num_workers)))
    check(relabelled(schedule, permutation))
    check(explicit(relabelled(schedule, permutation)))
    check(relabelled(explicit(schedule), permutation), streams=Streams.PAIR)


@given(st.data())
def test_a_dropped_action_is_found(data):
    schedule = explicit(data.draw(schedules()))
    worker, action = data.draw(st.sampled_from(list(schedule.actions())))
    broken = with_order(schedule, worker, [a for a in schedule.orders[worker] if a != action])
    block = schedule.placement.stages[action.stage].weights
    is_alone = action.op is Op.REDUCE_GRAD and [s.weights for s in schedule.placement.stages].count(block) == 1
    if is_alone:
        check(broken)  # nobody else reduces this block: without the reduction it is whole again
        return
    found = problems(broken)
    if action.op is Op.REDUCE_GRAD:
        assert any(f"worker {worker}: the gradients of block {block}" in line for line in found)
    else:
        assert any(line.startswith(f"worker {worker}: {action} ") for line in found)


@given(st.data())
def test_a_repeated_action_is_found(data):
    schedule = explicit(data.draw(schedules()))
    worker, action = data.draw(st.sampled_from(list(schedule.actions())))
    assert any(
        f"worker {worker}: " in line
        for line in problems(with_order(schedule, worker, [*schedule.orders[worker], action]))
    )


@given(st.data())
def test_an_action_on_a_wrong_worker_is_found(data):
    schedule = explicit(data.draw(schedules().filter(lambda s: s.num_workers > 1)))
    worker, action = data.draw(st.sampled_from([pair for pair in schedule.actions() if pair[1].op in TIMED_OPS]))
    other = (worker + 1) % schedule.num_workers
    moved = with_order(schedule, worker, [a for a in schedule.orders[worker] if a != action])
    moved = with_order(moved, other, [*moved.orders[other], action])
    assert f"worker {other}: {action} belongs to worker {worker}, where stage {action.stage} lives" in problems(moved)


@given(st.data())
def test_swapping_two_messages_at_one_end_of_a_channel_is_found(data):
    schedule = explicit(data.draw(schedules()))
    ops = data.draw(st.sampled_from([SEND_OPS, RECV_OPS]))
    pairs = []
    for worker, order in enumerate(schedule.orders):
        places = [i for i, a in enumerate(order) if a.op in ops]
        for i, j in pairwise(places):
            ends = [schedule.messages[order[k].slot] for k in (i, j)]
            homes = [tuple(schedule.placement.stages[s].worker for s in (m.source, m.destination)) for m in ends]
            if homes[0] == homes[1]:
                pairs.append((worker, i, j))
    if pairs:
        worker, i, j = data.draw(st.sampled_from(pairs))
        for rule in Streams:
            found = problems(with_order(schedule, worker, swapped(schedule.orders[worker], i, j)), streams=rule)
            assert any("the order differs" in line for line in found)


@given(st.data())
def test_swapping_a_forward_with_its_backward_is_found(data):
    schedule = data.draw(schedules())
    backwards = [(w, a) for w, a in schedule.actions() if a.op is Op.B]
    if backwards:
        worker, backward = data.draw(st.sampled_from(backwards))
        forward = replace(backward, op=Op.F)
        order = schedule.orders[worker]
        broken = with_order(schedule, worker, swapped(order, order.index(forward), order.index(backward)))
        assert f"worker {worker}: {backward} comes before {forward}" in problems(broken)


@given(st.data(), streams)
def test_any_order_that_check_accepts_runs_to_its_end(data, rule):
    """Swap any two neighbours: either it is refused or the simulator, too, comes to the end."""
    schedule = explicit(data.draw(schedules()))
    worker = data.draw(st.integers(0, schedule.num_workers - 1))
    order = schedule.orders[worker]
    if len(order) > 1:
        i = data.draw(st.integers(0, len(order) - 2))
        schedule = with_order(schedule, worker, swapped(order, i, i + 1))
        with suppress(ScheduleError):
            check(schedule, streams=rule)
            assert simulate(schedule, uniform_costs(schedule), streams=rule).makespan > 0


def crossing():
    """Both workers send first and receive then, as in Chimera: two pipelines in opposite directions."""
    stages = tuple(Stage(worker=w, weights=i) for i, w in enumerate((0, 1, 1, 0)))
    pipelines = tuple(
        Pipeline(stages=s, microbatches=(1, 1), ops=frozenset({Op.F}), edges=(Edge(producer=s[0], consumer=s[1]),))
        for s in ((0, 1), (2, 3))
    )
    messages = tuple(
        Message(source=s, destination=d, microbatch=k, samples=Range(0, 1), tensors=("hidden",))
        for s, d in ((0, 1), (2, 3))
        for k in range(2)
    )
    return Schedule(
        name="crossing",
        placement=Placement(stages=stages, pipelines=pipelines),
        orders=(
            actions("0F0 0SEND_F0>0 3RECV_F0>2 3F0 0F1 0SEND_F1>1 3RECV_F1>3 3F1"),
            actions("2F0 2SEND_F0>2 1RECV_F0>0 1F0 2F1 2SEND_F1>3 1RECV_F1>1 1F1"),
        ),
        messages=messages,
    )


def test_opposite_transfers_wait_for_each_other_only_where_hosts_wait_for_transfers():
    for rule in (Streams.PAIR, Streams.DIRECTION):
        check(crossing(), streams=rule)
    assert any("worker 0 waits at" in line for line in problems(crossing(), streams=Streams.HOST))


def test_messages_are_checked_on_the_strictest_machine_unless_another_is_named():
    assert problems(crossing()) == problems(crossing(), streams=Streams.HOST)


def test_a_wait_in_a_circle_through_receives_is_found_on_both_workers():
    schedule = crossing()
    orders = (
        actions("3RECV_F0>2 3F0 0F0 0SEND_F0>0 0F1 0SEND_F1>1 3RECV_F1>3 3F1"),
        actions("1RECV_F0>0 1F0 2F0 2SEND_F0>2 2F1 2SEND_F1>3 1RECV_F1>1 1F1"),
    )
    found = problems(replace(schedule, orders=orders), streams=Streams.DIRECTION)
    assert any("worker 0 waits at 3F0" in line for line in found)
    assert any("worker 1 waits at 1F0" in line for line in found)
    assert any("worker 0 waits at 3RECV_F0>2" in line for line in problems(replace(schedule, orders=orders)))


def test_two_workers_with_sends_and_receives_crossed_are_stuck_unless_sends_are_buffered():
    """Worker 0 sends 0 and then 1; worker 1 computes on 1 before it asks for 0. Buffers would hold 0 until then."""
    schedule = explicit(forward_only(2, 2))
    crossed = replace(
        schedule, orders=(actions("0F0 0F1 0SEND_F0>0 0SEND_F1>1"), actions("1RECV_F1>1 1F1 1RECV_F0>0 1F0"))
    )
    for rule in (Streams.PAIR, Streams.DIRECTION):
        found = problems(crossed, streams=rule)
        assert found[0] == "worker 0 comes to 0SEND_F0>0 where worker 1 comes to 1RECV_F1>1: the order differs"
        assert "deadlock: worker 1 waits at 1F1 for its inputs" in found
        assert any("worker 0 has 0SEND_F0>0 at the head of its stream" in line for line in found)
        assert any("worker 1 has 1RECV_F1>1 at the head of its stream" in line for line in found)


def test_a_deadlock_that_only_unbuffered_sends_on_one_stream_show_is_found():
    """Every channel has one order at both ends. Worker 0 sends a and then b; worker 1 takes a behind a compute that
    waits for c, which worker 2 sends once it has b, which stands behind a on worker 0's stream. With buffers, or with
    a stream for each pair, b passes.
    """
    stages = tuple(Stage(worker=w, weights=i) for i, w in enumerate((0, 1, 2, 1)))
    edges = (
        Edge(producer=0, consumer=3, tensors=("a",), gradients=()),
        Edge(producer=0, consumer=2, tensors=("b",), gradients=()),
        Edge(producer=2, consumer=1, tensors=("c",), gradients=()),
    )
    pipeline = Pipeline(stages=(0, 2, 1, 3), microbatches=(1,), ops=frozenset({Op.F}), edges=edges)
    messages = tuple(
        Message(source=e.producer, destination=e.consumer, microbatch=0, samples=Range(0, 1), tensors=e.tensors)
        for e in edges
    )
    schedule = Schedule(
        name="overtaken",
        placement=Placement(stages=stages, pipelines=(pipeline,)),
        orders=(
            actions("0F0 0SEND_F0>0 0SEND_F0>1"),
            actions("1RECV_F0>2 1F0 3RECV_F0>0 3F0"),
            actions("2RECV_F0>1 2F0 2SEND_F0>2"),
        ),
        messages=messages,
    )
    check(schedule, streams=Streams.PAIR)
    found = problems(schedule, streams=Streams.DIRECTION)
    assert "deadlock: worker 1 waits at 1F0 for its inputs" in found
    assert "deadlock: worker 2 waits at 2F0 for its inputs" in found
    assert "deadlock: worker 0 has 0SEND_F0>0 at the head of its stream towards higher workers" in found


def test_all_problems_are_collected():
    schedule = one_f_one_b(3, 3)
    broken = with_order(schedule, 0, schedule.orders[0][1:])
    broken = with_order(broken, 2, [*schedule.orders[2], parse_action("2F7")])
    assert problems(broken) == (
        "worker 0: 0F0 is missing",
        "worker 2: 2F7 is not part of the work of stage 2",
    )


def test_a_step_stands_behind_all_gradients_of_its_batch():
    schedule = one_f_one_b(2, 2)
    order, step = schedule.orders[0], parse_action("0STEP")
    assert problems(with_order(schedule, 0, [step, *order, step])) == (
        "worker 0: 0STEP comes before any gradient of its batch",
    )
    assert problems(with_order(schedule, 0, [*order[:-1], step, order[-1]])) == (
        "worker 0: no STEP takes in the gradient of 0B1",
    )


def test_a_circle_across_workers_is_found():
    found = problems(with_order(gpipe(2, 2), 0, actions("0F0 0B0 0F1 0B1")))
    assert "deadlock: worker 0 waits at 0B0 for its inputs" in found
    assert "deadlock: worker 1 waits at 1F1 for its inputs" in found


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"stages": (0,)}, "stage 1 is in 0 pipelines"),
        ({"stages": (0, 1, 5)}, "a pipeline names stage 5; there are 2 stages"),
        ({"ops": frozenset({Op.F, Op.W})}, "pipeline 0 has ops F W; legal are"),
        ({"microbatches": (4, 0)}, "each needs at least 1"),
        ({"edges": (Edge(producer=0, consumer=0),)}, "edge 0->0 leads from a stage to itself"),
        ({"edges": (Edge(producer=0, consumer=1, gradients=("other",)),)}, "tensors that it does not carry"),
        ({"edges": (Edge(producer=0, consumer=1),) * 2}, "2 edges lead from stage 0 to stage 1"),
        (
            {"edges": (Edge(producer=0, consumer=7),)},
            "edge 0->7 must lead from this pipeline, its probe or a frozen one",
        ),
    ],
)
def test_an_unsound_pipeline_is_found(change, text):
    assert any(text in line for line in problems(with_pipeline(one_f_one_b(2, 2, 4), **change)))


def test_a_share_inside_a_sample_is_found():
    schedule = with_pipeline(replicate(gpipe(1, 2, 2), [2]), microbatches=(2, 3))
    assert any("a micro-batch of 3 samples cannot be cut" in line for line in problems(schedule))


def test_replicas_that_overlap_or_leave_samples_out_are_found():
    schedule = replicate(gpipe(1, 2, 4), [2])
    for share in (Share(Fraction(0), Fraction(3, 4)), Share(Fraction(0), Fraction(1, 4))):
        assert any("do not cover every sample once" in line for line in problems(with_stage(schedule, 0, share=share)))


def test_an_edge_that_one_replica_lacks_is_found():
    schedule = replicate(gpipe(2, 1, 4), [2, 1])
    edges = schedule.placement.pipelines[0].edges[1:]
    assert "worker 2: 2F0 reads 'hidden' of block 0 for 4 samples, edges bring 2" in problems(
        with_pipeline(schedule, edges=edges)
    )


def test_a_stage_on_a_worker_without_an_order_is_found():
    assert "stage 1 is on worker 4; there are orders for 2 workers" in problems(with_stage(gpipe(2, 2), 1, worker=4))


def encoded(max_chunk=2):
    return insert_encoding(gpipe(2, 2, 4), block=9, outputs={0: ("x",), 1: ("y",)}, num_layers=3, max_chunk=max_chunk)


def with_fill(schedule, slot, **changes):
    fills = list(schedule.fills)
    fills[slot] = replace(fills[slot], **changes)
    return replace(schedule, fills=tuple(fills))


def test_fills_that_miss_repeat_or_borrow_samples_are_found():
    schedule = encoded()
    missing = problems(with_fill(schedule, 0, samples=Range(0, 1)))
    assert any("encoder stage 2 run layers none on sample 1" in line for line in missing)
    repeated = problems(with_fill(schedule, 0, samples=Range(0, 3)))
    assert any("run layers 0:3, 0:3 on sample 2" in line for line in repeated)
    borrowed = problems(with_fill(schedule, 3, samples=Range(6, 9)))
    assert any("take sample 8, which is not in its share 4:8" in line for line in borrowed)
    skipped = problems(with_fill(schedule, 0, layers=Range(1, 3)))
    assert any("run layers 1:3 on sample 0; each of 0:3" in line for line in skipped)


def test_layers_may_be_split_but_must_run_in_order():
    schedule = encoded(max_chunk=4)
    split = with_fill(schedule, 0, layers=Range(0, 1))
    rest = replace(split.fills[0], layers=Range(1, 3))
    split = replace(split, fills=(*split.fills, rest))
    late = Action(stage=2, op=Op.ENCODE, slot=2)
    check(with_order(split, 0, [split.orders[0][0], late, *split.orders[0][1:]]))
    found = problems(with_order(split, 0, [late, *split.orders[0]]))
    assert found == ("worker 0: 2ENCODE#0 runs layers 0:1 after later ones of the same samples",)


def test_a_forward_before_the_frozen_work_of_its_own_worker_is_found():
    schedule = encoded()
    order = schedule.orders[0]
    late = with_order(schedule, 0, order[2:] + order[:2])
    assert "deadlock: worker 0 waits at 0F0 for its inputs" in problems(late)


def test_an_early_a_missing_and_a_needless_reduction_are_found():
    schedule = reduce_gradients(replicate(gpipe(2, 2, 2), [2, 1]), False)
    check(schedule)
    early = problems(with_order(schedule, 0, swapped(schedule.orders[0], -1, -2)))
    assert early == ("worker 0: 0B1 comes after the reduction of block 0",)
    assert problems(with_order(schedule, 1, schedule.orders[1][:-1])) == (
        "worker 1: the gradients of block 0 are reduced 0 times, not once",
    )
    frozen = with_order(encoded(), 0, [*encoded().orders[0], parse_action("2REDUCE_GRAD")])
    assert any("reduces a stage that has no gradients" in line for line in problems(frozen))


def test_reductions_in_different_orders_on_two_workers_are_a_deadlock():
    """Stages 0 and 1 share a block with stages 2 and 3: two workers must reduce their two blocks in one order."""
    stages = tuple(
        Stage(worker=i % 2, weights=block, share=Share(Fraction(i % 2, 2), Fraction(i % 2 + 1, 2)))
        for block in range(2)
        for i in range(2)
    )
    pipeline = Pipeline(stages=(0, 1, 2, 3), microbatches=(2,), ops=frozenset({Op.F, Op.B}))
    same = Schedule(
        name="two blocks",
        placement=Placement(stages=stages, pipelines=(pipeline,)),
        orders=(
            actions("0F0 2F0 2B0 0B0 2REDUCE_GRAD 0REDUCE_GRAD"),
            actions("1F0 3F0 3B0 1B0 3REDUCE_GRAD 1REDUCE_GRAD"),
        ),
    )
    check(same)
    other = with_order(same, 1, actions("1F0 3F0 3B0 1B0 1REDUCE_GRAD 3REDUCE_GRAD"))
    assert any("stream of reductions" in line for line in problems(other))


def test_a_message_with_wrong_samples_tensors_or_ends_is_found():
    schedule = explicit(gpipe(2, 2, 4))

    def changed(**changes):
        return replace(schedule, messages=(replace(schedule.messages[0], **changes), *schedule.messages[1:]))

    assert any("samples 0:4 of 'hidden', messages bring 0:3" in p for p in problems(changed(samples=Range(0, 3))))
    assert any("reads from stage 0 no 'other'" in p for p in problems(changed(tensors=("hidden", "other"))))
    assert any("is not an end of message 0" in p for p in problems(changed(is_gradient=True)))
    assert any("message 0 starts and ends on worker 0" in p for p in problems(changed(destination=0)))


def test_a_message_that_nobody_reads_is_found():
    schedule = explicit(gpipe(3, 1))
    spare = Message(source=0, destination=2, microbatch=0, samples=Range(0, 1), tensors=("hidden",))
    slot = len(schedule.messages)
    schedule = replace(schedule, messages=(*schedule.messages, spare))
    schedule = with_order(schedule, 0, [*schedule.orders[0], Action(stage=0, op=Op.SEND_F, microbatch=0, slot=slot)])
    schedule = with_order(schedule, 2, [*schedule.orders[2], Action(stage=2, op=Op.RECV_F, microbatch=0, slot=slot)])
    assert problems(schedule) == (f"worker 0: message {slot} (0SEND_F0>{slot}) has no reader",)


def test_a_send_before_its_producer_and_a_receive_after_its_reader_are_found():
    schedule = explicit(gpipe(2, 1))
    assert [str(a) for a in schedule.orders[0]][:2] == ["0F0", "0SEND_F0>0"]
    assert any(
        "worker 0: 0SEND_F0>0 comes before 0F0" in line
        for line in problems(with_order(schedule, 0, swapped(schedule.orders[0], 0, 1)))
    )
    assert any(
        "worker 1: 1RECV_F0>0 comes after 1F0" in line
        for line in problems(with_order(schedule, 1, swapped(schedule.orders[1], 0, 1)))
    )


def test_every_message_of_a_legal_schedule_has_two_ends():
    schedule = explicit(one_f_one_b(3, 4))
    counts = Counter(action.slot for _, action in schedule.actions() if action.op in MESSAGE_OPS)
    assert counts == dict.fromkeys(range(len(schedule.messages)), 2)
