"""Long curves with fewer points, which look the same: of each part its first and last point and its extremes stay."""

from collections.abc import Sequence

Points = list[tuple[float, float]]


def thinned(points: Sequence[tuple[float, float]], most: int) -> Points:
    """The points (x, value), in order and thinned to about `most`; the least and the largest value are among them.

    >>> thinned([(step, -abs(step - 500)) for step in range(1000)], 8)
    [(0, -500), (499, -1), (500, 0), (999, -499)]
    """
    if len(points) <= most:
        return list(points)
    parts, values = max(1, most // 4), [value for _, value in points]
    kept: set[int] = set()
    for part in range(parts):
        first, stop = part * len(points) // parts, (part + 1) * len(points) // parts
        inside = values[first:stop]
        kept |= {first, stop - 1, first + inside.index(min(inside)), first + inside.index(max(inside))}
    return [points[at] for at in sorted(kept)]
