"""Random iterations with random frozen layers, and how long they take when filled."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from time import process_time

from diffusionpipe.costs import Costs, Link, StageCosts
from diffusionpipe.ir import Schedule
from diffusionpipe.passes import reduce_gradients
from diffusionpipe.planner.filling.compute_graph import ComputeGraph, compute_graph
from diffusionpipe.planner.filling.fills import FrozenLayers, plan_fills
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.units import Seconds

ALLOWED = 1.02
"""No case should take longer than so many bounds and one sample's whole frozen time."""
CALLS = (0.0, 0.1)
"""Time of a call that does not depend on its samples, in units of the time of one sample."""


@dataclass(frozen=True, kw_only=True)
class FillCase:
    """Compute, and frozen layers to fill its waits with."""

    schedule: Schedule
    costs: Costs
    graph: ComputeGraph
    frozen: FrozenLayers
    batch: int

    @property
    def sample_seconds(self) -> Seconds:
        """Frozen time of one sample."""
        return self.frozen.running(1)[-1]


def random_case(
    seed: int, *, max_workers: int = 8, max_samples: int = 256, fixed: Sequence[float] = (0, 0.1, 0.5)
) -> FillCase:
    """gpipe or 1f1b with uneven stages, latencies, reductions; 1 to 60 frozen layers with 5 to 150 % of the idle time.

    `fixed`: what one of is the time of a call that does not depend on its samples, in units of the time of one sample.
    """
    random = Random(seed)
    p = random.randint(2, max_workers)
    m = random.randint(p, 4 * p)
    size = max(1, random.randint(8, max_samples) // m)
    schedule = REGISTRY[random.choice(["gpipe", "1f1b"])](p, m, size)
    stages = []
    for _ in range(p):
        forward = random.uniform(1, 2.5) * size
        stages.append(StageCosts(forward=forward, backward=forward * random.uniform(1.6, 2.4)))
    reduces: tuple[float, ...] = ()
    if random.random() < 0.5:
        schedule = reduce_gradients(schedule, is_data_parallel=True)
        reduces = tuple(random.uniform(0, 10) * size for _ in range(p))
    costs = Costs(stages=tuple(stages), link=Link(random.choice([0, 0.1 * size])), reduces=reduces)
    graph = compute_graph(schedule, costs)
    idle = graph.makespan * p - sum(graph.busy)
    frozen = random_layers(random, random.randint(1, 60), idle * random.uniform(0.05, 1.5) / (m * size), fixed)
    return FillCase(schedule=schedule, costs=costs, graph=graph, frozen=frozen, batch=m * size)


def random_layers(random: Random, num_layers: int, sample_seconds: Seconds, fixed: Sequence[float]) -> FrozenLayers:
    """Uneven layers of up to four components; `sample_seconds`: the time of one sample of many."""
    weights = [random.expovariate(1) + 0.01 for _ in range(num_layers)]
    slopes = [sample_seconds * weight / sum(weights) for weight in weights]
    calls = random.choice(fixed)
    num_components = random.randint(1, 4)
    components = tuple(f"part{i * num_components // num_layers}" for i in range(num_layers))
    return FrozenLayers(components=components, forward=lambda layer, samples: slopes[layer] * (calls + samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A random iteration after filling, in the units of its costs."""

    seed: int
    iteration: Seconds
    bound: Seconds
    """max(pipeline alone, (compute + frozen work at the chunk sizes used) / workers)."""
    sample: Seconds
    """Frozen time of one sample."""
    planning: Seconds
    """Processor time of `plan_fills`."""

    @property
    def ratio(self) -> float:
        """The iteration over its bound."""
        return self.iteration / self.bound

    @property
    def is_within(self) -> bool:
        """Whether it takes no longer than `ALLOWED` bounds and a sample."""
        return self.iteration <= ALLOWED * self.bound + self.sample


def fill_cases(count: int) -> list[Filled]:
    """The cases of the seeds 0, 1, ..., filled."""
    return [_filled(seed) for seed in range(count)]


def _filled(seed: int) -> Filled:
    case = random_case(seed, fixed=CALLS)
    started = process_time()
    plan = plan_fills(case.schedule, case.costs, case.frozen)
    return Filled(
        seed=seed,
        iteration=plan.iteration,
        bound=plan.bound,
        sample=case.sample_seconds,
        planning=process_time() - started,
    )


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest of the values that so large a part of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-part * len(ordered) // 1) - 1)]
