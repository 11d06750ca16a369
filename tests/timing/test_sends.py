"""The rule of when a send is over, against a look at every message, one by one."""

from collections import defaultdict
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.strategies import schedules
from passes.test_versions import encoding, replicated
from timing.test_oracle import costs_of, filled

from diffusionpipe.ir import SEND_OPS, Edge, Op
from diffusionpipe.ir.unroll import occurrences, unroll
from diffusionpipe.passes import communicate, connect_blocks
from diffusionpipe.planner.assembly.windows import communicate_window, overlap
from diffusionpipe.simulator import simulate
from diffusionpipe.timing import Streams
from diffusionpipe.timing.sends import drops_of, releases_of, waits_of, window_releases_of


def explicit(schedule, random):
    """The schedule with messages, and random costs."""
    costs = costs_of(schedule, random, "whole numbers", is_waking=False)
    return communicate(schedule, simulate(schedule, costs), lookahead=random.randint(0, 3)), costs


def reader_of(schedule, slot):
    """The place in its worker's order of the first action that waits for a message; None if none does."""
    placement, message = schedule.placement, schedule.messages[slot]
    is_frozen = placement.is_frozen(message.source)
    if is_frozen and placement.pipeline_of(message.source).is_ahead:
        return None

    def is_reader(action):
        if not is_frozen:
            is_op = action.op in (Op.B, Op.I) if message.is_gradient else action.op is Op.F
            return is_op and (action.stage, action.microbatch) == (message.destination, message.microbatch)
        edges = placement.pipeline_of(action.stage).edges
        return (
            action.op is Op.F
            and any((edge.producer, edge.consumer) == (message.source, action.stage) for edge in edges)
            and bool(placement.rows(action.stage, action.microbatch).intersection(message.samples))
        )

    order = schedule.orders[placement.stages[message.destination].worker]
    return next((place for place, action in enumerate(order) if is_reader(action)), None)


def dropped_at(schedule, slot):
    """The action in front of which a message's sender can first know that it is over; None at the end."""
    stages, message = schedule.placement.stages, schedule.messages[slot]
    here, peer = stages[message.source].worker, stages[message.destination].worker
    read = reader_of(schedule, slot)
    if read is None:
        return None
    for action in schedule.orders[peer][read + 1 :]:
        if action.op in SEND_OPS and stages[schedule.messages[action.slot].destination].worker == here:
            news = reader_of(schedule, action.slot)
            if news is not None:
                return schedule.orders[here][news]
    return None


def compare(schedule):
    drops = drops_of(schedule, waits_of(schedule))
    assert drops == {
        slot: action for slot in range(len(schedule.messages)) if (action := dropped_at(schedule, slot)) is not None
    }
    assert releases_of(schedule) == {
        action: tuple(slot for slot in drops if drops[slot] == action) for action in drops.values()
    }
    return drops


@settings(max_examples=15)
@given(schedules(), st.integers(0, 10**9))
def test_a_send_is_dropped_at_the_first_news_of_its_reader_and_never_earlier(schedule, seed):
    schedule, costs = explicit(schedule, Random(seed))
    drops = compare(schedule)
    for streams in Streams:
        starts = {span.action: span.start for span in simulate(schedule, costs, streams=streams).spans}
        for slot, action in drops.items():
            message = schedule.messages[slot]
            order = schedule.orders[schedule.placement.stages[message.destination].worker]
            assert starts[order[reader_of(schedule, slot)]] <= starts[action]


@pytest.mark.parametrize("seed", range(12))
def test_frozen_outputs_of_the_next_batch_bring_no_news(seed):
    schedule, _ = explicit(filled(Random(seed)), Random(seed))
    waits = waits_of(schedule)
    drops = compare(schedule)
    ahead = {slot for slot, message in enumerate(schedule.messages) if schedule.placement.is_frozen(message.source)}
    assert not ahead.intersection(drops)
    assert not ahead.intersection(slot for slots in waits.values() for slot in slots)


def with_skip(p, m, family="1f1b"):
    """The window of a chain in which stage 0 also feeds the last stage."""
    pairs = {(stage, stage + 1) for stage in range(p - 1)} | {(0, p - 1)}
    edges = [Edge(producer=a, consumer=b, tensors=(f"x{a}",), gradients=(f"x{a}",)) for a, b in sorted(pairs)]
    return connect_blocks(overlap(p, m, family), edges)


WINDOWS = {
    **{f"1F1B, {p} workers, {m} micro-batches": with_skip(p, m) for p in (2, 3, 4) for m in (1, 2, 4)},
    **{f"DAPPLE, {p} workers, 4 micro-batches": with_skip(p, 4, "dapple-b") for p in (2, 3)},
    **{f"replicas {r}, {m} micro-batches": replicated(len(r), m, r) for r in ((2, 1), (1, 2, 2)) for m in (1, 4)},
    **{f"fills, {p} workers, {m} micro-batches": encoding(p, m) for p, m in ((2, 1), (3, 2), (3, 1), (4, 4))},
}


def released(window, batches):
    """In a schedule of so many batches of a window: message -> the action in front of which it is dropped, its window.

    A message that is released in a window for which its batch is too old, or too new, would be another batch's: batches
    take turns.
    """
    releases, count, lead = window_releases_of(window), len(window.messages), window.lead
    found = {}
    for worker, order in enumerate(window.orders):
        for number, place, action in occurrences(window, worker, batches):
            for sent, later in releases.get(order[place], ()):
                batch = number + order[place].reading.lead + later
                is_frozen = window.placement.is_frozen(window.messages[sent].source)
                trained_lead = max(a.reading.lead for o in window.orders for a in o if a.op is Op.F)
                assert number - 1 + is_frozen <= batch <= number + trained_lead + is_frozen, (sent, batch, number, lead)
                if 0 <= batch < batches:
                    slot = sent + batch * count
                    assert slot not in found, "dropped twice"
                    found[slot] = (action, number)
    return found


@pytest.mark.parametrize("name", WINDOWS)
def test_without_a_flush_a_send_is_dropped_at_news_and_in_a_long_run_at_the_first(name):
    window = communicate_window(WINDOWS[name])
    long = 3 * window.lead + 8
    for batches in (1, 2, window.lead + 1, window.lead + 3, long):
        unrolled = unroll(window, batches)
        drops = drops_of(unrolled, waits_of(unrolled))
        places = [{action: place for place, action in enumerate(order)} for order in unrolled.orders]
        found = released(window, batches)
        for slot, (action, _) in found.items():
            message = unrolled.messages[slot]
            own = places[unrolled.placement.stages[message.source].worker]
            assert own[drops[slot]] <= own[action], "before the first news"
    # Between a start and a flush that are far away everything is dropped at the first news, if it comes in time.
    window_of = {
        action: number
        for worker in range(window.num_workers)
        for number, _, action in occurrences(window, worker, long)
    }
    seen = defaultdict(int)
    for slot in range(len(unrolled.messages)):
        batch = slot // len(window.messages)
        if window.lead + 2 <= batch < long - window.lead - 2 and slot in drops:
            is_late = window_of[drops[slot]] > batch + (
                not unrolled.placement.is_frozen(unrolled.messages[slot].source)
            )
            assert (slot in found) != is_late
            assert is_late or found[slot][0] == drops[slot]
            seen[is_late] += 1
    assert seen[False]


def test_releases_of_another_batch_are_noticed(monkeypatch):
    window = communicate_window(with_skip(3, 2))
    right = window_releases_of(window)
    for shift in (-1, 1):
        wrong = {action: tuple((sent, later + shift) for sent, later in over) for action, over in right.items()}
        monkeypatch.setitem(globals(), "window_releases_of", lambda _, wrong=wrong: wrong)
        with pytest.raises(AssertionError):
            test_without_a_flush_a_send_is_dropped_at_news_and_in_a_long_run_at_the_first(
                "1F1B, 3 workers, 2 micro-batches"
            )
