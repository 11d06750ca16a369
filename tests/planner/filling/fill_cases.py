"""Random iterations with random frozen layers, for the tests of filling."""

from random import Random

from benchmarks.fill.cases import FillCase, random_case, random_layers
from diffusionpipe.costs import Costs, Link, StageCosts
from diffusionpipe.planner.filling.compute_graph import compute_graph
from diffusionpipe.schedules import REGISTRY

__all__ = ["FillCase", "random_case", "random_layers", "small_case"]


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
