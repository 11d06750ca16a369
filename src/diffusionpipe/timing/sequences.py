"""Work without a schedule on the same clock: sequences beside each other, as the compute and the collectives of a copy.

    compute |---a---|---b---| sums |----a----|----b----| each after the one before it and after the work that it reads
    [1]

>>> sequences = Sequences()
>>> for seconds in (2, 2):
...     compute = sequences.add("compute", seconds)
...     summed = sequences.add("sums", 3, behind=compute)
>>> ends = sequences.ends()
>>> ends[compute], ends[summed]
(4, 8)
"""

from collections.abc import Hashable

from diffusionpipe.timing.clock import ends_of
from diffusionpipe.timing.graph import START, Graph
from diffusionpipe.units import Seconds


class Sequences:
    """Events that take their seconds one after the other in named sequences; they are added one by one."""

    def __init__(self) -> None:
        self._first, self._second, self._durations = [START], [START], list[Seconds]([0])
        self._last = dict[Hashable, int]()

    def add(self, sequence: Hashable, seconds: Seconds, *, behind: int = START) -> int:
        """Add an event of `seconds` seconds to the end of a sequence, and return its number.

        It waits for the event before it in the sequence, and for the event `behind`.
        """
        self._first.append(self._last.get(sequence, START))
        self._second.append(behind)  # [1]
        self._durations.append(seconds)
        self._last[sequence] = len(self._durations) - 1
        return self._last[sequence]

    def ends(self) -> list[Seconds]:
        """The end of each event in seconds, by its number; entry 0 is the start."""
        first, second, none = tuple(self._first), tuple(self._second), (0,) * len(self._first)
        graph = Graph(
            first=first, second=second, work=none, is_on_host=(False,) * len(none), works=(), events=(), tails=()
        )
        return ends_of(graph, self._durations)
