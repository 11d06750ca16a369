"""Wrong versions of `timing`, each of which the comparison with the machine must notice."""

from dataclasses import replace
from random import Random

import pytest
from timing.test_oracle import compare, filled, sharded

from diffusionpipe import timing
from diffusionpipe.costs import actions
from diffusionpipe.ir import MESSAGE_OPS, Op
from diffusionpipe.simulator import simulate as simulator
from diffusionpipe.timing import held, prices
from diffusionpipe.timing.clock import durations_of
from diffusionpipe.timing.work import Compute, Encode, Gather, Reduce, Transfer

SIMULATE = simulator.__globals__


def without(kind):
    """A price list in which a kind of work takes no time."""
    original = prices.price_of
    return lambda work, costs: 0 if isinstance(work, kind) else original(work, costs)


def doubled_transfers():
    original = prices.price_of
    return lambda work, costs: original(work, costs) * (2 if isinstance(work, Transfer) else 1)


def whole_backwards():
    """I and W cost what the other costs."""
    original = prices.price_of

    def price(work, costs):
        if isinstance(work, Compute) and work.op in (Op.I, Op.W):
            work = Compute(work.stage, Op.W if work.op is Op.I else Op.I)
        return original(work, costs)

    return price


def one_queue(streams):
    """The machine whose transfers in both directions share a queue."""
    original = timing.machine_of(streams)

    def queue(schedule, worker, action):
        return "both directions" if action.op in MESSAGE_OPS else original(schedule, worker, action)

    return queue


def a_queue_for_each_message(streams):
    original = timing.machine_of(streams)

    def queue(schedule, worker, action):
        return f"message {action.slot}" if action.op in MESSAGE_OPS else original(schedule, worker, action)

    return queue


def without_waking(graph, costs):
    return timing.times_of(graph, replace(costs, waking=()))


def waking_transfers(graph, costs):
    return timing.times_of(replace(graph, is_on_host=(True,) * len(graph)), costs)


def without_hosts(graph, costs):
    return timing.times_of(graph, replace(actions.without_hosts(costs), host_fills=costs.host_fills))


def hosts_without_fills(graph, costs):
    return timing.times_of(graph, replace(costs, host_fills=()))


def waiting_hosts(graph, costs):
    """Devices begin only when all has been issued."""
    times = timing.times_of(graph, costs)
    issues = [(issued, issued) for _, issued in times.issues]
    ends = timing.ends_of(graph, durations_of(graph, timing.prices_of(graph.works, costs)), issues=issues)
    return replace(times, ends=ends)


def first_inputs_alone(schedule, machine):
    graph = timing.graph_of(schedule, machine)
    return replace(graph, second=tuple(0 for _ in graph.second))


def forgotten_buffers(ops, activation, kept):
    """I gives everything back."""
    return ORIGINAL_CHANGES(ops, activation, 0)


def never_given_back(ops, activation, kept):
    return {op: (taken, 0) for op, (taken, _) in ORIGINAL_CHANGES(ops, activation, kept).items()}


ORIGINAL_CHANGES = held.changes_of
PRICES = {
    "no compute": lambda: without(Compute),
    "no fills": lambda: without(Encode),
    "no transfers": lambda: without(Transfer),
    "no reductions": lambda: without(Reduce),
    "no gathers": lambda: without(Gather),
    "transfers doubled": doubled_transfers,
    "I and W exchanged": whole_backwards,
}
PARTS = {
    "one queue": ("machine_of", one_queue),
    "no queue": ("machine_of", a_queue_for_each_message),
    "no waking": ("times_of", without_waking),
    "waking on links": ("times_of", waking_transfers),
    "no hosts": ("times_of", without_hosts),
    "fills without hosts": ("times_of", hosts_without_fills),
    "computes behind all that is issued": ("times_of", waiting_hosts),
    "no inputs": ("graph_of", first_inputs_alone),
}


def compare_some():
    """Some schedules on the machine and with `timing`."""
    for seed in range(60):
        random = Random(seed)
        compare(random.choice((filled, sharded))(random), random)


def assert_noticed():
    """One of them is timed otherwise than on the machine."""
    with pytest.raises(AssertionError):
        compare_some()


@pytest.mark.parametrize("name", PRICES)
def test_a_wrong_price_is_noticed(monkeypatch, name):
    monkeypatch.setattr(prices, "price_of", PRICES[name]())
    assert_noticed()


@pytest.mark.parametrize("name", PARTS)
def test_a_wrong_machine_clock_or_graph_is_noticed(monkeypatch, name):
    part, wrong = PARTS[name]
    monkeypatch.setitem(SIMULATE, part, wrong)
    assert_noticed()


@pytest.mark.parametrize("wrong", [forgotten_buffers, never_given_back])
def test_a_wrong_count_of_what_is_held_is_noticed(monkeypatch, wrong):
    monkeypatch.setattr(held, "changes_of", wrong)
    assert_noticed()


def test_what_is_not_wrong_is_not_noticed():
    compare_some()
