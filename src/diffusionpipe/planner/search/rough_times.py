"""Estimates the rough time of each way to run two backbones, without transfers and sums of gradients.

The search first tries the numbers of micro-batches that look best by these times.
"""

from diffusionpipe.planner.search.pair_questions import PairPlace
from diffusionpipe.units import Seconds


def totals(place: PairPlace) -> list[tuple[int, Seconds]]:
    """(number of micro-batches, seconds of one's forward and backward through all layers on the fastest device).

    There is one pair for each backbone.
    """
    fastest = max(place.ground.speeds)
    return [(place.microbatches[backbone], place.work(backbone)[-1] / fastest) for backbone in range(2)]


def rough_opposed(place: PairPlace) -> Seconds:
    """The rough seconds of both backbones in opposite directions, fitted to orders of list scheduling.

    Micro-batches of unequal time fill each other's waits badly.
    """
    (m, first), (n, second) = totals(place)
    units = place.arrangement.units
    return (m * first + n * second + (units - 1) * (min(first, second) + 2 * abs(first - second)) / 3) / units


def rough_together(place: PairPlace) -> Seconds:
    """The rough seconds of both backbones in the same direction, which leaves about half of the waits."""
    (m, first), (n, second) = totals(place)
    units = place.arrangement.units
    return (m * first + n * second + (units - 1) * (first + second) / 2) / units


def rough_in_turn(place: PairPlace) -> Seconds:
    """The rough seconds of one backbone after the other, each of which fills and drains the pipeline once."""
    (m, first), (n, second) = totals(place)
    units = place.arrangement.units
    return ((m + units - 1) * first + (n + units - 1) * second) / units


def rough_divided(place: PairPlace) -> Seconds:
    """The rough seconds of both backbones on devices of their own, with the best division of the devices."""
    return min(rough_parts(place, count) for count in range(1, place.arrangement.units))


def rough_parts(place: PairPlace, count: int) -> Seconds:
    """The rough seconds with the first backbone on `count` devices and the second on the others."""
    parts = zip(totals(place), (count, place.arrangement.units - count), strict=True)
    return max((m + units - 1) * time / units for (m, time), units in parts)
