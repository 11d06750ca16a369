"""What other programs use of the cores is told from what our own ranks use, by recorded counters."""

import os
from itertools import pairwise
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusionpipe.runtime.machine import machine_use
from diffusionpipe.runtime.machine.machine_use import (
    WINDOW,
    CorePlace,
    Counters,
    StepCounters,
    boot_id,
    cores_of,
    place_of,
    read_counters,
    used_by_others,
)


def places_of(count, *, cores=2, machine="a", threads=1, helpers=0):
    return [CorePlace(machine=machine, cores=tuple(range(cores)), threads=threads, helpers=helpers)] * count


def recorded(count, *, cores=2, seconds=1.0, steps=15, ours=(0.5, 0.1), others=lambda step: 0.0):
    """The counters of ranks on one machine: each uses `ours` (itself, helpers) of a core; others so many cores."""
    clock, idle, own, ranks = 100.0, 50.0, [7.0, 3.0], []
    for step in range(steps):
        begin = Counters(clock=clock, unused=idle, own=own[0], helpers=own[1])
        taken = min(cores, count * sum(ours) + others(step))
        clock, idle = clock + seconds, idle + seconds * (cores - taken)
        own = [one + seconds * part for one, part in zip(own, ours, strict=True)]
        ranks.append(StepCounters(begin, Counters(clock=clock, unused=idle, own=own[0], helpers=own[1])))
    return [ranks] * count


def shares(places, ranks):
    return [use.others for use in used_by_others(places, ranks)]


@given(st.integers(1, 4), st.floats(0, 1), st.floats(0.01, 5))
def test_what_is_neither_unused_nor_ours_is_used_by_others(cores, part, seconds):
    free = cores - 0.6
    ranks = recorded(1, cores=cores, seconds=seconds, others=lambda step: part * free)
    assert shares(places_of(1, cores=cores), ranks) == pytest.approx([part * free / cores] * 15)


def test_four_ranks_on_two_cores_are_no_other_programs():
    ranks = recorded(4, ours=(0.4, 0.1))
    assert shares(places_of(4), ranks) == pytest.approx([0.0] * 15)


def test_only_steps_beside_others_show_them():
    ranks = recorded(2, ours=(0.3, 0.0), others=lambda step: 0.8 if step in (3, 4) else 0.0)
    assert shares(places_of(2), ranks) == pytest.approx([0.4 if step in (3, 4) else 0.0 for step in range(15)])


def test_short_steps_are_judged_by_a_window_of_them():
    """One tick of 10 ms more or less in a step of 20 ms is no other program."""
    ranks = recorded(1, ours=(0.5, 0.0), seconds=0.02, steps=90, others=lambda step: 0.5 * (step % 2))
    found = shares(places_of(1), ranks)
    assert WINDOW / 0.02 < 90
    assert found == pytest.approx([0.125] * 90, abs=0.01)


@given(
    count=st.integers(1, 4),
    cores=st.integers(1, 4),
    seconds=st.floats(0.02, 3),
    parts=st.lists(st.floats(0, 1), min_size=15, max_size=15),
    offsets=st.tuples(st.floats(0, 0.01), st.floats(0, 0.01)),
)
def test_ranks_that_share_cores_with_each_other_are_never_beyond_doubt_other_programs(
    count, cores, seconds, parts, offsets
):
    """Each step the ranks and their helpers use another part of all cores, and the kernel shows whole ticks of it."""

    def shown(value, offset):
        return floor((value + offset) / 0.01 + 1e-9) * 0.01

    clock, unused, own, steps = 0.0, 0.0, 0.0, []
    readings = [Counters(clock=0.0, unused=shown(0.0, offsets[0]), own=0.0, helpers=shown(0.0, offsets[1]))]
    for part in parts:
        clock, unused = clock + seconds, unused + seconds * cores * (1 - part)
        own += seconds * cores * part / count / 2  # half of it by itself, half by its helper
        readings.append(
            Counters(clock=clock, unused=shown(unused, offsets[0]), own=own, helpers=shown(own, offsets[1]))
        )
    steps = [StepCounters(begin, end) for begin, end in pairwise(readings)]
    uses = used_by_others(places_of(count, cores=cores, helpers=1), [steps] * count)
    assert all(use.others <= use.doubt + 1e-6 for use in uses)


def test_of_several_machines_the_fullest_counts():
    places = places_of(1) + places_of(1, machine="b")
    (quiet,), (full,) = recorded(1), recorded(1, others=lambda step: 1.0)
    assert shares(places, [quiet, full]) == shares(places, [full, quiet]) == pytest.approx([0.5] * 15)


@pytest.mark.parametrize(("cores", "threads", "room"), [(2, 1, 0.0), (8, 2, 0.5), (8, 8, 0.0)])
def test_cores_that_ranks_cannot_use_are_room_for_others(cores, threads, room):
    ranks = recorded(2, cores=cores)
    assert {use.room for use in used_by_others(places_of(2, cores=cores, threads=threads), ranks)} == {room}


def test_cores_of_a_machine_are_those_of_all_its_ranks():
    bound = [CorePlace(machine="a", cores=(core,), threads=1, helpers=0) for core in (3, 1)]
    assert cores_of([*bound, *places_of(1, cores=8, machine="b")], "a") == (1, 3)


def test_this_machine_shows_counters_that_only_grow():
    place = place_of(1)
    assert place.machine == boot_id() != ""
    before = read_counters(place.cores)
    sum(number * number for number in range(300_000))
    after = read_counters(place.cores)
    assert after.own + after.helpers >= before.own + before.helpers > 0
    assert after.unused >= before.unused > 0


def write_proc(folder, *, stat, processes):
    """A /proc with one child of process "self": (name, user, system, ended) ticks and the children of each."""
    (folder / "stat").write_text(stat, encoding="ascii")
    for number, (name, ticks, children) in processes.items():
        (folder / number / "task" / "1").mkdir(parents=True)
        (folder / number / "task" / "1" / "children").write_text(children, encoding="ascii")
        words = " ".join(["S", *["0"] * 10, *map(str, ticks), "20", "0"])
        (folder / number / "stat").write_text(f"1 ({name}) {words}\n", encoding="utf-8")


STAT = """cpu  9 9 9 300 40 5 6 9 0 0
cpu0 9 9 9 100 20 2 3 9 0 0
cpu1 9 9 9 100 10 2 2 9 0 0
cpu2 9 9 9 100 10 1 1 9 0 0
intr 1
"""


def test_counters_are_read_from_proc(tmp_path, monkeypatch):
    processes = {
        "self": ("rank) S 1", (100, 20, 3, 4), "11 "),
        "11": ("worker", (30, 5, 0, 1), "12 99 "),  # 99 has just ended
        "12": ("of worker", (2, 2, 0, 0), ""),
    }
    write_proc(tmp_path, stat=STAT, processes=processes)
    monkeypatch.setattr(machine_use, "PROC", tmp_path)
    tick = 1 / os.sysconf("SC_CLK_TCK")
    found = read_counters((0, 2))
    assert found.unused == pytest.approx((125 + 112) * tick)
    assert found.helpers == pytest.approx((7 + 36 + 4) * tick)
    assert (place_of(2).threads, place_of(2).helpers) == (2, 1)


def test_where_the_kernel_shows_nothing_it_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_use, "PROC", tmp_path)
    assert read_counters((0,)) is None
    write_proc(tmp_path, stat="cpu 1 2\n", processes={"self": ("rank", (1, 1, 1, 1), "")})
    assert read_counters((0,)) is None
    assert place_of(1).machine
