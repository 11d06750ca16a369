from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner import synthetic

from diffusionpipe.planner.pricing.copied import CopiedProfile, CopyStream, computing, times_with_copies

NAMES = tuple("abcde")
seconds = st.integers(0, 8)
weights = st.fixed_dictionaries({name: st.integers(1, 8) for name in NAMES})
steps = st.lists(
    st.one_of(seconds, st.lists(st.tuples(st.sampled_from((*NAMES, "free")), seconds), min_size=1, max_size=3)),
    min_size=1,
    max_size=12,
)


def moment_by_moment(order, copies, periods):
    """The end of each fill where the order runs again and again: two machines that move by one second at a time.

    One computes. The other copies the next layer that is not there over the one that ran before the last.
    """
    works = list(chain.from_iterable(order for _ in range(periods)))
    layers = [layer for work in works if isinstance(work, list) for layer, _ in work if layer in copies]
    todo = []  # what the worker computes: (layer or None, seconds, whether a fill ends)
    for work in works:
        if isinstance(work, list):
            todo += [(name, time, i == len(work) - 1) for i, (name, time) in enumerate(work)]
        else:
            todo.append((None, work, False))
    room = [[None, False], [None, False]]  # [layer, whether it is there]; the one that ran last stands first
    now, ends, copying = 0, [], None  # copying: [room, seconds left]
    started = 0  # layers whose turn it was to be copied

    def turn(number):
        """Begin what stands at this place among the layers, unless it is there; it needs the copier to itself."""
        nonlocal copying
        name = layers[number]
        if all(place[0] != name for place in room):
            place = room[1]
            place[:] = [name, False]
            copying = [place, copies[name]]

    def advance():
        nonlocal copying
        if copying:
            copying[1] -= 1
            if copying[1] == 0:
                copying[0][1] = True
                copying = None

    for name, time, is_end in todo:
        if name in copies:
            while copying:  # an earlier copy is under way: its layer is this one, or this one comes after it
                advance()
                now += 1
            turn(started)
            while copying:
                advance()
                now += 1
            if room[1][0] == name:
                room.reverse()
            started += 1
            if started < len(layers):
                turn(started)
        for _ in range(time):
            advance()
            now += 1
        if is_end:
            ends.append(now)
    return ends


@given(steps, weights)
def test_fills_end_when_two_machines_that_move_second_by_second_end_them(order, copies):
    fills = [step for step in order if isinstance(step, list)]
    ends = moment_by_moment(order, copies, periods=2)[len(fills) :]
    now, found = 0.0, []
    taken = times_with_copies(order, copies)
    for step in order:
        now += next(taken) if isinstance(step, list) else step
        if isinstance(step, list):
            found.append(now)
    # Both count from the end of the first round, which is known from the first fill's end and its time.
    if found:
        start = ends[-1] - found[-1]
        assert found == [end - start for end in ends]


def test_compute_between_two_fills_hides_the_copy_of_the_seconds_first_layer():
    copies = {"a": 5.0, "b": 5.0, "c": 5.0}
    bunched = [[("a", 1.0), ("b", 1.0), ("c", 1.0)], 30.0]
    spread = [[("a", 1.0)], 10.0, [("b", 1.0)], 10.0, [("c", 1.0)], 10.0]
    assert list(times_with_copies(bunched, copies)) == [5.0 + 5.0 + 1.0]  # a while b comes, b while c comes, c
    assert list(times_with_copies(spread, copies)) == [1.0, 1.0, 1.0]


def test_a_layer_that_is_there_is_not_copied_again():
    stream = CopyStream({"a": 5.0, "b": 5.0})
    now = stream.run("a", 0.0, 1.0, "a")
    assert now == 6.0
    assert stream.run("a", now, 1.0, "b") == 7.0
    assert stream.ready("b") == 6.0 + 5.0


def test_a_copied_profile_knows_a_layers_own_time_too():
    profile = synthetic.unet()
    name = profile.graph.frozen_layers[0]
    copied = CopiedProfile(arriving={name: 100.0}, **{f: getattr(profile, f) for f in profile.__dataclass_fields__})
    assert copied.forward(name, 4) == 100.0
    assert copied.forward(name, 0) == profile.forward(name, 0)
    assert computing(copied, name, 4) == computing(profile, name, 4) == profile.forward(name, 4)
    assert computing(copied, name, 4) == pytest.approx(profile.forward(name, 4))
