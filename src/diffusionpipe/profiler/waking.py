"""The extra time that layers take after a wait of their device (see `costs/waking.py`)."""

import time
from collections.abc import Mapping, Sequence
from math import sqrt

from diffusionpipe.profiler.clock import Clock, middle, spread
from diffusionpipe.profiler.layer_run import LayerRun
from diffusionpipe.profiler.passes import Agree, alone
from diffusionpipe.units import Seconds

WAITS: tuple[Seconds, ...] = (0.001, 0.005, 0.02, 0.1)
REPEATS = 5
MOST_REPEATS = 10
STEADY: Seconds = 1e-4
"""The error of the extra times up to which rounds end after `REPEATS`; the larger one of this and `STEADY_PART`."""
STEADY_PART = 0.003
"""The error of the extra times, as a part of the time of all forwards, up to which rounds end after `REPEATS`."""
LONGEST: Seconds = 0.2
"""The longest time of all forwards together with which extra times are measured."""


def time_waking(
    runs: Sequence[LayerRun], clock: Clock, forward: Seconds, agree: Agree = alone
) -> tuple[tuple[Seconds, Seconds], ...]:
    """(seconds of a wait, extra seconds of a forward through all layers after it) for each wait, ascending.

    () if forwards take too long to be measured. `forward`: about the time of all forwards, the same on all ranks,
    which wait and run together. Each forward after a wait is compared with one without a wait in the same round, so
    that the machine's speed may change between rounds.
    """
    if forward > LONGEST:
        return ()
    times: dict[Seconds, list[Seconds]] = {wait: [] for wait in (0.0, *WAITS)}
    enough = max(STEADY, STEADY_PART * forward)
    for number in range(MOST_REPEATS):
        if number >= REPEATS and agree(_uncertainty(times)) <= enough:
            break
        for wait, found in times.items():
            agree(0.0)
            _pass(runs, clock)  # as a stage that has just worked, before its wait
            if wait:
                time.sleep(wait)
            found.append(_pass(runs, clock))
    extra, table = 0.0, []
    for wait in WAITS:
        # A longer wait is not followed by less extra time: a smaller median is noise.
        extra = max(extra, middle(_longer(times, wait)))
        table.append((wait, extra))
    return tuple(table)


def _longer(times: Mapping[Seconds, Sequence[Seconds]], wait: Seconds) -> list[Seconds]:
    """The extra time of a forward after this wait, for each round; `times`: wait -> times of forwards, by round."""
    return [after - without for after, without in zip(times[wait], times[0.0], strict=True)]


def _uncertainty(times: Mapping[Seconds, Sequence[Seconds]]) -> Seconds:
    """The largest likely error, over all waits, of the median of the extra times; `times`: wait -> times, by round."""
    return max(spread(_longer(times, wait)) / sqrt(len(times[wait])) for wait in WAITS)


def _pass(runs: Sequence[LayerRun], clock: Clock) -> Seconds:
    return sum(clock.time(run.forward)[1] for run in runs)
