"""A timeline as data of a page: rows of bars in the colours of all our pictures, with the details of each action."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from diffusionpipe.ir import COMPUTE_OPS, MESSAGE_OPS, SEND_OPS, Action, Op, Plan, Schedule, Timeline
from diffusionpipe.viz import palette
from diffusionpipe.viz.places import PROBE, hues_of_stages, is_later
from diffusionpipe.workflows.report.figures import Json

if TYPE_CHECKING:
    from diffusionpipe.costs import ModelGraph

_DIGITS = 9
"""The significant digits of a time in a page; files have more."""
_COMPUTE, _MESSAGES, _SUMS = 0, 1, 2
"""The lanes of a rank's row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSource:
    """The origin of a page's timeline: "predicted" or "measured", its file, and the unit of its times."""

    name: str
    """"predicted" or "measured"."""
    file: str
    unit: str = "ms"
    """The unit of its times on a page: "ms", or "units" where all stages take equal time."""


class Actions:
    """Numbers the actions and kinds of bars in a page's timelines, each once. Mutable: grows with each timeline."""

    def __init__(self, plan: Plan, graph: ModelGraph | None) -> None:
        self._plan, self._graph = plan, graph
        self._sizes = {one.name: one.num_bytes for one in graph.tensors} if graph else {}
        self._numbers = {one.name: prod(one.shape) for one in graph.parameters} if graph else {}
        self._layers = {one.name for one in graph.layers} if graph else set()
        self._number: dict[tuple[str, str, int], int] = {}
        self._kind: dict[tuple[str, str, int], int] = {}
        self.rows: list[list[object]] = []
        """[text, number of its kind, words, stage or -1, fill or message or -1] of each action, by its number."""

    def number(self, text: str, kind: tuple[str, str, int], words: str, stage: int, slot: int) -> int:
        """The number of an action on the page; a new action gets the next one.

        `text`: its text form. `kind`: name, colour and lane of its bar. `words`: its description. `stage`, `slot`: its
        stage, and its fill or message; -1 for none.
        """
        key = (text, kind[0], slot)
        if key not in self._number:
            self._number[key] = len(self.rows)
            self.rows.append([text, self._kind.setdefault(kind, len(self._kind)), words, stage, slot])
        return self._number[key]

    @property
    def kinds(self) -> list[Json]:
        """The name, colour and lane of each kind of bar, in the order of their numbers."""
        return [{"name": name, "colour": colour, "lane": lane} for name, colour, lane in self._kind]

    def stages(self) -> list[Json]:
        """The worker, the layers and the number of parameters of each stage, frozen ones too."""
        found = []
        for stage in self._plan.train.placement.stages:
            layers = self._plan.blocks[stage.weights]
            found.append({"worker": stage.worker, "layers": list(layers), "parameters": self.parameters(layers)})
        return found

    def fills(self) -> list[Json]:
        """The component, layers and samples of each fill."""
        stages = self._plan.train.placement.stages
        return [
            {
                "component": fill.component or "frozen layers",
                "layers": list(self._plan.blocks[stages[fill.stage].weights][fill.layers.start : fill.layers.stop]),
                "samples": str(fill.samples),
            }
            for fill in self._plan.train.fills
        ]

    def messages(self) -> list[list[object]]:
        """[source, destination, samples, tensors, bytes] of each message; 0 bytes where they are not known."""
        return [
            [
                one.source,
                one.destination,
                str(one.samples),
                list(one.tensors),
                self._bytes(one.tensors, len(one.samples)),
            ]
            for one in self._plan.train.messages
        ]

    def _bytes(self, tensors: tuple[str, ...], samples: int) -> int:
        return sum(self._sizes.get(name, 0) for name in tensors) * samples

    def parameters(self, layers: tuple[str, ...]) -> int:
        """The number of elements in the parameters of these layers; 0 where they are not known."""
        if self._graph is None or not self._layers.issuperset(layers):
            return 0
        return sum(self._numbers[name] for name in self._graph.parameters_of(layers))


def timeline_data(
    timeline: Timeline, plan: Plan, source: TimelineSource, actions: Actions, names: Mapping[int, str]
) -> Json:
    """The page's data of one timeline: its source, and for each worker a row of bars; `names`: worker -> row's name."""
    scale = 1e3 if source.unit == "ms" else 1.0
    schedule = plan.train
    colours = _Colours(timeline, schedule)
    spans: dict[int, list[tuple[float, float, int]]] = defaultdict(list)
    for span in timeline.spans:
        number = actions.number(*colours.of(span.action))
        spans[span.worker].append((span.start, span.end, number))
    for phase in timeline.update:
        kind = (palette.UPDATE_NAME, palette.UPDATE, _COMPUTE)
        number = actions.number(phase.name, kind, f"update after the iteration: {phase.name}", -1, -1)
        spans[phase.worker].append((phase.start, phase.end, number))
    rows = []
    for worker in range(timeline.num_workers):
        flat: list[float] = []
        for start, end, number in sorted(spans[worker]):
            flat += [_short(start * scale), _short((end - start) * scale), number]
        rows.append({"worker": worker, "name": names.get(worker, f"rank {worker}"), "spans": flat})
    return {
        "source": source.name,
        "file": source.file,
        "unit": source.unit,
        "length": _short(timeline.step * scale),
        "rows": rows,
    }


def _short(value: float) -> float:
    # Fewer digits make a smaller page; whole numbers have no ".0".
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() else short


class _Colours:
    """Gives each action of a timeline the name, the colour and the lane of its bar."""

    def __init__(self, timeline: Timeline, schedule: Schedule) -> None:
        self._hues = hues_of_stages(timeline.spans, schedule)
        self._components = palette.components((timeline,), schedule)
        self._of_component = palette.component_colours(self._components)

    def of(self, action: Action) -> tuple[str, tuple[str, str, int], str, int, int]:
        """(text form, (name, colour, lane) of its bar, description, stage, slot) of an action, for `Actions.number`."""
        slot = -1 if action.slot is None else action.slot
        name, colour, lane = self._kind(action)
        words = name if action.microbatch is None else f"{name}, stage {action.stage}, micro-batch {action.microbatch}"
        return str(action), (name, colour, lane), words, action.stage, slot

    def _kind(self, action: Action) -> tuple[str, str, int]:
        op = action.op
        if op in COMPUTE_OPS:
            place = self._hues.get(action.stage, (0, 1))
            name = palette.PROBE_NAME if place == PROBE else palette.OP_NAMES[op]
            return (
                f"{name}{', second direction or chunk' * is_later(*place)}",
                palette.stage_colour(op, *place),
                _COMPUTE,
            )
        if op is Op.ENCODE:
            component = self._components.get(action.slot or 0, "frozen")
            return palette.frozen_name(component), self._of_component.get(component, palette.PROBE), _COMPUTE
        if op in MESSAGE_OPS:
            sends = op in SEND_OPS
            return ("send", palette.SEND, _MESSAGES) if sends else ("receive", palette.RECEIVE, _MESSAGES)
        if op is Op.STEP:
            return palette.UPDATE_NAME, palette.UPDATE, _COMPUTE
        gathers = op in (Op.UNSHARD, Op.RESHARD)
        return ("gather parameters", palette.GATHER, _SUMS) if gathers else ("sum gradients", palette.REDUCE, _SUMS)
