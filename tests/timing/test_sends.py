"""The rule of when a send is over, against a look at every message, one by one."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import schedules
from timing.test_oracle import costs_of, filled

from diffusionpipe.ir import SEND_OPS, Op
from diffusionpipe.passes import communicate
from diffusionpipe.simulator import simulate
from diffusionpipe.timing import Streams
from diffusionpipe.timing.sends import drops_of, releases_of, waits_of


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
    return drops


@settings(max_examples=40)
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
    compare(schedule)
    ahead = {slot for slot, message in enumerate(schedule.messages) if schedule.placement.is_frozen(message.source)}
    assert not ahead.intersection(releases_of(schedule, waits))
    assert not ahead.intersection(slot for slots in waits.values() for slot in slots)
