"""Random iterations with random frozen layers, for the tests of filling."""

from dataclasses import dataclass
from random import Random

from diffusionpipe.costs import Costs, Link, StageCosts
from diffusionpipe.ir import Schedule
from diffusionpipe.passes import reduce_gradients
from diffusionpipe.planner.fill import FrozenLayers
from diffusionpipe.planner.fill_graph import ComputeGraph, compute_graph
from diffusionpipe.schedules import REGISTRY


@dataclass(frozen=True, kw_only=True)
class FillCase:
    schedule: Schedule
    costs: Costs
    graph: ComputeGraph
    frozen: FrozenLayers
    batch: int

    @property
    def sample_seconds(self) -> float:
        return self.frozen.running(1)[-1]


def random_case(seed: int, *, max_workers: int = 8, max_samples: int = 256, fixed: tuple[float, ...] = (0, 0.1, 0.5)):
    """gpipe or 1f1b with uneven stages, latencies, reductions; 1 to 60 frozen layers with 5 to 150 % of the idle time.

    `fixed`: time of a call that does not depend on its samples, in units of the time of one sample.
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


def random_layers(random: Random, num_layers: int, sample_seconds: float, fixed: tuple[float, ...]) -> FrozenLayers:
    """Uneven layers of up to four components; `sample_seconds`: the time of one sample of many."""
    weights = [random.expovariate(1) + 0.01 for _ in range(num_layers)]
    slopes = [sample_seconds * weight / sum(weights) for weight in weights]
    calls = random.choice(fixed)
    num_components = random.randint(1, 4)
    components = tuple(f"part{i * num_components // num_layers}" for i in range(num_layers))
    return FrozenLayers(components=components, forward=lambda layer, samples: slopes[layer] * (calls + samples))


def small_case(seed: int) -> FillCase:
    """What the exact solver does in well under a second: two or three workers, up to three layers."""
    random = Random(seed)
    p = random.randint(2, 3)
    m = random.randint(p, 4)
    size = random.randint(1, 2)
    schedule = REGISTRY[random.choice(["gpipe", "1f1b"])](p, m, size)
    stages = tuple(StageCosts(forward=random.randint(2, 6), backward=random.randint(4, 10)) for _ in range(p))
    costs = Costs(stages=stages, link=Link(random.choice([0, 1])))
    graph = compute_graph(schedule, costs)
    idle = graph.makespan * p - sum(graph.busy)
    sample_seconds = idle * random.uniform(0.3, 1.2) / (m * size)
    frozen = random_layers(random, random.randint(1, 3), sample_seconds, (0, 0.3))
    return FillCase(schedule=schedule, costs=costs, graph=graph, frozen=frozen, batch=m * size)
