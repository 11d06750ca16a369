"""How slow the network must be for ours to be so many times faster than overlapped data parallelism."""

from dataclasses import dataclass, replace
from math import sqrt

from benchmarks.paper.cells import Case, setting_of
from diffusionpipe.costs import Cluster
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.rivals.baselines import data_parallel
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.search import search

FACTOR = 1.28
"""What the paper reports over data parallelism."""
GRID = tuple(160e9 / 2**i for i in range(8))
"""Bus bandwidths in bytes a second, fastest first."""
BISECTIONS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """Of one case."""

    case: Case
    bandwidth: float | None
    """Of the bus between nodes, in bytes a second; below it ours is `FACTOR` times as fast. None: nowhere."""


def threshold(case: Case) -> Threshold:
    """The highest bandwidth on the grid with that factor, bisected towards the one before it on a log scale."""
    setting = setting_of(case)
    below = next((rate for rate in GRID if _reaches(setting, rate)), None)
    if below is None or below == GRID[0]:
        return Threshold(case=case, bandwidth=below)
    above = 2 * below
    for _ in range(BISECTIONS):
        middle = sqrt(below * above)
        if _reaches(setting, middle):
            below = middle
        else:
            above = middle
    return Threshold(case=case, bandwidth=below)


def with_bandwidth(cluster: Cluster, bandwidth: float) -> Cluster:
    """The cluster with that bus bandwidth between nodes, messages between nodes in proportion."""
    factor = bandwidth / cluster.inter_reduce.bandwidth
    return replace(
        cluster,
        inter=replace(cluster.inter, bandwidth=cluster.inter.bandwidth * factor),
        inter_reduce=replace(cluster.inter_reduce, bandwidth=bandwidth),
    )


def _reaches(setting: Setting, bandwidth: float) -> bool:
    slower = replace(setting, cluster=with_bandwidth(setting.cluster, bandwidth))
    theirs = data_parallel(Judge(setting=slower), is_overlapped=True)
    if theirs is None or theirs.overflow > 0 or theirs.step < FACTOR * theirs.busy * 0.98:
        return False  # ours computes no less than they do, but for larger micro-batches
    winner = search(slower, filler=filler_of(slower)).winner
    return winner is not None and theirs.step >= FACTOR * winner[1].step
