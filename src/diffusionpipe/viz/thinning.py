"""Long curves with fewer points, which look the same: of each part its first and last point and its extremes stay."""

from collections.abc import Sequence

Points = list[tuple[float, float]]


def thinned(points: Sequence[tuple[float, float]], most: int) -> Points:
    """At most about `most` of the points, in order; the least and the largest value of all are among them.

    >>> thinned([(step, -abs(step - 500)) for step in range(1000)], 8)
    [(0, -500), (499, -1), (500, 0), (999, -499)]
    """
    if len(points) <= most:
        return list(points)
    parts = max(1, most // 4)
    kept: set[int] = set()
    for part in range(parts):
        first, stop = part * len(points) // parts, (part + 1) * len(points) // parts
        inside = range(first, stop)
        lowest, highest = min(inside, key=lambda at: points[at][1]), max(inside, key=lambda at: points[at][1])
        kept |= {first, stop - 1, lowest, highest}
    return [points[at] for at in sorted(kept)]
