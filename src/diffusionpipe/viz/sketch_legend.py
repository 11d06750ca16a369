"""Sketches for people who see one for the first time: the picture, and below it what its letters mean."""

from textwrap import wrap

from diffusionpipe.ir import Op, Timeline
from diffusionpipe.viz.gantt import UNITS, TimeAxis
from diffusionpipe.viz.sketch import Sketch, draw_sketch

_LETTERS = {
    Op.F: "F0: forward of micro-batch 0",
    Op.B: "B0: its backward",
    Op.I: "I0: gradient of the inputs",
    Op.W: "W0: gradient of the weights",
    Op.ENCODE: "E: frozen work (encoders); E3 is its fill 3",
}
_WIDEST = 100


def explained_sketch(timeline: Timeline, *, width: int, axis: TimeAxis = UNITS) -> str:
    """The sketch of a timeline, a blank line and its legend, as text of at most `width` columns."""
    drawn = draw_sketch(timeline, width=width, axis=axis)
    legend = wrap(legend_of(drawn), max(20, min(width, _WIDEST)), break_on_hyphens=False)
    return "\n".join([drawn.text, "", *legend])


def legend_of(drawn: Sketch) -> str:
    """The legend of a sketch in one paragraph: the meaning of its letters and signs.

    >>> from diffusionpipe.schedules import gpipe
    >>> from diffusionpipe.simulator import simulate, uniform_costs
    >>> schedule = gpipe(2, 2)
    >>> legend_of(draw_sketch(simulate(schedule, uniform_costs(schedule))))
    'One row per rank, time to the right. F0: forward of micro-batch 0; B0: its backward; -: continues; .: idle.'
    """
    letters = [text for op, text in _LETTERS.items() if op in drawn.ops]
    if drawn.has_probes:
        letters.append("P0: its forward without gradients, ahead")
    if drawn.has_stages:
        letters.append("2F0: the same on stage 2")
    if drawn.has_small_letters:
        letters.append("small letters (f0): the rank's second stage (direction or chunk)")
    if drawn.has_bare_letters:
        letters.append("a letter without a number: the action is too short to show it")
    sentences = ["One row per rank, time to the right.", "; ".join([*letters, "-: continues", ".: idle"]) + "."]
    if drawn.is_excerpt:
        sentences.append("Only the start, the middle and the end are shown.")
    return " ".join(sentences)
