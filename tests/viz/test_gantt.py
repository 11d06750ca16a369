import re
import sys
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from diffusionpipe.costs import Costs, StageCosts
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Action, Fill, Op, Phase, Range, Span, Timeline
from diffusionpipe.passes import PlacedFill, insert_fills
from diffusionpipe.planner.assembly.layout import BackboneLayout, Layout
from diffusionpipe.schedules import one_f_one_b
from diffusionpipe.schedules.families.bitpipe import bitpipe
from diffusionpipe.schedules.families.chimera import chimera
from diffusionpipe.schedules.several.opposed import opposed
from diffusionpipe.schedules.several.probes import with_probes
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.viz import UNITS, gantt, palette


def timeline_of(num_stages, num_microbatches):
    schedule = one_f_one_b(num_stages, num_microbatches)
    return simulate(schedule, uniform_costs(schedule))


def texts(path):
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def colours(path):
    return set(re.findall(r"fill: (#[0-9a-f]{6})", path.read_text()))


def test_the_chart_says_title_ranks_micro_batches_makespan_and_bubble(tmp_path):
    path = tmp_path / "chart.svg"
    gantt([("simulated", timeline_of(2, 3))], path, title="1F1B on paper", axis=UNITS)
    written = texts(path)
    assert {"1F1B on paper", "rank 0", "rank 1", "0", "1", "2", "forward", "backward", "idle"} <= set(written)
    assert "simulated · 12 time units · bubble 25.0%" in written


def test_seconds_are_drawn_as_milliseconds(tmp_path):
    path = tmp_path / "chart.svg"
    spans = (Span(worker=0, action=Action(stage=0, op=Op.F, microbatch=0), start=0, end=0.0125),)
    gantt([("measured", Timeline(num_workers=1, spans=spans, source="measured"))], path)
    assert "measured · 12.5 ms · bubble 0.0%" in texts(path)
    assert "time (ms)" in texts(path)


def sides(path, colour):
    """The left and the right side of each bar of a colour; those of the legend are no bars."""
    text = path.read_text()
    shapes = dict(re.findall(r'<path id="([^"]*)" d="([^"]*)"', text))
    bars = re.findall(rf'<use xlink:href="#([^"]*)"[^>]*style="fill: {colour}', text)
    columns = [[float(x) for x in re.findall(r"[ML] ([\d.]+)", shapes[bar])] for bar in bars]
    return [(min(found), max(found)) for found in columns]


def test_the_parts_of_an_update_are_drawn_one_after_the_other_behind_the_iteration(tmp_path):
    path = tmp_path / "chart.svg"
    update = tuple(
        Phase(worker=0, name=name, start=start, end=start + 2) for name, start in (("optimizer", 12), ("average", 14))
    )
    spans = (Span(worker=0, action=Action(stage=0, op=Op.F, microbatch=0), start=0, end=12),)
    gantt([("measured", Timeline(num_workers=1, spans=spans, update=update))], path, axis=UNITS)
    [forward], [optimizer], [average] = (
        sides(path, colour) for colour in (palette.OP_COLOURS[Op.F], palette.UPDATE, palette.PHASE_COLOURS["average"])
    )
    assert forward[1] == pytest.approx(optimizer[0], abs=0.1)
    assert optimizer[1] == pytest.approx(average[0], abs=0.1)
    assert forward[1] - forward[0] == pytest.approx(6 * (average[1] - average[0]), rel=0.01)


def test_several_timelines_are_panels_of_one_picture(tmp_path):
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    timeline = timeline_of(2, 3)
    gantt([("predicted", timeline)], one)
    gantt([("predicted", timeline), ("measured", replace(timeline, source="measured"))], two)
    assert Image.open(two).width == Image.open(one).width
    assert Image.open(two).height > Image.open(one).height


def test_frozen_components_communication_and_reduction_have_colours_and_names_of_their_own(tmp_path):
    schedule = one_f_one_b(1, 1)
    fills = tuple(Fill(stage=0, component=name, layers=Range(0, 1), samples=Range(0, 1)) for name in ("vae", "text"))
    actions = [
        Action(stage=0, op=Op.ENCODE, slot=0),
        Action(stage=0, op=Op.ENCODE, slot=1),
        Action(stage=0, op=Op.F, microbatch=0),
        Action(stage=0, op=Op.SEND_F, microbatch=0, slot=0),
        Action(stage=0, op=Op.RECV_B, microbatch=0, slot=1),
        Action(stage=0, op=Op.REDUCE_GRAD),
    ]
    spans = tuple(Span(worker=0, action=action, start=i, end=i + 1) for i, action in enumerate(actions))
    path = tmp_path / "chart.svg"
    gantt([("", Timeline(num_workers=1, spans=spans))], path, schedule=replace(schedule, fills=fills))
    assert {"vae", "text", "send", "receive", "gradient reduction"} <= set(texts(path))
    assert {
        palette.COMPONENT_COLOURS["vae"],
        palette.OTHER_COLOURS[0],
        "#9ecae1",
        "#4d4d4d",
        "#a6a6a6",
        "#d55e00",
    } <= colours(path)


def test_a_component_has_the_same_colour_beside_any_others():
    alone = palette.component_colours({0: "vae"})
    beside = palette.component_colours({0: "text_encoder", 1: "small/vae", 2: "vae"})
    assert alone["vae"] == beside["vae"] == beside["small/vae"] != beside["text_encoder"]


def test_the_second_direction_has_a_hue_of_its_own_and_the_legend_says_so(tmp_path):
    schedule = chimera(2, 2)
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    gantt([("", timeline_of(2, 2))], one)
    gantt([("", simulate(schedule, uniform_costs(schedule)))], two)
    hues = {palette.LATER_COLOURS[op] for op in (Op.F, Op.B)}
    assert hues <= colours(two)
    assert hues.isdisjoint(colours(one))
    assert palette.LATER_NAME in texts(two)
    assert palette.LATER_NAME not in texts(one)


def test_two_models_have_two_hues_with_their_names(tmp_path):
    schedule, path = opposed(2, (2, 2)), tmp_path / "two.svg"
    names = [pipeline.model for pipeline in schedule.placement.pipelines]
    gantt([("", simulate(schedule, uniform_costs(schedule)))], path, schedule=schedule)
    assert {palette.OP_COLOURS[Op.B], palette.LATER_COLOURS[Op.B]} <= colours(path)
    assert {f"{name}, {op}" for name in names for op in ("forward", "backward")} <= set(texts(path))
    assert {"0F0", "3B1"} <= set(texts(path))  # with the numbers of their stages


def test_three_models_have_three_hues_with_their_names(tmp_path):
    """Two of them in one direction, the second in the other."""
    layout = Layout(
        batch=4,
        stages=2,
        microbatches=2,
        schedule="opposed",
        backbones=tuple(BackboneLayout(name=name, microbatches=2) for name in ("small", "middle", "large")),
    )
    schedule, path = layout.generated(), tmp_path / "three.svg"
    gantt([("", simulate(schedule, uniform_costs(schedule)))], path, schedule=schedule)
    assert {hue[Op.B] for hue in palette.MODEL_COLOURS} <= colours(path)
    assert {f"{name}, backward" for name in ("small", "middle", "large")} <= set(texts(path))
    assert palette.LATER_NAME not in texts(path)


def test_two_models_whole_on_one_rank_have_two_hues_too(tmp_path):
    schedule, path = opposed(1, (2, 2)), tmp_path / "one.svg"
    gantt([("", simulate(schedule, uniform_costs(schedule)))], path, schedule=schedule)
    assert {palette.OP_COLOURS[Op.B], palette.LATER_COLOURS[Op.B]} <= colours(path)


def test_estimates_of_two_models_have_a_colour_of_their_own(tmp_path):
    plain, path = opposed(2, (2, 2)), tmp_path / "probes.svg"
    models = [pipeline.model for pipeline in plain.placement.pipelines]
    schedule = with_probes(plain, dict.fromkeys(models, Fraction(1, 2)))
    gantt([("", simulate(schedule, uniform_costs(schedule)))], path, schedule=schedule)
    assert {palette.PROBE, palette.OP_COLOURS[Op.B], palette.LATER_COLOURS[Op.B]} <= colours(path)
    assert palette.PROBE_NAME in texts(path)


def test_four_stages_of_a_rank_have_four_shades(tmp_path):
    path = tmp_path / "chart.svg"
    schedule = bitpipe(2, 2)
    gantt([("", simulate(schedule, uniform_costs(schedule)))], path)
    shades = {palette.stage_colour(Op.F, place, 4) for place in range(4)}
    assert len(shades) == 4
    assert shades <= colours(path)


def test_numbers_are_left_out_where_they_do_not_fit(tmp_path):
    path = tmp_path / "chart.svg"
    schedule = one_f_one_b(1, 150)
    costs = Costs(stages=(StageCosts(forward=1, backward=9),))
    gantt([("", simulate(schedule, costs))], path, axis=UNITS)
    assert "149" not in texts(path)


def test_numbers_that_could_not_be_read_are_neither_drawn_nor_explained(tmp_path):
    few, many = tmp_path / "few.svg", tmp_path / "many.svg"
    gantt([("", timeline_of(2, 2))], few, axis=UNITS)
    gantt([("", timeline_of(32, 2)), ("", timeline_of(32, 2))], many, axis=UNITS)
    assert "numbers: micro-batches" in texts(few)
    assert "numbers: micro-batches" not in texts(many)
    assert len(texts(many)) < len(texts(few)) + 2 * 32 + 20  # ranks and ticks, no micro-batches


def test_the_chart_says_what_is_of_the_next_batch_and_names_nothing_too_short_to_be_seen(tmp_path):
    schedule = one_f_one_b(1, 1)
    fills = {
        0: [PlacedFill(position=0, component=n, layers=Range(0, 1), samples=Range(0, 1)) for n in ("vae", "noise")]
    }
    schedule = insert_fills(schedule, fills, block=9, outputs={})
    costs = Costs(stages=(StageCosts(forward=1, backward=2),) * 2, fills=(1, 1e-5))
    path = tmp_path / "chart.svg"
    gantt([("", simulate(schedule, costs))], path, schedule=schedule)
    assert "vae" in texts(path)
    assert "numbers: micro-batches · of the next batch: vae" in texts(path)
    assert not any("noise" in text for text in texts(path))


def test_a_chart_of_32_ranks_is_drawn_with_every_rank_named(tmp_path):
    path = tmp_path / "chart.svg"
    gantt([("", timeline_of(32, 32))], path, axis=UNITS)
    assert {f"rank {rank}" for rank in range(32)} <= set(texts(path))


def test_an_empty_timeline_is_drawn(tmp_path):
    gantt([("", Timeline(num_workers=2, spans=()))], tmp_path / "chart.png")
    assert np.asarray(Image.open(tmp_path / "chart.png").convert("RGB")).min() == 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("chart.foo", "no picture format '.foo'; use .png, .svg or .pdf"),
        ("chart", "no picture format ''"),
        ("missing/chart.png", "cannot write"),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused(tmp_path, name, says):
    with pytest.raises(ConfigError) as caught:
        gantt([("", timeline_of(1, 1))], tmp_path / name)
    assert says in str(caught.value)


def test_drawing_leaves_pyplot_alone(tmp_path):
    had_pyplot = "matplotlib.pyplot" in sys.modules
    gantt([("", timeline_of(1, 1))], tmp_path / "chart.png")
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot
