"""The two ends of a staging memory, at which layers that come from the host take turns.

    staging   | 0        |      1 |    a layer comes to the end whose layer ran before the last one,
              | 2      |        1 |    or to that of a layer that was started and has not run
              | 2      |      3   |

The clock of the planner and the copying of the runtime both ask it: a copy begins in a plan where it begins in a run.
"""

from typing import Generic, TypeVar

T = TypeVar("T")


class Staging(Generic[T]):
    """The two ends of a staging memory and the layer at each; it changes as layers come and run.

    Each end is a value of the caller, such as its memory or a number; methods return it.
    """

    def __init__(self, first: T, second: T) -> None:
        """Begin without layers; `first` and `second` are the caller's values for the two ends."""
        self._ends: list[tuple[T, str | None]] = [(first, None), (second, None)]
        """The end whose layer ran last, then the other; each with its layer."""

    @property
    def layers(self) -> frozenset[str]:
        """The layers that are at an end or on their way to it; two at most."""
        return frozenset(layer for _, layer in self._ends if layer is not None)

    def place(self, layer: str) -> T | None:
        """Put the layer at the end that is free next, and return this end; None if the layer is at an end already."""
        if layer in self.layers:
            return None
        end, _ = self._ends[1]
        self._ends[1] = end, layer
        return end

    def run(self, layer: str) -> T:
        """Note that a placed layer runs now, and return its end; the next new layer comes to the other end."""
        if self._ends[1][1] == layer:
            self._ends.reverse()
        end, found = self._ends[0]
        assert found == layer, "a layer runs after it was placed"
        return end

    def end_of(self, layer: str) -> T | None:
        """The end at which the layer is; None if it is at none."""
        return next((end for end, found in self._ends if found == layer), None)
