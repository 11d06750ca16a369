"""The rough time of each way to run two backbones: without transfers and sums of gradients.

The search tries the numbers of micro-batches first that look best so.
"""

from diffusionpipe.planner.search.pair_questions import PairPlace
from diffusionpipe.units import Seconds


def totals(place: PairPlace) -> list[tuple[int, Seconds]]:
    """(micro-batches, F + B of one of them through all layers) of each backbone."""
    fastest = max(place.ground.speeds)
    return [(place.microbatches[backbone], place.work(backbone)[-1] / fastest) for backbone in range(2)]


def rough_opposed(place: PairPlace) -> Seconds:
    """Micro-batches of unequal time fill each other's waits badly: fitted to the orders of `tests/schedules`."""
    (m, first), (n, second) = totals(place)
    units = place.arrangement.units
    return (m * first + n * second + (units - 1) * (min(first, second) + 2 * abs(first - second)) / 3) / units


def rough_together(place: PairPlace) -> Seconds:
    """Mixed micro-batches leave about half of the waits of one pipeline after the other."""
    (m, first), (n, second) = totals(place)
    units = place.arrangement.units
    return (m * first + n * second + (units - 1) * (first + second) / 2) / units


def rough_in_turn(place: PairPlace) -> Seconds:
    """Each backbone fills and drains the pipeline once."""
    (m, first), (n, second) = totals(place)
    units = place.arrangement.units
    return ((m + units - 1) * first + (n + units - 1) * second) / units


def rough_divided(place: PairPlace) -> Seconds:
    """The best division of the devices."""
    return min(rough_parts(place, count) for count in range(1, place.arrangement.units))


def rough_parts(place: PairPlace, count: int) -> Seconds:
    """The rough time with the first backbone on `count` devices and the second on the others."""
    parts = zip(totals(place), (count, place.arrangement.units - count), strict=True)
    return max((m + units - 1) * time / units for (m, time), units in parts)
