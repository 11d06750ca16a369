"""Recorded orders: instances of the order search and its answers, all in orders.json.xz; families in families.json.

An entry of orders.json.xz has the instance, the answer's objective, makespan and window, and its orders as a schedule
file. Times are in the instance's own ticks.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from golden.plans import pack, unpacked

from diffusionpipe.costs import Costs, Link, StageCosts
from diffusionpipe.ir import Schedule
from diffusionpipe.ir.files import schedule_from_text
from diffusionpipe.ordering import Answer, Goal, Instance
from diffusionpipe.ordering.instance_file import parse_instance
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.simulator import simulate

FILE = Path(__file__).parent / "orders.json.xz"
FAMILIES = Path(__file__).parent / "families.json"
STAGES_TOLD = {"zb-1p": 1, "zb-2p": 1, "zb-v": 2, "v-half": 2, "v-min": 2}
"""The families whose generators take costs and a latency, and their stages on a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A question to the search and the answer."""

    name: str
    asked: Mapping[str, Any]
    """The instance as its JSON file has it, every field written out."""
    placement: str
    makespan: float
    window: float
    schedule_file: str

    @property
    def instance(self) -> Instance:
        """As today's reader has it."""
        return parse_instance(json.dumps(self.asked), source=self.name)

    @property
    def schedule(self) -> Schedule:
        """The orders as today's reader has them."""
        return schedule_from_text(self.schedule_file, source=self.name)

    @property
    def value(self) -> float:
        """What was to be short."""
        return self.window if self.asked["objective"] == Goal.WINDOW else self.makespan


def value_of(instance: Instance, answer: Answer) -> float:
    """What was to be short, of an answer."""
    return answer.window if instance.objective is Goal.WINDOW else answer.makespan


def recorded_orders() -> tuple[Order, ...]:
    """All of them."""
    return tuple(Order(**row) for row in json.loads(unpacked(FILE)))


def write_orders(rows: list[dict[str, Any]]) -> None:
    """In the place of those that are recorded."""
    pack(json.dumps(rows), FILE)


def family_figures(name: str, *, ranks: int, microbatches: int, halves: Sequence[int], comm: int) -> list[float]:
    """Makespan and peak of a published family, where half-stages take F = I = W and hold an activation of 1.

    Raises:
        ConfigError: the family cannot do these sizes.
    """
    generate: Callable[..., Schedule] = REGISTRY[name]
    if name in STAGES_TOLD:
        costs = _stage_costs(halves, STAGES_TOLD[name] * ranks)
        generate = partial(generate, costs=costs, latency=comm)
    schedule = generate(ranks, microbatches)
    stages = schedule.placement.stages
    of_block = _stage_costs(halves, len({stage.weights for stage in stages}))
    costs = Costs(stages=tuple(of_block[stage.weights] for stage in stages), link=Link(latency=comm))
    timeline = simulate(schedule, costs)
    return [timeline.makespan, max(timeline.peak_memory(rank) for rank in range(ranks))]


def _stage_costs(halves: Sequence[int], num_blocks: int) -> tuple[StageCosts, ...]:
    """Of the model in so many blocks."""
    each = len(halves) // num_blocks
    times = [sum(halves[each * block : each * (block + 1)]) for block in range(num_blocks)]
    return tuple(
        StageCosts(
            forward=time,
            backward=2 * time,
            input_grad=time,
            weight_grad=time,
            activation=each,
            kept_after_input_grad=each,
        )
        for time in times
    )
