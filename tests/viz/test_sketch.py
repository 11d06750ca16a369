import re
from fractions import Fraction

import pytest

from diffusionpipe.ir import Action, Op, Span, Timeline
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.viz import MILLISECONDS, sketch
from diffusionpipe.viz.gantt import UNITS
from diffusionpipe.viz.sketch import draw_sketch
from diffusionpipe.viz.sketch_legend import explained_sketch, legend_of


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


def test_a_bar_of_billions_of_cells_is_drawn_at_once():
    spans = (span(0, Op.F, 0, 1), span(0, Op.F, 1, 10**12, microbatch=1), span(0, Op.F, 10**12, 10**12 + 1))
    assert "F1" in sketch(Timeline(spans=spans, num_workers=1))


TIMES = [{}, {"forward": 0.3, "backward": 0.71}, {"latency": Fraction(1, 3)}]


@pytest.mark.parametrize("width", [24, 33, 60, 90, 120])
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "bitpipe"])
def test_no_line_is_wider_than_asked_for(name, width, times):
    drawn = explained_sketch(timeline_of(name, 4, 12, **times), width=width)
    assert max(map(len, drawn.splitlines())) <= width


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_every_micro_batch_of_every_rank_has_its_number_whatever_the_width(name, width, times):
    timeline = timeline_of(name, 4, 8, **times)
    drawn = draw_sketch(timeline, width=width)
    assert not drawn.is_excerpt
    for worker in range(4):
        row = " ".join(re.findall(rf"^{worker} \| (.*)$", drawn.text, flags=re.MULTILINE))
        written = sorted(re.findall(r"[FBIW]\d+", row.upper()))
        spans = [span for span in timeline.spans if span.worker == worker]
        assert written == sorted(f"{span.action.op}{span.action.microbatch}" for span in spans)


def test_a_picture_wider_than_the_screen_goes_on_below_under_its_time():
    assert (
        sketch(timeline_of("gpipe", 2, 4), width=30)
        == """\
time 0 to 8
0 | F0 F1 F2 F3 .  .  .  B0-
1 | .  F0 F1 F2 F3 B0--- B1-
time 8 to 15
0 | -- B1--- B2--- B3---
1 | -- B2--- B3--- .  ."""
    )
    lines = sketch(timeline_of("gpipe", 2, 4, forward=0.003, backward=0.006), width=30, axis=MILLISECONDS).splitlines()
    assert lines[::3] == ["time 0 to 22.5 ms", "time 22.5 to 45 ms"]


def test_of_a_very_long_iteration_start_middle_and_end_are_shown_and_the_legend_says_so():
    drawn = draw_sketch(timeline_of("1f1b", 8, 64), width=80)
    assert drawn.text.count("time ") == 3
    assert [label in drawn.text for label in ("F0 ", "F34B27", "B63--")] == [True] * 3
    assert "Only the start, the middle and the end are shown." in legend_of(drawn)


def test_the_legend_explains_every_letter_that_occurs_and_no_other():
    plain, split = (legend_of(draw_sketch(timeline_of(name, 4, 8), width=80)) for name in ("1f1b", "zb-v"))
    assert [f"{letter}0: " in plain for letter in "FBIWT"] == [True, True, False, False, False]
    assert [f"{letter}0: " in split for letter in "FBIWT"] == [True, False, True, True, False]
    assert "small letters (f0): the rank's second stage" in split
    assert "small" not in plain
    assert "2F0: the same on stage 2" in legend_of(draw_sketch(timeline_of("zb-v", 2, 2)))
    short = (span(0, Op.ENCODE, 0, 0.3, stage=1, slot=0), *(span(0, Op.F, 0.3 + i, 1.3 + i) for i in range(20)))
    frozen = legend_of(draw_sketch(Timeline(num_workers=1, spans=short), width=80))
    assert "E: frozen work" in frozen
    assert "a letter without a number: the action is too short to show it" in frozen


@pytest.mark.parametrize("width", [20, 40, 60, 120])
def test_the_dots_of_an_exact_picture_are_the_idle_time(width):
    timeline = timeline_of("1f1b", 2, 4)
    lines = sketch(timeline, width=width).splitlines()
    dots = [sum(line.count(".") for line in lines if line.startswith(f"{worker} |")) for worker in range(2)]
    assert dots == [timeline.makespan - timeline.busy(worker) for worker in range(2)]


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


def test_frozen_work_beside_several_stages_keeps_its_letter():
    spans = (
        span(0, Op.ENCODE, 0, 1, stage=2, slot=1),
        span(0, Op.F, 1, 2),
        span(0, Op.F, 2, 3, stage=1),
    )
    timeline = Timeline(num_workers=1, spans=spans)
    assert sketch(timeline) == "0 | E1- 0F0 1F0"
    many = tuple(span(0, Op.F, 3 + i, 4 + i, microbatch=1 + i) for i in range(8))
    assert sketch(Timeline(num_workers=1, spans=(*spans, *many)), width=28) == "0 | E1F0f0F1F2F3F4F5F6F7F8"


def test_short_frozen_work_in_a_row_is_one_e():
    fills = tuple(span(0, Op.ENCODE, i * 0.01, (i + 1) * 0.01, stage=1, slot=i) for i in range(40))
    timeline = Timeline(num_workers=1, spans=(*fills, span(0, Op.F, 0.4, 0.8), span(0, Op.B, 0.8, 1.6)))
    assert sketch(timeline, width=36) == "0 | E------ F0----- B0-------------"


def test_frozen_work_and_split_backwards_have_their_letters_and_messages_are_not_drawn():
    spans = (
        span(0, Op.ENCODE, 0, 2, stage=1, slot=3),
        span(0, Op.F, 2, 3),
        span(0, Op.SEND_F, 3, 9, slot=0),
        span(0, Op.I, 3, 4),
        span(0, Op.W, 4, 5),
    )
    assert sketch(Timeline(num_workers=1, spans=spans)) == "0 | E3--- F0 I0 W0"


@pytest.mark.parametrize(
    ("time", "text"), [(0, "0"), (16.641, "16.64"), (0.12345, "0.1235"), (9999.4, "9999"), (221295, "221295")]
)
def test_a_time_has_four_digits_and_no_power_of_ten(time, text):
    assert UNITS.text(time) == text


def test_a_timeline_without_computation_is_empty_rows():
    assert sketch(Timeline(num_workers=2, spans=())) == "0 |\n1 |"
