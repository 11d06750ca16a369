"""Latest starts and critical paths, against delays of single events; exactness; parts of a graph timed again."""

from fractions import Fraction
from itertools import pairwise
from random import Random

import pytest
from timing.test_oracle import costs_of, filled

from diffusionpipe.passes import communicate
from diffusionpipe.schedules import forward_only
from diffusionpipe.simulator import simulate
from diffusionpipe.timing import ends_of, graph_of, prices_of, timed
from diffusionpipe.timing.clock import durations_of

SEEDS = range(25)


def case(seed, *, is_waking):
    """A graph of a schedule with messages, whole prices, and waking or none."""
    random = Random(seed)
    schedule = filled(random)
    costs = costs_of(schedule, random, "whole numbers", is_waking=is_waking)
    graph = graph_of(communicate(schedule, simulate(schedule, costs)))
    return graph, prices_of(graph.works, costs), costs.waking


def makespan_with(times, delayed, start):
    """When all has ended if one event starts no earlier than this, by the durations that came out."""
    graph, ends = times.graph, [0]
    for event in range(1, len(graph)):
        ready = max(ends[graph.first[event]], ends[graph.second[event]])
        ready = max(ready, start) if event == delayed else ready
        ends.append(ready + times.ends[event] - times.start(event))
    return max(ends)


@pytest.mark.parametrize("is_waking", [False, True])
def test_an_event_may_start_at_its_latest_start_and_no_later(is_waking):
    for seed in SEEDS:
        graph, prices, waking = case(seed, is_waking=is_waking)
        times = timed(graph, prices, waking=waking)
        for makespan in (times.makespan, times.makespan + 3):
            latest = times.latest_starts(makespan)
            for event in range(1, len(graph), 3):
                assert makespan_with(times, event, latest[event]) <= makespan + 1e-9
                assert makespan_with(times, event, latest[event] + 0.5) > makespan


@pytest.mark.parametrize("is_waking", [False, True])
def test_the_critical_path_has_no_wait_and_its_events_no_slack(is_waking):
    for seed in SEEDS:
        graph, prices, waking = case(seed, is_waking=is_waking)
        times = timed(graph, prices, waking=waking)
        path = times.critical_path()
        assert times.ends[path[0]] == times.makespan
        assert times.start(path[-1]) == 0
        latest = times.latest_starts(times.makespan)
        for later, earlier in pairwise(path):
            assert times.start(later) == times.ends[earlier]
        assert [latest[event] for event in path] == pytest.approx([times.start(event) for event in path])


@pytest.mark.parametrize("is_waking", [False, True])
def test_timing_again_from_any_event_on_gives_the_same(is_waking):
    for seed in SEEDS:
        random = Random(seed)
        graph, prices, waking = case(seed, is_waking=is_waking)
        durations = durations_of(graph, prices)
        before = ends_of(graph, durations, waking=waking)
        changed = random.randrange(1, len(graph))
        durations[changed] += 7
        expected = ends_of(graph, durations, waking=waking)
        assert ends_of(graph, durations, waking=waking, before=before[:changed]) == expected


def test_fractions_stay_fractions():
    graph, prices, _ = case(0, is_waking=False)
    thirds = timed(graph, [Fraction(price, 3) for price in prices])
    assert isinstance(thirds.makespan, Fraction)
    assert 3 * thirds.makespan == timed(graph, prices).makespan


def test_being_free_earlier_can_end_later_where_waking_counts():
    """Why latest starts speak of the durations that came out: one forward less to wait for, and the wait is longer."""
    graph = graph_of(forward_only(2, 2))
    waking = ((1, 0), (11, 10))

    def end(first):
        """With this much time of the first forward on worker 1."""
        durations = [0, 5, 50, 0, 0, first, 100]
        return ends_of(graph, durations, waking=waking)[-1]

    assert end(39) > end(40)
