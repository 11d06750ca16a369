"""Times and memory of schedules of F, I and W, for tests of the families."""

from collections.abc import Sequence

from diffusionpipe.costs import Costs, Link, StageCosts
from diffusionpipe.ir import Schedule, Timeline
from diffusionpipe.simulator import simulate

SOME_MICROBATCHES = (1, 2, 3, 4, 7, 16, 33)
"""With up to 16 workers: fewer than workers, as many, and more."""

EQUAL = StageCosts()
UNEQUAL = StageCosts(forward=10, input_grad=12, weight_grad=8)


def simulated(schedule: Schedule, costs: StageCosts | Sequence[StageCosts] = EQUAL, latency: float = 0) -> Timeline:
    """The timeline with these costs, one for all stages or one for each."""
    if isinstance(costs, StageCosts):
        costs = [costs] * len(schedule.placement.stages)
    return simulate(schedule, Costs(stages=tuple(costs), link=Link(latency=latency)))


def window(timeline: Timeline) -> float:
    """The longest time between a worker's first start and its last end."""
    return max(timeline.window(worker) for worker in range(timeline.num_workers))


def peak_memory(timeline: Timeline) -> float:
    """The most that a worker holds."""
    return max(timeline.peak_memory(worker) for worker in range(timeline.num_workers))
