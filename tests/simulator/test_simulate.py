from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.strategies import costs_of, durations, lookaheads, relabelled, schedules, streams, trainers

from diffusionpipe.costs import Costs, Link, StageCosts
from diffusionpipe.errors import ScheduleError
from diffusionpipe.ir import Action, Edge, Op, Pipeline, Placement, Schedule, Stage, parse_action
from diffusionpipe.ir.flows import TIMED_OPS
from diffusionpipe.passes import communicate, insert_encoding, reduce_gradients, replicate
from diffusionpipe.schedules import forward_only, gpipe, one_f_one_b
from diffusionpipe.simulator import activations_in_flight, simulate, uniform_costs
from diffusionpipe.timing import Streams

SMALL = [(p, m) for p in range(1, 9) for m in range(1, 17)]


def explicit(schedule, costs, lookahead=1):
    return communicate(schedule, simulate(schedule, costs), lookahead=lookahead)


def spans_of(timeline):
    return {span.action: span for span in timeline.spans}


@pytest.mark.parametrize("family", [gpipe, one_f_one_b])
def test_makespan_of_uniform_stages_is_the_published_formula(family):
    for p, m in SMALL:
        schedule = family(p, m)
        timeline = simulate(schedule, uniform_costs(schedule, forward=3, backward=5))
        assert timeline.makespan == (m + p - 1) * (3 + 5)
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "m", "time"), [(2, 4, 15), (4, 8, 33), (4, 12, 45), (8, 16, 69), (8, 24, 93)])
def test_1f1b_reaches_the_golden_times_for_unit_costs(p, m, time):
    schedule = one_f_one_b(p, m)
    assert simulate(schedule, uniform_costs(schedule, forward=1, backward=2)).makespan == time


def test_forward_only_takes_m_plus_p_minus_1_forwards():
    for p, m in SMALL:
        schedule = forward_only(p, m)
        assert simulate(schedule, uniform_costs(schedule, forward=7)).makespan == (m + p - 1) * 7


def test_activations_in_flight_are_those_of_the_papers():
    for p, m in SMALL:
        assert activations_in_flight(one_f_one_b(p, m)) == tuple(min(p - s, m) for s in range(p))
        assert activations_in_flight(gpipe(p, m)) == (m,) * p
        assert activations_in_flight(forward_only(p, m)) == (1,) * p


def uneven_chain(data, p):
    """Costs of stages 0, ..., p - 1 and the latency of the link behind each but the last."""
    stages = tuple(StageCosts(forward=data.draw(durations), backward=data.draw(durations)) for _ in range(p))
    latencies = [data.draw(st.integers(0, 9)) for _ in range(p - 1)]
    links = {pair: Link(c) for s, c in enumerate(latencies) for pair in ((s, s + 1), (s + 1, s))}
    return Costs(stages=stages, links=links), latencies


@given(st.integers(1, 6), st.integers(1, 8), st.data())
def test_1f1b_without_latency_takes_at_most_m_plus_p_minus_1_of_its_slowest_stage(p, m, data):
    costs, _ = uneven_chain(data, p)
    slowest = max(stage.forward + stage.backward for stage in costs.stages)
    assert simulate(one_f_one_b(p, m), replace(costs, links={})).makespan <= (m + p - 1) * slowest


@given(st.integers(1, 6), st.integers(1, 8), st.data())
def test_1f1b_that_counts_links_as_stages_stays_below_their_bound(p, m, data):
    """(m + 2p - 2) T0 of SPP and DiffusionPipe: the orders are every second one of 1F1B over 2p - 1 stages."""
    schedule = one_f_one_b(p, m)
    orders = tuple(
        tuple(replace(action, stage=action.stage // 2) for action in order)
        for order in one_f_one_b(2 * p - 1, m).orders[::2]
    )
    costs, latencies = uneven_chain(data, p)
    slowest = max([stage.forward + stage.backward for stage in costs.stages] + [2 * c for c in latencies])
    assert simulate(replace(schedule, orders=orders), costs).makespan <= (m + 2 * p - 2) * slowest


def test_plain_1f1b_can_exceed_the_bound_with_links_as_stages():
    """Its warm-up of p - s - 1 forwards hides no latency: here T0 is 2 and the bound 5 T0 = 10."""
    schedule = one_f_one_b(2, 3)
    assert simulate(schedule, uniform_costs(schedule, forward=1, backward=1, latency=1)).makespan == 12


@given(st.integers(1, 6), st.integers(1, 8), st.data())
def test_plain_1f1b_takes_at_most_m_plus_p_minus_1_of_its_slowest_stage_with_its_sends(p, m, data):
    costs, latencies = uneven_chain(data, p)
    right, left = [*latencies, 0], [0, *latencies]
    slowest = max(s.forward + s.backward + right[i] + left[i] for i, s in enumerate(costs.stages))
    assert simulate(one_f_one_b(p, m), costs).makespan <= (m + p - 1) * slowest


@given(st.data(), st.booleans(), lookaheads, streams)
def test_makespan_is_at_least_any_workers_work_and_any_path(data, is_explicit, lookahead, stream):
    schedule = data.draw(schedules())
    costs = data.draw(costs_of(schedule))
    if is_explicit:
        schedule = explicit(schedule, costs, lookahead)
    timeline = simulate(schedule, costs, streams=stream)
    assert timeline.makespan >= max(timeline.busy(worker) for worker in range(schedule.num_workers))
    trained = schedule.placement.pipelines[0]
    forward_path = {stage: costs.stages[stage].forward for stage in trained.stages}
    for stage in trained.stages:
        arrivals = [
            forward_path[edge.producer] + costs.link.latency
            for edge in trained.edges
            if edge.consumer == stage and edge.producer in forward_path
        ]
        forward_path[stage] += max(arrivals, default=0)
    assert timeline.makespan >= max(forward_path.values())


@given(st.data(), lookaheads, streams)
def test_spans_of_a_worker_never_overlap_and_keep_their_order(data, lookahead, stream):
    schedule = data.draw(schedules())
    costs = data.draw(costs_of(schedule))
    timeline = simulate(explicit(schedule, costs, lookahead), costs, streams=stream)
    for worker in range(timeline.num_workers):
        computes = [s for s in timeline.spans if s.worker == worker and s.action.op in TIMED_OPS]
        assert all(one.end <= other.start for one, other in pairwise(computes))


@given(st.data(), lookaheads, streams)
def test_no_action_starts_before_its_input_has_arrived(data, lookahead, stream):
    schedule = data.draw(schedules())
    costs = data.draw(costs_of(schedule))
    spans = spans_of(simulate(explicit(schedule, costs, lookahead), costs, streams=stream))
    trained = schedule.placement.pipelines[0]
    for edge in trained.edges:
        if edge.producer not in trained.stages:
            continue
        for k in range(len(trained.microbatches)):
            first = spans[Action(stage=edge.producer, op=Op.F, microbatch=k)]
            second = spans[Action(stage=edge.consumer, op=Op.F, microbatch=k)]
            latency = costs.link.latency if first.worker != second.worker else 0
            assert first.end + latency <= second.start


@given(st.data(), lookaheads, streams)
def test_transfers_of_no_time_change_the_start_of_no_action(data, lookahead, stream):
    schedule = data.draw(schedules())
    costs = data.draw(costs_of(schedule, max_latency=0))
    implicit = simulate(schedule, costs)
    timeline = simulate(communicate(schedule, implicit, lookahead=lookahead), costs, streams=stream)
    found = spans_of(timeline)
    assert timeline.makespan == implicit.makespan
    assert all(found[span.action].start == span.start for span in implicit.spans)


@given(st.data(), lookaheads)
def test_a_stream_for_every_pair_is_never_slower_than_one_per_direction(data, lookahead):
    schedule = data.draw(schedules())
    costs = data.draw(costs_of(schedule))
    messages = explicit(schedule, costs, lookahead)
    pair = simulate(messages, costs, streams=Streams.PAIR)
    direction = simulate(messages, costs, streams=Streams.DIRECTION)
    assert simulate(schedule, costs).makespan <= pair.makespan <= direction.makespan


@given(st.data())
def test_relabelling_workers_changes_no_time(data):
    schedule = data.draw(schedules())
    costs = data.draw(costs_of(schedule))
    permutation = data.draw(st.permutations(range(schedule.num_workers)))
    messages = explicit(schedule, costs)
    for one, rule in ((schedule, Streams.DIRECTION), (messages, Streams.PAIR)):
        found = spans_of(simulate(relabelled(one, permutation), costs, streams=rule))
        for action, span in spans_of(simulate(one, costs, streams=rule)).items():
            assert (found[action].start, found[action].end) == (span.start, span.end)
            assert found[action].worker == permutation[span.worker]


@given(st.data(), trainers)
def test_memory_peaks_at_the_activations_in_flight_and_ends_at_zero(data, family):
    schedule = data.draw(schedules(families=st.just(family)))
    costs = data.draw(costs_of(schedule))
    size = data.draw(durations)
    stages = tuple(replace(stage, activation=size, kept_after_input_grad=size) for stage in costs.stages)
    timeline = simulate(schedule, replace(costs, stages=stages))
    in_flight = activations_in_flight(schedule)
    for worker in range(schedule.num_workers):
        assert timeline.peak_memory(worker) == in_flight[worker] * size
        assert [sample.held for sample in timeline.memory if sample.worker == worker][-1] == 0


def test_a_split_backward_releases_in_two_steps():
    pipeline = Pipeline(stages=(0,), microbatches=(1,), ops=frozenset({Op.F, Op.I, Op.W}))
    placement = Placement(stages=(Stage(worker=0, weights=0),), pipelines=(pipeline,))
    schedule = Schedule(name="split", placement=placement, orders=(tuple(map(parse_action, ("0F0", "0I0", "0W0"))),))
    stage = StageCosts(forward=2, input_grad=3, weight_grad=4, activation=10, kept_after_input_grad=6)
    memory = simulate(schedule, Costs(stages=(stage,))).memory
    assert [(sample.time, sample.held) for sample in memory] == [(0, 10), (5, 6), (9, 0)]


def test_fractions_stay_exact():
    schedule = one_f_one_b(3, 4)
    third = Fraction(1, 3)
    messages = explicit(schedule, uniform_costs(schedule, forward=third, backward=2 * third, latency=third / 2))
    costs = uniform_costs(messages, forward=third, backward=2 * third)
    makespan = simulate(messages, costs).makespan
    assert isinstance(makespan, Fraction)
    assert makespan == 6


def test_a_transfer_takes_latency_and_bytes_over_bandwidth():
    schedule = forward_only(2, 1, microbatch_size=6)
    stage = StageCosts(forward=1)
    costs = Costs(stages=(stage, stage), tensor_bytes={"hidden": 4}, link=Link(latency=3, bandwidth=8))
    assert simulate(schedule, costs).makespan == 1 + 3 + 6 * 4 / 8 + 1
    assert simulate(explicit(schedule, costs), costs).makespan == 1 + 3 + 6 * 4 / 8 + 1


def test_transfers_of_one_stream_run_one_after_the_other():
    """Stage 0 sends to stages 1 and 2 at once: side by side on streams of pairs, one by one on a direction's."""
    stages = tuple(Stage(worker=s, weights=s) for s in range(3))
    edges = (Edge(producer=0, consumer=1), Edge(producer=0, consumer=2))
    pipeline = Pipeline(stages=(0, 1, 2), microbatches=(1,), ops=frozenset({Op.F}), edges=edges)
    orders = tuple((Action(stage=s, op=Op.F, microbatch=0),) for s in range(3))
    schedule = Schedule(name="fan", placement=Placement(stages=stages, pipelines=(pipeline,)), orders=orders)
    costs = uniform_costs(schedule, latency=5)
    messages = explicit(schedule, costs)
    assert simulate(messages, costs, streams=Streams.PAIR).makespan == 1 + 5 + 1
    assert simulate(messages, costs, streams=Streams.DIRECTION).makespan == 1 + 5 + 5 + 1


def test_a_reduction_starts_with_the_last_replica_and_overlaps():
    schedule = reduce_gradients(replicate(gpipe(2, 2, microbatch_size=2), [1, 2]), False)
    uneven = [StageCosts(forward=1, backward=1), StageCosts(forward=1, backward=1), StageCosts(forward=1, backward=3)]
    spans = spans_of(simulate(schedule, Costs(stages=tuple(uneven), reduces=(0, 2, 2))))
    one, other = spans[parse_action("1REDUCE_GRAD")], spans[parse_action("2REDUCE_GRAD")]
    assert (one.start, one.end) == (other.start, other.end) == (spans[parse_action("2B1")].end, other.start + 2)
    assert one.start > spans[parse_action("1B1")].end
    assert spans[parse_action("0B1")].start == one.start


def test_a_forward_waits_for_the_encoders_of_its_rows_only():
    schedule = insert_encoding(
        one_f_one_b(2, 2, microbatch_size=2), block=9, outputs={0: ("text",)}, num_layers=1, max_chunk=2
    )
    base = uniform_costs(schedule)
    costs = Costs(stages=base.stages, fills=(3, 8))
    spans = spans_of(simulate(schedule, costs))
    assert spans[parse_action("0F0")].start == 3
    assert spans[parse_action("0F1")].start == 8


def test_what_comes_after_a_wait_takes_longer():
    schedule = gpipe(2, 2)
    plain = uniform_costs(schedule, forward=4, backward=8)
    spans = {str(span.action): span for span in simulate(schedule, replace(plain, waking=((2, 1), (6, 2)))).spans}
    assert (spans["0F0"].end, spans["0F1"].end) == (4, 8)
    assert (spans["1F0"].start, spans["1F0"].end) == (4, 4 + 4 + 1), "at most a quarter"
    assert (spans["1F1"].start, spans["1F1"].end) == (9, 13), "it did not wait"
    assert (spans["1B0"].end, spans["0B0"].start, spans["0B0"].end) == (21, 21, 21 + 8 + 2)
    assert spans["0B1"].start == spans["0B0"].end
    assert simulate(schedule, plain).makespan == 3 * 4 + 3 * 8


def test_costs_of_another_schedule_are_refused():
    with pytest.raises(ScheduleError, match="make costs for this schedule"):
        simulate(gpipe(2, 2), uniform_costs(gpipe(3, 2)))


def test_a_stuck_schedule_is_refused_with_the_waiting_actions():
    schedule = gpipe(2, 1)
    orders = (tuple(reversed(schedule.orders[0])), schedule.orders[1])
    stuck = Schedule(name="stuck", placement=schedule.placement, orders=orders)
    with pytest.raises(ScheduleError, match="worker 0 waits at 0B0"):
        simulate(stuck, uniform_costs(stuck))
