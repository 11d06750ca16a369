"""What published planners minimise, of given stages and straight from their formulas (see `search.objectives`)."""

from collections.abc import Sequence

from diffusionpipe.planner.search.dynamic_program import LinkTime, StageTime
from diffusionpipe.units import Seconds


def critical_path(num_microbatches: int, stages: Sequence[StageTime], links: Sequence[LinkTime]) -> Seconds:
    """T^max of given stages, straight from its formula (see `CriticalPath`)."""
    slowest = max(*(f + b for f, b, _ in stages), *(f + b for f, b in links), 0.0)
    gap = 0.0
    for s, (_, _, reduce) in enumerate(stages):
        later = sum(b for _, b, _ in stages[:s]) + sum(b for _, b in links[:s])
        gap = max(gap, reduce - later)
    return (num_microbatches + 2 * len(stages) - 2) * slowest + gap


def planning_bound(num_microbatches: int, stages: Sequence[StageTime], links: Sequence[LinkTime]) -> Seconds:
    """SPP's bound of given stages, straight from its formula (see `PlanningBound`)."""
    slowest = max(*(f + b for f, b, _ in stages), *(f + b for f, b in links), 0.0)
    return (1 + (4 * len(stages) - 4) / num_microbatches) * num_microbatches * slowest + max(r for _, _, r in stages)


def pivot_latency(num_microbatches: int, stages: Sequence[StageTime], links: Sequence[LinkTime]) -> Seconds:
    """DAPPLE's L of given stages, straight from its formula (see `PivotLatency`)."""
    chain: list[tuple[Seconds, Seconds, Seconds | None]] = []
    for s, stage in enumerate(stages):
        chain.append(stage)
        if s < len(links):
            chain.append((*links[s], None))
    latencies = []
    for q, (forward, backward, _) in enumerate(chain):
        start = sum(f for f, _, _ in chain[: q + 1]) + (num_microbatches - 1) * (forward + backward)
        for s, (_, _, reduce) in enumerate(chain):
            if reduce is not None:
                left = sum(b for _, b, _ in chain[s : q + 1]) if s <= q else -sum(b for _, b, _ in chain[q + 1 : s])
                latencies.append(start + left + reduce)
    return max(latencies)
