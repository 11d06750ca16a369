"""One cell: every family simulated, and the search at every memory limit."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from types import MappingProxyType

from benchmarks.schedules.costs import STAGES_TOLD, Cell
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Schedule
from diffusionpipe.ordering import Goal, Instance, Placing, search
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.simulator import simulate
from diffusionpipe.units import Seconds

LIMITS: Mapping[str, float] = MappingProxyType({"1/3": 1 / 3, "1/2": 1 / 2, "1": 1.0, "2": 2.0, "none": inf})
"""Of what 1F1B holds."""
EPSILON = 1e-9
"""Of times in F: what is closer is equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What an order reaches. Times are in F of 1/p of the model, activations in those of 1/p of the model."""

    name: str
    """A family, or where the search's order comes from."""
    makespan: float
    window: float
    """The longest time between the first start and the last end of one rank."""
    bubble: float
    """Idle part of the makespan, over all ranks."""
    window_bubble: float
    """Of the window."""
    peak: float
    """Of the fullest rank."""
    seconds: Seconds
    """Of the processor, to generate it or to search."""

    def value(self, objective: str) -> float:
        """What is to be short."""
        return self.window if objective == Goal.WINDOW else self.makespan

    def idle(self, objective: str) -> float:
        """The bubble of it."""
        return self.window_bubble if objective == Goal.WINDOW else self.bubble


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(Figures):
    """A published family."""

    weights: float
    """Copies of 1/p of the model on the fullest rank."""

    @property
    def is_single(self) -> bool:
        """Whether every block stands once, as the search has it."""
        return self.weights == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched(Figures):
    """The search's answer."""

    limit: str
    """One of LIMITS."""
    placement: str
    bound: float
    """What no order on the three placements can beat within the limit."""
    is_optimal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A family that fits and is better than what the search found."""

    cell: Cell
    limit: str
    family: str
    of_family: float
    of_search: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Everything about a cell."""

    cell: Cell
    objective: str
    families: tuple[Family, ...]
    undefined: Mapping[str, str]
    """Family -> why it cannot do these sizes."""
    searched: Mapping[str, Searched]
    """By limit; one too small for a single micro-batch is missing."""

    def fitting(self, limit: str) -> Iterator[Family]:
        """The families of one copy within the limit."""
        most = self.cell.limit(LIMITS[limit]) / 2
        return (family for family in self.families if family.is_single and family.peak <= most)

    def best(self, limit: str) -> tuple[Family, ...]:
        """The fastest of them, all if several are equally fast; the one that holds least first."""
        found = list(self.fitting(limit))
        if not found:
            return ()
        least = min(family.value(self.objective) for family in found)
        winners = [family for family in found if family.value(self.objective) <= least + EPSILON]
        return tuple(sorted(winners, key=lambda family: family.peak))

    def violations(self) -> Iterator[Violation]:
        """Every family that fits and is better than the search."""
        for limit, found in self.searched.items():
            of_search = found.value(self.objective)
            for family in self.fitting(limit):
                of_family = family.value(self.objective)
                if of_family < of_search - EPSILON:
                    yield Violation(
                        cell=self.cell, limit=limit, family=family.name, of_family=of_family, of_search=of_search
                    )


def run_cell(
    cell: Cell, *, objective: str = Goal.MAKESPAN, seconds: float = 0.02, names: Iterable[str] = REGISTRY
) -> Found:
    """All families and the search; `seconds` is the search's, for each placement and memory level that it tries."""
    families, undefined = [], {}
    for name in names:
        try:
            families.append(run_family(name, cell))
        except ConfigError as error:
            undefined[name] = str(error)
    answers = {limit: _searched(cell, limit, objective, seconds) for limit in LIMITS}
    return Found(
        cell=cell,
        objective=objective,
        families=tuple(families),
        undefined=undefined,
        searched={limit: answer for limit, answer in answers.items() if answer},
    )


def run_family(name: str, cell: Cell) -> Family:
    """A family at these sizes and costs.

    Raises ConfigError for sizes that it cannot do.
    """
    p = cell.ranks
    generate: Callable[[int, int], Schedule] = REGISTRY[name]
    if name in STAGES_TOLD:
        told: Callable[..., Schedule] = REGISTRY[name]
        generate = partial(told, costs=cell.stage_costs(STAGES_TOLD[name] * p), latency=cell.comm)
    started = time.process_time()
    schedule = generate(p, cell.microbatches)
    seconds = time.process_time() - started
    stages = schedule.placement.stages
    blocks = tuple(stage.weights for stage in stages)
    timeline = simulate(schedule, cell.costs(blocks))
    window = max(timeline.window(worker) for worker in range(p))
    homes = [stage.worker for stage in stages]
    return Family(
        name=name,
        makespan=cell.in_parts(timeline.makespan),
        window=cell.in_parts(window),
        bubble=1 - cell.work / (p * timeline.makespan),
        window_bubble=1 - cell.work / (p * window),
        peak=max(timeline.peak_memory(worker) for worker in range(p)) / 2,
        seconds=seconds,
        weights=max(homes.count(worker) for worker in set(homes)) * p / len(set(blocks)),
    )


def _searched(cell: Cell, limit: str, objective: str, seconds: float) -> Searched | None:
    """None where not even one micro-batch fits."""
    instance = Instance(
        ranks=cell.ranks,
        microbatches=cell.microbatches,
        placement=Placing.ANY,
        stages=cell.half_stages(),
        comm=cell.comm,
        memory_limit=(cell.limit(LIMITS[limit]),) * cell.ranks,
        objective=Goal(objective),
        seconds=seconds,
    )
    started = time.process_time()
    try:
        answer = search(instance)
    except ConfigError:
        return None
    return Searched(
        name=answer.family,
        makespan=cell.in_parts(answer.makespan),
        window=cell.in_parts(answer.window),
        bubble=1 - cell.work / (cell.ranks * answer.makespan),
        window_bubble=1 - cell.work / (cell.ranks * answer.window),
        peak=max(answer.peak_memory) / 2,
        seconds=time.process_time() - started,
        limit=limit,
        placement=answer.placement,
        bound=cell.in_parts(answer.lower_bound),
        is_optimal=answer.optimal,
    )
