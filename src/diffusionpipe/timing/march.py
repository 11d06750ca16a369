"""Orders that are not known to be possible, timed while a possible sequence is looked for: for the searches of orders.

`clock` times a graph, which is numbered once and timed often. A search changes the orders at every step, so numbering
would cost more than the times. Here a worker marches through its order until it needs something that has not happened
yet. It is woken up by that.

A *letter* is an op of a stage. Its k-th occurrence in an order belongs to the k-th micro-batch. It may wait for the
k-th occurrence of one other letter, which no third one waits for, and for the `lag` after its end. All else that it
needs comes earlier in its own worker's order.

    worker 0   F F [1]            [3] G G         letters: F = 0 and G = 1 on worker 0, f = 2 and g = 3 on worker 1
    worker 1   [1] [2] f g f g                    f waits for F, g for nothing but its place, G for g

    [1] it needs what has not happened: sleep    [2] the later of its worker and its input    [3] wake the sleeper

>>> march([[0, 0, 1, 1], [2, 3, 2, 3]], durations=[1, 2, 1, 2], waits_for=[NOTHING, 3, 0, NOTHING], lags=[0, 1, 1, 0])
[[1, 2], [8, 11], [3, 6], [5, 8]]
>>> march([[1, 0]], durations=[1, 1], waits_for=[NOTHING, 0], lags=[0, 0]) is None          # in a circle
True
"""

from collections.abc import Sequence

NOTHING = -1
"""In place of a letter: it waits for nothing but its place in the order."""
_NOBODY = -1


def march(
    orders: Sequence[Sequence[int]], durations: Sequence[int], waits_for: Sequence[int], lags: Sequence[int]
) -> list[list[int]] | None:
    """The end of each occurrence of each letter, by letter, as early as possible; None if workers wait in a circle.

    A letter is an op of a stage, as a number. Cost: linear in the actions.

    Args:
        orders: by worker its letters.
        durations: by letter.
        waits_for: by letter the letter whose occurrence must have ended before its own starts, or NOTHING.
        lags: by letter the least time between that end and its own start.
    """
    ends: list[list[int]] = [[] for _ in durations]
    sleeper = [_NOBODY] * len(durations)  # by letter: the worker that waits for it
    clocks = [0] * len(orders)
    places = [0] * len(orders)
    awake = list(range(len(orders)))
    while awake:
        # Any worker that is awake may be next: ends depend on the orders alone, so the times come out the same.
        worker = awake.pop()
        order, clock = orders[worker], clocks[worker]
        place, stop = places[worker], len(order)
        while place < stop:
            letter = order[place]
            done = ends[letter]
            before = waits_for[letter]
            if before >= 0:
                other = ends[before]
                # The other letter's occurrence with this number has not happened yet.
                if len(other) <= len(done):
                    sleeper[before] = worker  # [1]
                    break
                arrival = other[len(done)] + lags[letter]
                if arrival > clock:
                    clock = arrival  # [2]
            clock += durations[letter]
            done.append(clock)
            waiting = sleeper[letter]
            if waiting >= 0:
                awake.append(waiting)  # [3]
                sleeper[letter] = _NOBODY
            place += 1
        clocks[worker], places[worker] = clock, place
    # Workers that still sleep wait for each other: nothing is left that could wake them.
    if any(place < len(order) for place, order in zip(places, orders, strict=True)):
        return None
    return ends
