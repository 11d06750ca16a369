"""What data workers take from the cores on which ranks compute.

On a CPU with a core for each rank, data workers run on these cores too. In waits of the ranks that costs nothing; while
they compute, it delays them, and a delay of one rank delays the step of all.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from time import process_time

from diffusionpipe.errors import DataError
from diffusionpipe.trainer.data.loader import StepLoader
from diffusionpipe.units import Seconds

ROWS = 16
"""Of a batch are made to measure it,"""
TIMES = 3
"""so often,"""
BUDGET: Seconds = 0.5
"""if that takes no longer; else one row is made once."""


def batch_time(loader: StepLoader) -> Seconds:
    """The processor time in which one process makes this rank's part of a batch, measured.

    0 where nothing can be made: training itself says why.
    """
    if not loader.positions:
        return 0.0
    source = replace(loader.source, skipping=None)  # what is damaged is reported by training alone

    def seconds(step: int, count: int) -> Seconds:
        """Of one row."""
        rows = loader.positions[:count]
        start = process_time()
        replace(loader, source=source, positions=rows).load(loader.first_step + step)
        return (process_time() - start) / len(rows)

    try:
        seconds(0, 1)  # makes what is made once
        one = seconds(1, 1)
        if one * ROWS * TIMES <= BUDGET:
            one = median(seconds(step, ROWS) for step in range(TIMES))
    except DataError:
        return 0.0
    return one * len(loader.positions)


def taken_from_ranks(batches: Sequence[Seconds], hosts: Sequence[str], cores: Sequence[int], workers: int) -> Seconds:
    """Processor time of a step that data workers take from the cores of the ranks of one machine, the most of any.

    Args:
        batches: what the workers of each rank need for a step.
        hosts: the machine of each rank.
        cores: how many cores each rank may use; a rank computes on one of them.
        workers: of each rank; 0: it makes its batches itself, before its steps.
    """
    if not workers:
        return 0.0
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, host in enumerate(hosts):
        ranks[host].append(rank)
    taken = []
    for own in ranks.values():
        left = max(0, max(cores[rank] for rank in own) - len(own))
        part = max(0.0, 1 - left / (workers * len(own)))  # the others have a core of their own
        taken.append(part * sum(batches[rank] for rank in own))
    return max(taken)
