"""The extra time of compute after a wait.

A processor that has waited has lost its caches to others and its clock rate to saving power, so its next computation
takes longer: on a CPU by a few milliseconds after a wait of some ten. A table of (wait, extra time) says so.
"""

from bisect import bisect_left
from collections.abc import Sequence

from diffusionpipe.units import Seconds

MOST = 0.25
"""The largest extra time, as a share of an action's own time: a short action does not get slower by more, however long
the wait."""


def wake_time(table: Sequence[tuple[Seconds, Seconds]], idle: Seconds, busy: Seconds) -> Seconds:
    """The extra seconds of an action of `busy` seconds after a wait of `idle` seconds; at most a quarter of `busy`.

    Linear between the table's waits, which ascend, from nothing at no wait to the last entry for all longer ones.

    >>> table = ((0.01, 0.002), (0.03, 0.004))
    >>> [round(wake_time(table, idle, 1.0), 6) for idle in (0.0, 0.005, 0.02, 5.0)]
    [0, 0.001, 0.003, 0.004]
    >>> wake_time(table, 5.0, 0.001)
    0.00025
    """
    if not table or idle <= 0:
        return 0
    right = bisect_left([wait for wait, _ in table], idle)
    if right == len(table):
        extra = table[-1][1]
    else:
        # The first part begins at no wait and no extra time.
        (wait, low), (end, high) = table[right - 1] if right else (0.0, 0.0), table[right]
        extra = low + (high - low) * (idle - wait) / (end - wait)
    return min(extra, MOST * busy)
