"""The time that a data worker needs for a batch. `costs/loading.py` computes its cost for a step."""

from dataclasses import replace
from statistics import median
from time import process_time

from diffusionpipe.costs.loading import NOTHING, Spread
from diffusionpipe.errors import DataError
from diffusionpipe.trainer.data.batches.loader import StepLoader
from diffusionpipe.units import Seconds

ROWS = 16
"""The number of rows that are made for one measurement."""
TIMES = 5
"""The number of measurements of a batch's time."""
BUDGET: Seconds = 0.5
"""The most time for all measurements; if they would take longer, the time of one row counts."""


def batch_time(loader: StepLoader) -> Spread:
    """The processor time in seconds (least, usual, most) in which one process makes this rank's part of a batch.

    A few measurements on at most 16 rows are scaled to the batch. All times are 0 where the rank makes no rows, or
    where a picture cannot be decoded: training itself says why.
    """
    if not loader.positions:
        return NOTHING
    source = replace(loader.source, skipping=None)  # what is damaged is reported by training alone

    def seconds(step: int, count: int) -> Seconds:
        """The processor time of one row, from a batch of at most `count` rows of a step."""
        rows = loader.positions[:count]
        start = process_time()
        replace(loader, source=source, positions=rows).load(loader.first_step + step)
        return (process_time() - start) / len(rows)

    try:
        seconds(0, 1)  # makes what is made once
        times = [seconds(1, 1)]
        if times[0] * ROWS * TIMES <= BUDGET:
            times = [seconds(step, ROWS) for step in range(TIMES)]
    except DataError:
        return NOTHING
    rows = len(loader.positions)
    return Spread(least=rows * min(times), usual=rows * median(times), most=rows * max(times))
