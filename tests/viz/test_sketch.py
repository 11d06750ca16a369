from fractions import Fraction

import pytest

from diffusionpipe.ir import Action, Op, Span, Timeline
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.viz import sketch


def timeline_of(name, num_stages, num_microbatches, **times):
    schedule = REGISTRY[name](num_stages, num_microbatches)
    return simulate(schedule, uniform_costs(schedule, **times))


def span(worker, op, start, end, *, stage=0, microbatch=0, slot=None):
    number = None if op is Op.ENCODE else microbatch
    return Span(worker=worker, action=Action(stage=stage, op=op, microbatch=number, slot=slot), start=start, end=end)


def test_1f1b_looks_like_the_papers_picture():
    assert (
        sketch(timeline_of("1f1b", 4, 4))
        == """\
0 | F0 F1 F2 F3 .  .  .  .  .  .  B0--- .  B1--- .  B2--- .  B3---
1 | .  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3--- .  .
2 | .  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .  .  .
3 | .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .  .  ."""
    )


def test_a_common_factor_of_all_times_changes_nothing():
    unit = sketch(timeline_of("gpipe", 3, 4))
    assert sketch(timeline_of("gpipe", 3, 4, forward=20, backward=40)) == unit
    assert sketch(timeline_of("gpipe", 3, 4, forward=3.0, backward=6.0)) == unit


@pytest.mark.parametrize("width", [20, 33, 60, 90, 120])
@pytest.mark.parametrize("times", [{}, {"forward": 0.3, "backward": 0.71}, {"latency": Fraction(1, 3)}])
def test_no_line_is_wider_than_asked_for(width, times):
    lines = sketch(timeline_of("1f1b", 4, 12, **times), width=width).splitlines()
    assert len(lines) == 4
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [20, 40, 60, 120])
def test_the_dots_of_an_exact_picture_are_the_idle_time(width):
    timeline = timeline_of("1f1b", 2, 4)
    dots = [line.count(".") for line in sketch(timeline, width=width).splitlines()]
    assert dots == [timeline.makespan - timeline.busy(worker) for worker in range(2)]


def test_a_small_picture_tells_neighbouring_micro_batches_apart_by_case():
    assert sketch(timeline_of("gpipe", 2, 3), width=20) == "0 | FfF...BBbbBB\n1 | .FfFBBbbBB.."


def test_a_worker_with_several_stages_shows_the_stage():
    spans = (span(0, Op.F, 0, 1), span(0, Op.F, 2, 3, stage=2), span(1, Op.F, 1, 2, stage=1))
    assert sketch(Timeline(num_workers=2, spans=spans)) == "0 | 0F0 .   2F0\n1 | .   1F0 ."


def test_where_stages_have_no_room_the_second_direction_has_small_letters():
    timeline = timeline_of("chimera", 2, 2)
    assert sketch(timeline, width=60) == "0 | 0F0 3F0 3B0---- 0B0----\n1 | 2F0 1F0 1B0---- 2B0----"
    assert sketch(timeline_of("chimera", 2, 6), width=62) == (
        "0 | F0 f0 b0--- B0--- F1 f1 b1--- B1--- F2 f2 b2--- B2---\n"
        "1 | f0 F0 B0--- b0--- f1 F1 B1--- b1--- f2 F2 B2--- b2---"
    )
    assert sketch(timeline_of("chimera", 2, 6), width=42) == (
        "0 | F0f0b0- B0- F1f1b1- B1- F2f2b2- B2-\n1 | f0F0B0- b0- f1F1B1- b1- f2F2B2- b2-"
    )
    assert sketch(timeline_of("chimera", 2, 4), width=20) == "0 | FfbbBBFfbbBB\n1 | fFBBbbfFBBbb"


def test_frozen_work_beside_several_stages_keeps_its_letter():
    spans = (
        span(0, Op.ENCODE, 0, 1, stage=2, slot=1),
        span(0, Op.F, 1, 2),
        span(0, Op.F, 2, 3, stage=1),
    )
    timeline = Timeline(num_workers=1, spans=spans)
    assert sketch(timeline) == "0 | E1- 0F0 1F0"
    many = tuple(span(0, Op.F, 3 + i, 4 + i, microbatch=1 + i) for i in range(8))
    assert sketch(Timeline(num_workers=1, spans=(*spans, *many)), width=20) == "0 | EFfFFFFFFFF"


def test_frozen_work_and_split_backwards_have_their_letters_and_messages_are_not_drawn():
    spans = (
        span(0, Op.ENCODE, 0, 2, stage=1, slot=3),
        span(0, Op.F, 2, 3),
        span(0, Op.SEND_F, 3, 9, slot=0),
        span(0, Op.I, 3, 4),
        span(0, Op.W, 4, 5),
    )
    assert sketch(Timeline(num_workers=1, spans=spans)) == "0 | E3--- F0 I0 W0"


def test_a_timeline_without_computation_is_empty_rows():
    assert sketch(Timeline(num_workers=2, spans=())) == "0 |\n1 |"
