from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.strategies import costs_of, lookaheads, schedules
from passes.kept import assert_computes_kept

from diffusionpipe.errors import ConfigError, ScheduleError
from diffusionpipe.ir import COMPUTE_OPS, RECV_OPS, Action, Edge, Op, Pipeline, Placement, Range, Schedule, Share, Stage
from diffusionpipe.passes import communicate, connect, insert_encoding, reduce_gradients, replicate
from diffusionpipe.schedules import forward_only, gpipe, one_f_one_b
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.timing.legal import check

SKIP = Edge(producer=0, consumer=2, tensors=("skip",), gradients=("skip",))
CHAIN = (Edge(producer=0, consumer=1), Edge(producer=1, consumer=2))


def explicit(schedule, lookahead=1):
    return communicate(schedule, simulate(schedule, uniform_costs(schedule)), lookahead=lookahead)


def text(order):
    return " ".join(map(str, order))


def test_connect_replaces_edges_sizes_and_model_and_keeps_the_orders():
    schedule = connect(gpipe(3, 2), [*CHAIN, SKIP], microbatches=[4, 3], model="unet")
    check(schedule)
    (pipeline,) = schedule.placement.pipelines
    assert pipeline.edges == (*CHAIN, SKIP)
    assert pipeline.microbatches == (4, 3)
    assert pipeline.model == "unet"
    assert schedule.orders == gpipe(3, 2).orders


def test_connect_refuses_what_does_not_fit():
    with pytest.raises(ConfigError, match="edges 0->3 leave the pipeline"):
        connect(gpipe(3, 2), [Edge(producer=0, consumer=3)])
    with pytest.raises(ConfigError, match="3 micro-batch sizes for a schedule of 2"):
        connect(gpipe(3, 2), CHAIN, microbatches=[1, 1, 1])
    with pytest.raises(ScheduleError, match="before its messages"):
        connect(explicit(gpipe(3, 2)), CHAIN)


def test_replicas_have_equal_weights_disjoint_shares_and_workers_of_their_own():
    schedule = replicate(one_f_one_b(2, 3, 6), [2, 3])
    check(schedule)
    half, third = Fraction(1, 2), Fraction(1, 3)
    assert schedule.placement.stages == (
        Stage(worker=0, weights=0, share=Share(Fraction(0), half)),
        Stage(worker=1, weights=0, share=Share(half, Fraction(1))),
        Stage(worker=2, weights=1, share=Share(Fraction(0), third)),
        Stage(worker=3, weights=1, share=Share(third, 2 * third)),
        Stage(worker=4, weights=1, share=Share(2 * third, Fraction(1))),
    )
    pairs = [(e.producer, e.consumer) for e in schedule.placement.pipelines[0].edges]
    assert pairs == [(0, 2), (0, 3), (1, 3), (1, 4)]
    assert text(schedule.orders[1]) == "1F0 1F1 1B0 1F2 1B1 1B2"


def test_one_replica_of_each_changes_nothing():
    schedule = connect(gpipe(3, 2), [*CHAIN, SKIP])
    assert replicate(schedule, [1, 1, 1]) == schedule


def test_replicating_twice_divides_the_shares():
    twice = replicate(replicate(gpipe(1, 1, 4), [2]), [2, 2])
    assert [str(stage.share) for stage in twice.placement.stages] == ["0:1/4", "1/4:1/2", "1/2:3/4", "3/4:1"]
    check(twice)


def test_replicate_refuses_what_does_not_fit():
    with pytest.raises(ConfigError, match="use multiples of 2"):
        replicate(gpipe(2, 2, 3), [2, 1])
    with pytest.raises(ConfigError, match="3 numbers of replicas for 2 stages"):
        replicate(gpipe(2, 2), [1, 1, 1])
    with pytest.raises(ConfigError, match="at least 1"):
        replicate(gpipe(2, 2), [1, 0])
    with pytest.raises(ScheduleError, match="before all other passes"):
        replicate(explicit(gpipe(2, 2)), [1, 1])


def test_stages_that_share_a_worker_are_replicated_together():
    stages = (Stage(worker=0, weights=0), Stage(worker=1, weights=1), Stage(worker=0, weights=2))
    edges = tuple(Edge(producer=i, consumer=i + 1) for i in range(2))
    pipeline = Pipeline(stages=(0, 1, 2), microbatches=(2,), ops=frozenset({Op.F}), edges=edges)
    forward = [Action(stage=s, op=Op.F, microbatch=0) for s in range(3)]
    orders = ((forward[0], forward[2]), (forward[1],))
    schedule = Schedule(name="v", placement=Placement(stages=stages, pipelines=(pipeline,)), orders=orders)
    copied = replicate(schedule, [2, 1, 2])
    check(copied)
    assert [text(order) for order in copied.orders] == ["0F0 3F0", "1F0 4F0", "2F0"]
    check(explicit(copied))
    with pytest.raises(ConfigError, match="stages on worker 0 need equal numbers"):
        replicate(schedule, [2, 1, 1])


def encode(schedule, **options):
    defaults = {"block": 9, "outputs": {0: ("x",), 1: ("x", "y")}, "num_layers": 5, "max_chunk": 3}
    return insert_encoding(schedule, **(defaults | options))


def test_encoding_runs_first_in_chunks_on_every_worker():
    schedule = encode(gpipe(2, 2, 5))
    check(schedule)
    assert [text(order) for order in schedule.orders] == [
        "2ENCODE#0 2ENCODE#1 0F0 0F1 0B0 0B1",
        "3ENCODE#2 3ENCODE#3 1F0 1F1 1B0 1B1",
    ]
    assert [fill.samples for fill in schedule.fills] == [Range(0, 3), Range(3, 5), Range(5, 8), Range(8, 10)]
    assert {fill.layers for fill in schedule.fills} == {Range(0, 5)}
    frozen = schedule.placement.pipelines[1]
    assert (frozen.stages, frozen.microbatches, frozen.ops) == ((2, 3), (10,), frozenset({Op.ENCODE}))
    read = [(e.producer, e.consumer, e.tensors, e.gradients) for e in schedule.placement.pipelines[0].edges[1:]]
    assert read == [(2, 0, ("x",), ()), (3, 0, ("x",), ()), (2, 1, ("x", "y"), ()), (3, 1, ("x", "y"), ())]


def test_runs_of_layers_go_in_chunks_of_their_own():
    schedule = encode(gpipe(1, 2, 3), runs=[(Range(0, 2), 4), (Range(2, 5), 6)])
    check(schedule)
    assert text(schedule.orders[0]).startswith("1ENCODE#0 1ENCODE#1 1ENCODE#2 0F0")
    assert [(fill.layers, fill.samples) for fill in schedule.fills] == [
        (Range(0, 2), Range(0, 4)),
        (Range(0, 2), Range(4, 6)),
        (Range(2, 5), Range(0, 6)),
    ]


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(1, 7))
def test_equal_shares_differ_by_at_most_one_sample(num_stages, num_microbatches, size, max_chunk):
    schedule = encode(forward_only(num_stages, num_microbatches, size), max_chunk=max_chunk)
    check(schedule)
    encoded = Counter()
    for fill in schedule.fills:
        assert len(fill.samples) <= max_chunk
        encoded[schedule.placement.stages[fill.stage].worker] += len(fill.samples)
    counts = [encoded[worker] for worker in range(num_stages)]
    assert sum(counts) == num_microbatches * size
    assert max(counts) - min(counts) <= 1


def test_a_worker_may_encode_nothing():
    quarter = Fraction(1, 4)
    schedule = encode(gpipe(3, 2, 2), shares=[Share(quarter, Fraction(1)), None, Share(Fraction(0), quarter)])
    check(schedule)
    check(explicit(schedule))
    assert [s.worker for s in schedule.placement.stages[3:]] == [0, 2]
    assert not any(action.op is Op.ENCODE for action in schedule.orders[1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shares": [None]}, "1 shares for 2 workers"),
        ({"shares": [None, None]}, "end at sample 0 of 8"),
        ({"shares": [Share(), Share()]}, "leave a gap or overlap at sample 8"),
        ({"shares": [Share(Fraction(0), Fraction(1, 3)), None]}, "cannot be cut at 0 and 1/3"),
        ({"max_chunk": 0}, "max_chunk=0"),
        ({"num_layers": -1}, "num_layers=-1"),
    ],
)
def test_encoding_refuses_what_does_not_fit(options, words):
    with pytest.raises(ConfigError, match=words):
        encode(gpipe(2, 2, 4), **options)


def test_a_block_that_reads_nothing_frozen_gets_no_edges():
    schedule = encode(gpipe(2, 1, 4), outputs={1: ("y",)})
    assert {e.consumer for e in schedule.placement.pipelines[0].edges if e.producer >= 2} == {1}
    check(explicit(schedule))


def test_only_blocks_with_several_stages_are_reduced_without_data_parallelism():
    schedule = reduce_gradients(replicate(gpipe(2, 2, 2), [2, 1]), False)
    check(schedule)
    assert [order[-1].op for order in schedule.orders] == [Op.REDUCE_GRAD, Op.REDUCE_GRAD, Op.B]


def test_all_blocks_are_reduced_under_data_parallelism():
    schedule = reduce_gradients(encode(gpipe(3, 2, 2)), True)
    check(schedule)
    assert [text(order[-2:]) for order in schedule.orders] == [f"{s}B1 {s}REDUCE_GRAD" for s in range(3)]


def test_nothing_is_reduced_without_a_backward():
    schedule = replicate(forward_only(2, 2, 2), [2, 1])
    assert reduce_gradients(schedule, True) == schedule


def test_two_stages_of_one_worker_with_one_block_reduce_once_after_the_later():
    """Chimera's shape: each worker holds both blocks' halves of two directions."""
    stages = tuple(Stage(worker=w, weights=b) for w, b in ((0, 0), (1, 0), (1, 1), (0, 1)))
    pipelines = tuple(
        Pipeline(
            stages=s,
            microbatches=(1,),
            ops=frozenset({Op.F, Op.B}),
            edges=(Edge(producer=s[0], consumer=s[1]),),
            first_sample=first,
        )
        for s, first in (((0, 2), 0), ((1, 3), 1))
    )

    def do(stage, op):
        return Action(stage=stage, op=op, microbatch=0)

    orders = (
        (do(0, Op.F), do(3, Op.F), do(3, Op.B), do(0, Op.B)),
        (do(1, Op.F), do(2, Op.F), do(2, Op.B), do(1, Op.B)),
    )
    schedule = Schedule(name="chimera", placement=Placement(stages=stages, pipelines=pipelines), orders=orders)
    reduced = reduce_gradients(schedule, False)
    check(reduced)
    assert text(reduced.orders[0]) == "0F0 3F0 3B0 3REDUCE_GRAD 0B0 0REDUCE_GRAD"
    check(explicit(reduced))
    order = (do(0, Op.F), do(2, Op.F), do(1, Op.F), do(3, Op.F), do(2, Op.B), do(3, Op.B), do(0, Op.B), do(1, Op.B))
    together = Placement(stages=tuple(replace(stage, worker=0) for stage in stages), pipelines=pipelines)
    reduced = reduce_gradients(replace(schedule, placement=together, orders=(order,)), False)
    check(reduced)
    assert text(reduced.orders[0]) == "0F0 2F0 1F0 3F0 2B0 3B0 3REDUCE_GRAD 0B0 1B0 1REDUCE_GRAD"


def test_communication_of_a_small_1f1b_reads_as_expected():
    schedule = explicit(one_f_one_b(2, 2))
    assert [text(order) for order in schedule.orders] == [
        "0F0 0SEND_F0>0 0F1 0SEND_F1>1 0RECV_B0>2 0B0 0RECV_B1>3 0B1",
        "1RECV_F0>0 1F0 1RECV_F1>1 1B0 1SEND_B0>2 1F1 1B1 1SEND_B1>3",
    ]


@given(st.data(), lookaheads)
def test_communication_changes_no_compute_and_names_every_message_twice(data, lookahead):
    schedule = data.draw(schedules())
    costs = data.draw(costs_of(schedule))
    messages = communicate(schedule, simulate(schedule, costs), lookahead=lookahead)
    check(messages)
    assert_computes_kept(messages, schedule)


@given(st.data())
def test_messages_are_numbered_in_the_order_in_which_every_worker_has_them(data):
    schedule = explicit(data.draw(schedules()))
    for order in schedule.orders:
        slots = [action.slot for action in order if action.slot is not None and action.op is not Op.ENCODE]
        assert all(one < other for one, other in pairwise(slots))


@given(st.data(), lookaheads)
def test_at_most_lookahead_plus_one_computes_stand_between_a_receive_and_its_first_reader(data, lookahead):
    schedule = explicit(data.draw(schedules()), lookahead)
    for order in schedule.orders:
        computes = [action for action in order if action.op in COMPUTE_OPS]
        for i, action in enumerate(order):
            if action.op not in RECV_OPS:
                continue
            message = schedule.messages[action.slot]
            before = sum(a.op in COMPUTE_OPS for a in order[:i])
            readers = [
                k
                for k, a in enumerate(computes)
                if a.stage == message.destination
                and a.op in ((Op.B, Op.I) if message.is_gradient else (Op.F,))
                and reads(schedule, a, message)
            ]
            assert 0 <= readers[0] - before <= lookahead


def reads(schedule, action, message):
    if not schedule.placement.is_frozen(message.source):
        return action.microbatch == message.microbatch
    return bool(schedule.placement.rows(action.stage, action.microbatch).intersection(message.samples))


def test_frozen_outputs_travel_once_per_encoder_worker_and_micro_batch():
    schedule = explicit(encode(gpipe(2, 2, 4), outputs={0: ("x",), 1: ("x", "y")}))
    frozen = [m for m in schedule.messages if m.source >= 2]
    assert [(m.source, m.destination, str(m.samples), m.tensors) for m in frozen] == [
        (2, 1, "0:4", ("x", "y")),
        (3, 0, "4:8", ("x",)),
    ]


def test_stages_of_one_worker_receive_a_frozen_tensor_once():
    stages = (Stage(worker=0, weights=0), Stage(worker=1, weights=1), Stage(worker=0, weights=2))
    edges = tuple(Edge(producer=i, consumer=i + 1) for i in range(2))
    pipeline = Pipeline(stages=(0, 1, 2), microbatches=(2,), ops=frozenset({Op.F}), edges=edges)
    forward = [Action(stage=s, op=Op.F, microbatch=0) for s in range(3)]
    orders = ((forward[0], forward[2]), (forward[1],))
    schedule = Schedule(name="v", placement=Placement(stages=stages, pipelines=(pipeline,)), orders=orders)
    schedule = encode(schedule, outputs={0: ("x",), 2: ("x", "y")}, shares=[None, Share()])
    schedule = explicit(schedule)
    check(schedule)
    (frozen,) = (m for m in schedule.messages if m.source == 3)
    assert (frozen.destination, frozen.tensors, frozen.samples) == (0, ("x", "y"), Range(0, 2))


def test_an_edge_without_gradient_sends_nothing_back():
    schedule = connect(gpipe(2, 2), [Edge(producer=0, consumer=1, gradients=())])
    assert not any(message.is_gradient for message in explicit(schedule).messages)


def test_stages_on_one_worker_exchange_no_messages():
    schedule = gpipe(2, 2)
    placement = schedule.placement
    together = replace(
        schedule,
        placement=replace(placement, stages=tuple(replace(stage, worker=0) for stage in placement.stages)),
        orders=(schedule.orders[0][:2] + schedule.orders[1] + schedule.orders[0][2:],),
    )
    assert explicit(together) == together


@given(st.data(), st.integers(0, 2**31))
def test_a_timeline_with_wrong_clocks_still_gives_a_legal_order(data, seed):
    schedule = data.draw(schedules())
    timeline = simulate(schedule, data.draw(costs_of(schedule)))
    skew = [(seed >> worker) % 7 * 10 for worker in range(schedule.num_workers)]
    spans = tuple(replace(s, start=s.start + skew[s.worker], end=s.end + skew[s.worker]) for s in timeline.spans)
    check(communicate(schedule, replace(timeline, spans=spans)))


@given(st.data())
def test_actions_without_duration_still_give_a_legal_order(data):
    schedule = data.draw(schedules())
    costs = uniform_costs(schedule, forward=0, backward=0, encode=0)
    check(communicate(schedule, simulate(schedule, costs)))


def test_communicate_refuses_what_it_cannot_order():
    schedule = gpipe(2, 2)
    timeline = simulate(schedule, uniform_costs(schedule))
    with pytest.raises(ConfigError, match="lookahead=-1"):
        communicate(schedule, timeline, lookahead=-1)
    with pytest.raises(ScheduleError, match="explicit already"):
        communicate(communicate(schedule, timeline), timeline)
    with pytest.raises(ScheduleError, match="another schedule's"):
        communicate(gpipe(3, 3), timeline)
