"""How much longer layers take after a wait (see `costs/waking.py`)."""

import time
from collections.abc import Sequence

from diffusionpipe.profiler.clock import Clock, middle
from diffusionpipe.profiler.layer_run import LayerRun
from diffusionpipe.profiler.passes import Agree, alone
from diffusionpipe.units import Seconds

WAITS: tuple[Seconds, ...] = (0.001, 0.005, 0.02, 0.1)
REPEATS = 5
LONGEST: Seconds = 0.2
"""Forwards that take longer than that all together are not waited for."""


def time_waking(
    runs: Sequence[LayerRun], clock: Clock, forward: Seconds, agree: Agree = alone
) -> tuple[tuple[Seconds, Seconds], ...]:
    """(wait, what a forward through all these layers takes longer after it), ascending; () where they take too long.

    `forward`: about the time of all their forwards, the same on all ranks, which wait and run together.
    """
    if forward > LONGEST:
        return ()
    times: dict[Seconds, list[Seconds]] = {wait: [] for wait in (0.0, *WAITS)}
    for _ in range(REPEATS):
        for wait, found in times.items():
            agree(0.0)
            _pass(runs, clock)
            if wait:
                time.sleep(wait)
            found.append(_pass(runs, clock))
    without, extra, table = middle(times[0.0]), 0.0, []
    for wait in WAITS:
        extra = max(extra, middle(times[wait]) - without)
        table.append((wait, extra))
    return tuple(table)


def _pass(runs: Sequence[LayerRun], clock: Clock) -> Seconds:
    return sum(clock.time(run.forward)[1] for run in runs)
