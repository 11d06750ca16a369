"""The objectives of the two-sided program: functions by which pairs of partitions of two backbones are judged.

Legend: stages of the first backbone have F + B = f + b and reduction `reduce`, the second's have g + c and `sums`;
their links take x + y and u + v; M_A, M_B micro-batches, S stages of each.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from diffusionpipe.planner.search.dynamic_program import LinkTime, Numbers, StageTime
from diffusionpipe.units import Seconds

Pair: TypeAlias = tuple[StageTime, StageTime]
"""(times of the first backbone's stage, times of the second's) on one block of devices."""
Links: TypeAlias = tuple[LinkTime, LinkTime]
"""(transfers of the first backbone, transfers of the second) between two neighbouring blocks of devices."""


class PairObjective(Protocol):
    """A function by which a pair of partitions of two backbones is judged, built up block by block."""

    def load(self, first: Seconds, second: Seconds) -> Seconds:
        """The load of a device, which a cap limits, with two stages whose forward and backward take these seconds.

        The load of several stages is at most the sum of their loads.
        """

    def prepend(self, rest: Numbers | None, pair: Pair, links: Links, *, is_whole: bool) -> Numbers:
        """The numbers of the state `rest` with one more block of devices before it; None: no block is placed yet.

        `is_whole`: no block comes before the new one.
        """

    def value(self, numbers: Numbers, num_stages: int) -> Seconds:
        """The objective in seconds of a pair with these numbers; it must not get smaller when a number gets larger."""

    def cap(
        self, numbers: Numbers | None, left: tuple[Seconds, Seconds], num_stages: int, limit: Seconds
    ) -> Seconds:  # fmt: skip
        """The largest first number with which a state's value can stay within `limit`.

        Args:
            numbers: the state's numbers; None if no layer is on a device yet.
            left: the least seconds of F + B of both backbones' layers that are not on devices yet.
            num_stages: the least number of stages of each backbone that there will be.
            limit: the limit of the value in seconds.
        """


@dataclass(frozen=True, slots=True)
class OppositePath:
    """DiffusionPipe's objective for opposite directions: T = (M_A + M_B + 2 S - 2) T0 + T_gap (reconstructed).

    T0      the largest F + B of all stages of both backbones, and of all transfers
    T_gap   the largest part of a reduction that is left when the later backwards of its backbone are done
    """

    microbatches: tuple[int, int]

    def load(self, first: Seconds, second: Seconds) -> Seconds:
        """The larger one of both times, which are of one micro-batch each."""
        return max(first, second)

    def prepend(self, rest: Numbers | None, pair: Pair, links: Links, *, is_whole: bool) -> Numbers:
        """The numbers of the state `rest` with one more block before it.

        They are (T0, T_gap of the first backbone, T_gap of the second, minus the sum of the second's backwards).
        """
        (f, b, reduce), (g, c, sums) = pair
        if rest is None:
            return max(f + b, g + c), reduce, sums, -c
        (x, y), (u, v) = links
        t0 = max(rest[0], f + b, g + c, x + y, u + v)
        # In the second backbone the new stage is the last one: all of `rest` run their backwards after it.
        return t0, max(reduce, rest[1] - b - y), max(rest[2], sums + rest[3] - v), rest[3] - v - c

    def value(self, numbers: Numbers, num_stages: int) -> Seconds:
        """The objective T, in seconds, of a pair of partitions with these numbers."""
        return (sum(self.microbatches) + 2 * num_stages - 2) * numbers[0] + max(0.0, numbers[1], numbers[2])

    def cap(
        self, numbers: Numbers | None, left: tuple[Seconds, Seconds], num_stages: int, limit: Seconds
    ) -> Seconds:  # fmt: skip
        """The largest T0 with which the time stays within the limit, if there is no gap."""
        return limit / (sum(self.microbatches) + 2 * num_stages - 2)


@dataclass(frozen=True, slots=True)
class _Loads:
    """The common part of both objectives that count the load of a device over all micro-batches."""

    microbatches: tuple[int, int]

    def load(self, first: Seconds, second: Seconds) -> Seconds:
        """The seconds in which a device runs all micro-batches of both backbones."""
        return self.microbatches[0] * first + self.microbatches[1] * second


@dataclass(frozen=True, slots=True)
class OppositeLoads(_Loads):
    """The objective for opposite directions: the largest load of a device, the shorter ramp, and T_gap.

    Opposite directions come close to their sum.

    load     M_A (F + B of the first's stage) + M_B (F + B of the second's)
    ramp     a micro-batch's way through all stages but its last: until then another backbone's work fills the wait
    """

    def prepend(self, rest: Numbers | None, pair: Pair, links: Links, *, is_whole: bool) -> Numbers:
        """The numbers of the state `rest` with one more block before it.

        They are (load, ramp of the first backbone, way through the second, gap of the first, gap of the second, minus
        the sum of the second's backwards).
        """
        (f, b, reduce), (g, c, sums) = pair
        load = self.load(f + b, g + c)
        if rest is None:
            return load, 0.0, 0.0 if is_whole else g + c, reduce, sums, -c  # the last stage of the first is in its load
        (x, y), (u, v) = links
        way = rest[2] + u + v
        return (
            max(rest[0], load),
            rest[1] + f + b + x + y,
            way if is_whole else way + g + c,  # the last stage of the second is in its load
            max(reduce, rest[3] - b - y),
            max(rest[4], sums + rest[5] - v),
            rest[5] - v - c,
        )

    def cap(
        self, numbers: Numbers | None, left: tuple[Seconds, Seconds], num_stages: int, limit: Seconds
    ) -> Seconds:  # fmt: skip
        """The largest load with which the value can stay within `limit`: the rest after the shorter ramp and the gap.

        Each backbone's ramp has all its layers, except the layers of its last stage.
        """
        if numbers is None:
            return limit
        last = limit / self.microbatches[1]  # no stage of the second takes longer
        ramp = min(numbers[1] + left[0], numbers[2] + max(0.0, left[1] - last))
        return limit - ramp - max(0.0, numbers[4])

    def value(self, numbers: Numbers, num_stages: int) -> Seconds:
        """The objective in seconds of a pair of partitions: the largest load, the shorter ramp and T_gap, added up."""
        return numbers[0] + min(numbers[1], numbers[2]) + max(0.0, numbers[3], numbers[4])


@dataclass(frozen=True, slots=True)
class SameLoads(_Loads):
    """The objective for one direction: the largest load, half of both ramps, and the gap.

    The first backbone waits for its way in, the second for its way back.
    """

    def prepend(self, rest: Numbers | None, pair: Pair, links: Links, *, is_whole: bool) -> Numbers:
        """The numbers (load, sum of both ramps, gap of the first, gap of the second) with a block before `rest`."""
        (f, b, reduce), (g, c, sums) = pair
        load = self.load(f + b, g + c)
        if rest is None:
            return load, 0.0, reduce, sums
        (x, y), (u, v) = links
        ramps = rest[1] + f + b + x + y + g + c + u + v
        return max(rest[0], load), ramps, max(reduce, rest[2] - b - y), max(sums, rest[3] - c - v)

    def cap(
        self, numbers: Numbers | None, left: tuple[Seconds, Seconds], num_stages: int, limit: Seconds
    ) -> Seconds:  # fmt: skip
        """The largest load with which the value can stay within `limit`: the rest after half of both ramps."""
        return limit - (numbers[1] + sum(left)) / 2 if numbers else limit

    def value(self, numbers: Numbers, num_stages: int) -> Seconds:
        """The objective in seconds of a pair of partitions: the largest load plus half of both ramps plus the gap."""
        return numbers[0] + numbers[1] / 2 + max(0.0, numbers[2], numbers[3])
