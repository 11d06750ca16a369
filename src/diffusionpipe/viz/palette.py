"""Colours of operations: forward and backward in one hue, everything else apart, safe for colour-blind eyes.

Where a worker has several stages, the second direction's or chunk's have a hue of their own; within a hue later ones
are lighter.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle

from diffusionpipe.ir import Op, Schedule, Timeline
from diffusionpipe.viz.places import OF_MODEL, hues_of_stages, is_later, models_of
from diffusionpipe.viz.places import PROBE as PLACE_OF_PROBES

OP_COLOURS = {
    Op.F: "#9ecae1",
    Op.I: "#4292c6",
    Op.B: "#2171b5",
    Op.W: "#08306b",
}
LATER_COLOURS = {
    Op.F: "#bcbddc",
    Op.I: "#9e9ac8",
    Op.B: "#6a51a3",
    Op.W: "#3f007d",
}
THIRD_COLOURS = {
    Op.F: "#fcbba1",
    Op.I: "#fb6a4a",
    Op.B: "#cb181d",
    Op.W: "#67000d",
}
MODEL_COLOURS = (OP_COLOURS, LATER_COLOURS, THIRD_COLOURS)
"""The colours of operations of each of several models that train together, by turns."""
LATER_NAME = "second direction or chunk"
"""The name in legends of the stages that have `LATER_COLOURS`."""
PROBE = "#7bccc4"
PROBE_NAME = "forward without gradients"
OP_NAMES = {
    Op.F: "forward",
    Op.I: "backward, inputs",
    Op.B: "backward",
    Op.W: "backward, weights",
}
SEND = "#4d4d4d"
RECEIVE = "#a6a6a6"
REDUCE = "#d55e00"
GATHER = "#e7c36a"
UPDATE = "#8c564b"
UPDATE_NAME = "update"
PHASE_COLOURS = {"sum over all ranks": "#ead9d4", "clip": "#c9a096", "average": "#5a332b"}
"""Colours of the parts that follow an iteration; the optimizer, and an update that is not divided, have `UPDATE`."""
COMPONENT_COLOURS = {
    "text_encoder": "#e69f00",
    "vae": "#009e73",
    "text_encoder_2": "#cc79a7",
    "text_encoder_3": "#f0e442",
    "objective": "#b2a08a",
}
"""The colours of frozen components, Okabe and Ito's remaining hues: the same in every picture."""
OTHER_COLOURS = ("#66c2a5", "#d9b38c", "#a6761d", "#e7298a")
"""The colours of components with other names, in alphabetical order of the names, by turns."""


def named_hues(schedule: Schedule | None) -> Iterator[tuple[str, Mapping[Op, str]]]:
    """(prefix of the names of operations, colour of each operation): one for each model that trains, if several do.

    With one model, or without a schedule, one pair with "" as prefix.
    """
    models = models_of(schedule)
    if len(models) < 2:
        yield "", OP_COLOURS
    else:
        yield from ((f"{model}, ", colours) for model, colours in zip(models, cycle(MODEL_COLOURS), strict=False))


def stage_colour(op: Op, place: int, num_stages: int) -> str:
    """The colour "#rrggbb" of an op in the stage at `place` among the `num_stages` stages of its worker."""
    if (place, num_stages) == PLACE_OF_PROBES:
        return PROBE
    if num_stages == OF_MODEL:
        return MODEL_COLOURS[place % len(MODEL_COLOURS)][op]
    half = (num_stages + 1) // 2
    colours = LATER_COLOURS if is_later(place, num_stages) else OP_COLOURS
    return lightened(colours[op], 0.45 * (place % half) / half)


def phase_colour(name: str) -> str:
    """The colour "#rrggbb" of a part of the update, by its name."""
    return PHASE_COLOURS.get(name, UPDATE)


def has_probes(timelines: Iterable[Timeline]) -> bool:
    """Whether some timeline has forwards of probe pipelines, which have no backward."""
    return any(PLACE_OF_PROBES in hues_of_stages(timeline.spans).values() for timeline in timelines)


def has_later_stages(timelines: Iterable[Timeline], schedule: Schedule | None = None) -> bool:
    """Whether some stage is drawn in the colours of a second direction or chunk."""
    return any(is_later(*place) for t in timelines for place in hues_of_stages(t.spans, schedule).values())


def lightened(colour: str, part: float) -> str:
    """The colour "#rrggbb" mixed with white; `part`: the share of white, 0 to 1.

    >>> lightened("#000000", 0.5)
    '#808080'
    """
    return "#" + "".join(f"{round(value + part * (255 - value)):02x}" for value in _channels(colour))


def is_dark(colour: str) -> bool:
    """Whether a text on this colour must be white to be read."""
    red, green, blue = _channels(colour)
    # The weights of the channels in the brightness of a colour (Rec. 601).
    return 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 * 255


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def components(timelines: tuple[Timeline, ...], schedule: Schedule | None) -> dict[int, str]:
    """Number of each fill that some timeline runs -> its component; "frozen" where it has none or is not known."""
    slots = {
        span.action.slot
        for timeline in timelines
        for span in timeline.spans
        if span.action.op is Op.ENCODE and span.action.slot is not None
    }
    fills = schedule.fills if schedule else ()
    return {slot: (fills[slot].component if slot < len(fills) else "") or "frozen" for slot in sorted(slots)}


def component_colours(names: dict[int, str]) -> dict[str, str]:
    """Component -> its colour "#rrggbb"; components with one name in several models share it.

    >>> component_colours({0: "vae", 1: "base/text_encoder", 2: "image_encoder"})
    {'vae': '#009e73', 'base/text_encoder': '#e69f00', 'image_encoder': '#66c2a5'}
    """
    unique = dict.fromkeys(names.values())
    others = sorted({_without_model(name) for name in unique} - set(COMPONENT_COLOURS))
    colours = COMPONENT_COLOURS | dict(zip(others, cycle(OTHER_COLOURS), strict=False))
    return {name: colours[_without_model(name)] for name in unique}


def frozen_name(component: str) -> str:
    """The name of a frozen component's work in a legend.

    >>> frozen_name("vae"), frozen_name("frozen")
    ('frozen: vae', 'frozen layers')
    """
    return "frozen layers" if component == "frozen" else f"frozen: {component}"


def work_colours(components: Mapping[int, str]) -> dict[str, str]:
    """Name in a legend -> colour, for each op, each frozen component and the update; all stages look alike.

    `components`: number of a fill -> its component.
    """
    own = component_colours(dict(components))
    frozen = {frozen_name(component): colour for component, colour in own.items()}
    return {OP_NAMES[op]: colour for op, colour in OP_COLOURS.items()} | frozen | {UPDATE_NAME: UPDATE}


def _without_model(component: str) -> str:
    return component.rpartition("/")[2]
