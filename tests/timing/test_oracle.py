"""`timing` against a machine of its own kind: the same ends, the same peaks, the same verdicts."""

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.oracle import Streams as OracleStreams
from kit.oracle import execute
from kit.strategies import schedules

from diffusionpipe.costs import Costs, HostTimes, Link, StageCosts
from diffusionpipe.errors import ConfigError, ScheduleError
from diffusionpipe.ir import Op, Range, Schedule
from diffusionpipe.passes import (
    PlacedFill,
    bring_parameters,
    communicate,
    insert_fills,
    reduce_gradients,
    shard_parameters,
)
from diffusionpipe.planner.assembly.buckets import subdivide
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.simulator import activations_in_flight, simulate
from diffusionpipe.timing import Streams, graph_of, machine_of
from diffusionpipe.units import Seconds

KINDS = ("whole numbers", "fractions", "floats")
MACHINES = [Streams.PAIR, Streams.DIRECTION]
TENSORS = (
    "hidden",
    "x",
    "text",
    "latents0",
    "latents1",
    *(f"{name}{i}" for name in ("hidden", "mask") for i in range(9)),
)


def costs_of(schedule: Schedule, random: Random, kind: str, *, is_waking: bool, has_hosts: bool = False) -> Costs:
    """Uneven costs of every term, one number in three of which is 0."""

    def time():
        number = random.choice((0, random.randint(1, 9), random.randint(1, 99)))
        if kind == "fractions":
            return Fraction(number, random.randint(1, 7))
        return number * random.uniform(0.5, 2) if kind == "floats" else number

    def stage():
        held = random.randint(1, 9)
        return StageCosts(
            forward=time(), backward=time(), input_grad=time(), weight_grad=time(),
            activation=held, kept_after_input_grad=random.randint(0, held),
            host=HostTimes(forward=time(), input_grad=time(), weight_grad=time()) if has_hosts else HostTimes(),
        )  # fmt: skip

    workers = range(schedule.num_workers)
    stages = schedule.placement.stages
    bandwidth = {"floats": random.uniform(0.5, 9), "fractions": float("inf"), "whole numbers": float("inf")}[kind]
    return Costs(
        stages=tuple(stage() for _ in stages),
        fills=tuple(time() for _ in schedule.fills),
        host_fills=tuple(time() for _ in schedule.fills) if has_hosts else (),
        reduces=tuple(time() for _ in stages),
        unshards=tuple(time() for _ in stages),
        waking=((time() + 1, 1), (120, 2)) if is_waking else (),
        tensor_bytes={name: random.randint(0, 9) for name in TENSORS},
        link=Link(latency=time(), bandwidth=bandwidth),
        links={
            (a, b): Link(latency=time(), bandwidth=bandwidth) for a in workers for b in workers if random.random() < 0.3
        },
    )


def sharded(random: Random) -> Schedule:
    """One worker whose blocks are in parts."""
    family = REGISTRY[random.choice(("1f1b", "gpipe"))](1, random.randint(1, 4))
    return shard_parameters(subdivide(family, random.randint(1, 5), is_breadth_first=random.random() < 0.5))


def brought(random: Random) -> Schedule:
    """Whole copies whose blocks come from their owners at the start."""
    family = REGISTRY[random.choice(("1f1b", "gpipe", "zb-v"))](random.choice((1, 2)), random.randint(1, 4))
    schedule = subdivide(family, random.randint(1, 3))
    return bring_parameters(reduce_gradients(schedule, is_data_parallel=True))


def filled(random: Random) -> Schedule:
    """A family with frozen work for the next batch at random places."""
    while True:
        name = random.choice(list(REGISTRY))
        try:
            schedule = REGISTRY[name](random.randint(1, 4), random.randint(1, 6), random.randint(1, 2))
        except ConfigError:
            continue
        break
    schedule = reduce_gradients(schedule, random.random() < 0.5)
    batch, fills = schedule.placement.num_samples, {}
    border = random.randint(0, batch)
    for worker, part in enumerate((Range(0, border), Range(border, batch))):
        if worker < schedule.num_workers and part:
            places = sorted(random.randint(0, len(schedule.orders[worker])) for _ in range(3))
            fills[worker] = [
                PlacedFill(position=p, component="vae", layers=Range(i, i + 1), samples=part)
                for i, p in enumerate(places)
            ]
    try:
        return insert_fills(schedule, fills, block=99, outputs={0: ("text",)})
    except ConfigError:
        return schedule


def assert_same(schedule: Schedule, costs: Costs, streams: Streams, *, is_exact: bool) -> Seconds:
    """Starts, ends and peaks of the schedule, of both; the makespan."""
    timeline, expected = (
        simulate(schedule, costs, streams=streams),
        execute(schedule, costs, streams=OracleStreams(streams)),
    )
    assert not expected.blocked
    spans = iter(timeline.spans)
    for worker, order in enumerate(schedule.orders):
        for index in range(len(order)):
            found, want = next(spans), (expected.starts[worker][index], expected.ends[worker][index])
            assert (found.start, found.end) == (want if is_exact else pytest.approx(want, rel=1e-12, abs=1e-12))
    assert [timeline.peak_memory(w) for w in range(schedule.num_workers)] == peaks_of(schedule, costs, expected)
    return timeline.makespan


def peaks_of(schedule, costs, execution):
    """The most that each worker holds, by looking at every moment at which an action begins."""
    peaks = []
    for order, starts, ends in zip(schedule.orders, execution.starts, execution.ends, strict=True):
        taken, given_back = taken_and_given_back(schedule, costs, zip(order, starts, ends, strict=True))
        peaks.append(max((held_at(moment, taken, given_back) for moment, _ in taken), default=0))
    return peaks


def taken_and_given_back(schedule, costs, timed):
    """When how many bytes of activations are taken, and when given back, by (action, start, end) of one worker."""
    taken, given_back = [], []
    for action, start, end in timed:
        ops, cost = schedule.placement.pipeline_of(action.stage).ops, costs.stages[action.stage]
        if action.op is Op.F:
            taken.append((start, cost.activation))
        if action.op is Op.B or (action.op is Op.F and ops == {Op.F}):
            given_back.append((end, cost.activation))
        if action.op is Op.I:
            given_back.append((end, cost.activation - cost.kept_after_input_grad))
        if action.op is Op.W:
            given_back.append((end, cost.kept_after_input_grad))
    return taken, given_back


def held_at(moment, taken, given_back):
    """What is held just behind a moment."""
    return sum(amount for time, amount in taken if time <= moment) - sum(
        amount for time, amount in given_back if time <= moment
    )


def compare(schedule: Schedule, random: Random) -> None:
    """The schedule on each machine, without messages and with them."""
    kind = random.choice(KINDS)
    costs = costs_of(schedule, random, kind, is_waking=random.random() < 0.5, has_hosts=random.random() < 0.5)
    is_exact = kind != "floats" and not costs.waking
    assert_same(schedule, costs, random.choice(MACHINES), is_exact=is_exact)
    explicit = communicate(schedule, simulate(schedule, costs), lookahead=random.randint(0, 3))
    makespans = {streams: assert_same(explicit, costs, streams, is_exact=is_exact) for streams in Streams}
    assert costs.waking or makespans[Streams.HOST] >= makespans[Streams.DIRECTION] - (0 if is_exact else 1e-9)


@settings(max_examples=15)
@given(schedules(), st.integers(0, 10**9))
def test_times_and_peaks_are_those_of_the_machine(schedule, seed):
    compare(schedule, Random(seed))


@pytest.mark.slow
@settings(max_examples=1000)
@given(schedules(), st.integers(0, 10**9))
def test_times_and_peaks_of_a_thousand_schedules_are_those_of_the_machine(schedule, seed):
    compare(schedule, Random(seed))


@pytest.mark.parametrize("make", [sharded, brought, filled])
@pytest.mark.parametrize("first", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(20, 500, 20))])
def test_gathers_and_fills_take_what_they_take_on_the_machine(make, first):
    for seed in range(first, first + 20):
        random = Random(seed)
        compare(make(random), random)


def test_schedules_that_get_stuck_are_those_on_which_the_machine_gets_stuck():
    random, verdicts = Random(3), defaultdict(int)
    while min(verdicts[True], verdicts[False]) < 15:
        schedule = filled(random)
        costs = costs_of(schedule, random, "whole numbers", is_waking=False)
        explicit = communicate(schedule, simulate(schedule, costs))
        worker = random.randrange(explicit.num_workers)
        order = list(explicit.orders[worker])
        a, b = (random.randrange(len(order)) for _ in range(2))
        order[a], order[b] = order[b], order[a]
        changed = replace(explicit, orders=(*explicit.orders[:worker], tuple(order), *explicit.orders[worker + 1 :]))
        for streams in Streams:
            expected = execute(changed, costs, streams=OracleStreams(streams)).blocked
            verdicts[bool(expected)] += 1
            if not expected:
                assert_same(changed, costs, streams, is_exact=True)
                continue
            with pytest.raises(ScheduleError) as error:
                graph_of(changed, machine_of(streams))
            if streams is not Streams.HOST:  # there hosts wait, not streams
                assert sorted(error.value.problems) == sorted(f"deadlock: {line}" for line in expected)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "chimera", "interleaved"])
def test_activations_in_flight_are_counted_by_the_same_rule(name):
    schedule = REGISTRY[name](4, 8)
    costs = Costs(stages=(StageCosts(),) * len(schedule.placement.stages))
    peaks = [simulate(schedule, costs).peak_memory(worker) for worker in range(4)]
    assert list(activations_in_flight(schedule)) == peaks
