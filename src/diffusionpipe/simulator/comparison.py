"""All families side by side: the same model, the same workers, the same micro-batches."""

from collections.abc import Mapping
from dataclasses import dataclass

from diffusionpipe.costs import Costs, Link, StageCosts
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Schedule, Timeline
from diffusionpipe.ir.flows import flows
from diffusionpipe.schedules import REGISTRY, Generator
from diffusionpipe.simulator.simulate import simulate
from diffusionpipe.timing.held import activations_in_flight
from diffusionpipe.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCosts:
    """The times of one worker's part of the model, 1/p of it, for one micro-batch, and the latency of messages."""

    forward: Seconds = 1
    input_grad: Seconds = 1
    weight_grad: Seconds = 1
    latency: Seconds = 0
    """Time that a message between two workers takes besides its bytes."""

    @property
    def compute(self) -> Seconds:
        """The time of forward, input gradient and weight gradient together, in the unit of the costs."""
        return self.forward + self.input_grad + self.weight_grad


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyResult:
    """The time, memory and messages that a schedule of a family reaches. Times are in the unit of the costs."""

    name: str
    schedule: Schedule
    timeline: Timeline
    peaks: tuple[float, ...]
    """The most activations that each worker holds; 1 is the activations of its part of the model for one micro-batch.
    """
    messages: int
    """Transfers between two workers in one iteration."""
    weights: float
    """Copies of its part of the model that the fullest worker holds; 1 where no block is held twice."""

    @property
    def makespan(self) -> Seconds:
        """The time from 0 to the last end, in the unit of the costs."""
        return self.timeline.makespan

    @property
    def window(self) -> Seconds:
        """The longest time between the first start and the last end of one worker, in the unit of the costs."""
        return max(self.timeline.window(worker) for worker in range(self.timeline.num_workers))

    @property
    def window_bubble(self) -> float:
        """The idle part of the window, 0 to 1: the loss where the optimizer's step does not synchronise."""
        busy = sum(self.timeline.busy(worker) for worker in range(self.timeline.num_workers))
        return 1 - busy / (self.timeline.num_workers * self.window) if self.window else 0.0

    @property
    def peak(self) -> float:
        """The most activations that the fullest worker holds; 1: of its part of the model for one micro-batch."""
        return max(self.peaks)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyComparison:
    """The figures of every family at the same sizes, and the families that cannot do them."""

    results: tuple[FamilyResult, ...]
    """The figures of the families that can do these sizes, fastest first; equally fast ones by memory."""
    undefined: Mapping[str, str]
    """Name of each other family -> the reason why it cannot do these sizes."""


def part_of_worker(schedule: Schedule) -> float:
    """The size of a block as a multiple of one worker's equal part of the model; an int where it is whole."""
    blocks = len({stage.weights for stage in schedule.placement.stages})
    whole, rest = divmod(schedule.num_workers, blocks)
    return schedule.num_workers / blocks if rest else whole


def equal_costs(schedule: Schedule, costs: WorkerCosts) -> Costs:
    """The costs of a schedule whose blocks are equal parts of the model, from the costs of one worker's part."""
    part = part_of_worker(schedule)
    stage = StageCosts(
        forward=costs.forward * part,
        backward=(costs.input_grad + costs.weight_grad) * part,
        input_grad=costs.input_grad * part,
        weight_grad=costs.weight_grad * part,
        activation=1,
        kept_after_input_grad=1,
    )
    return Costs(stages=(stage,) * len(schedule.placement.stages), link=Link(latency=costs.latency))


def measure(name: str, schedule: Schedule, costs: WorkerCosts) -> FamilyResult:
    """The simulated figures of a schedule, all of whose blocks are equal parts of the model."""
    part = part_of_worker(schedule)
    timeline = simulate(schedule, equal_costs(schedule, costs))
    homes = [stage.worker for stage in schedule.placement.stages]
    return FamilyResult(
        name=name,
        schedule=schedule,
        timeline=timeline,
        peaks=tuple(
            held * part for held in activations_in_flight(schedule)
        ),  # whatever the times, of which any may be 0
        messages=sum(homes[flow.source] != homes[flow.destination] for flow in flows(schedule)),
        weights=max(homes.count(worker) for worker in set(homes)) * part,
    )


def compare_families(
    num_workers: int,
    num_microbatches: int,
    costs: WorkerCosts,
    *,
    families: Mapping[str, Generator] = REGISTRY,
) -> FamilyComparison:
    """The figures of every family that can do these sizes, fastest first, and the reasons why others cannot.

    >>> found = compare_families(4, 8, WorkerCosts(), families={name: REGISTRY[name] for name in ("gpipe", "1f1b")})
    >>> [(result.name, result.makespan, result.peak) for result in found.results]
    [('1f1b', 33, 4), ('gpipe', 33, 8)]

    Raises:
        ConfigError: no family can do them.
    """
    results: list[FamilyResult] = []
    undefined: dict[str, str] = {}
    for name, generate in families.items():
        try:
            schedule = generate(num_workers, num_microbatches)
        except ConfigError as error:
            undefined[name] = str(error)
            continue
        results.append(measure(name, schedule, costs))
    if not results:
        raise ConfigError("\n".join(f"{name}: {why}" for name, why in undefined.items()))
    # Rounded, so that makespans of floats that differ by their last bits alone are ordered by memory.
    results.sort(key=lambda result: (round(result.makespan, 9), result.peak, result.weights, result.name))
    return FamilyComparison(results=tuple(results), undefined=undefined)
