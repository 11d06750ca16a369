"""Bounds that no order can beat.

For a rank with the stages s < s' (or s alone), in units of the problem, with

    head      the earliest start of anything on it: the forwards of stages 0, ..., s - 1 and their transfers
    return    from the start of a forward of s to the earliest start of an input gradient on the rank (of s' first)
    before    the most time of forwards that fit in memory before any input gradient is done
    work      all that it has to compute
    life(x)   from the start of a forward of stage x to the earliest end of its input gradient

window >= work                                              it computes that long
window >= return + work - before                            until the return only forwards can run
window >= m sum_x (activation life + kept W) / limit        what is held, times how long, fits into limit times time
window >= ceil(m / K) (life + W)                            one stage, which holds all until W, has room for K at a time
makespan >= head + each of these

and the makespan is at least as long as one micro-batch on its way, and than all forwards and input gradients of a rank
with the work that must follow the last of them.
"""

from diffusionpipe.ordering.problem import Problem


def lower_bound(problem: Problem) -> int:
    """A lower bound of the objective of any order, in ticks; the objective is the makespan or the window."""
    ways = Ways(problem)
    bound = 0
    for rank in range(problem.num_ranks):
        window = max(_window_bounds(problem, ways, rank))
        if problem.is_window:
            bound = max(bound, window)
        else:
            stages = problem.stages_of(rank)
            head = ways.arrival[stages[0]]
            without_w = problem.work(rank) - problem.num_microbatches * sum(
                problem.durations[3 * s + 2] for s in stages
            )
            bound = max(bound, head + window, head + without_w + min(ways.tail[s] for s in stages))
    return bound


class Ways:
    """The earliest starts of the first micro-batch's actions on each stage, and the least time after them."""

    def __init__(self, problem: Problem) -> None:
        d, lags, n = problem.durations, problem.lags, problem.num_stages
        self.arrival = [0] * n
        """The earliest start of each stage's forward of the first micro-batch, by stage, in ticks."""
        # In `d` and `lags`, 3 s is F of stage s, 3 s + 1 its I, 3 s + 2 its W.
        for s in range(1, n):
            self.arrival[s] = self.arrival[s - 1] + d[3 * s - 3] + lags[3 * s]
        self.gradient = [0] * n
        """The earliest start of each stage's input gradient of the first micro-batch, by stage, in ticks."""
        # The last stage's I follows its own F.
        self.gradient[-1] = self.arrival[-1] + d[3 * n - 3]
        for s in range(n - 2, -1, -1):
            self.gradient[s] = self.gradient[s + 1] + d[3 * s + 4] + lags[3 * s + 1]
        self.tail = [0] * n
        """The least time from the end of a stage's input gradient to the end of all work, by stage, in ticks."""
        self.tail[0] = d[2]
        for s in range(1, n):
            # Its own W, or the way on: the transfer and the I of the stage before.
            self.tail[s] = max(d[3 * s + 2], lags[3 * s - 2] + d[3 * s - 2] + self.tail[s - 1])


def _window_bounds(problem: Problem, ways: Ways, rank: int) -> list[int]:
    d, m, limit = problem.durations, problem.num_microbatches, problem.limits[rank]
    stages, work = problem.stages_of(rank), problem.work(rank)
    first, last = stages[0], stages[-1]
    life = {s: ways.gradient[s] + d[3 * s + 1] - ways.arrival[s] for s in stages}
    bounds = [work, ways.gradient[last] - ways.arrival[first] + work - _before_return(problem, stages, limit)]
    area = m * sum(problem.activation[s] * life[s] + problem.kept[s] * d[3 * s + 2] for s in stages)
    if limit:
        bounds.append(-(-area // limit))
    if len(stages) == 1 and problem.kept[first] == problem.activation[first] and problem.activation[first]:
        room = limit // problem.activation[first]
        bounds.append(-(-m // room) * (life[first] + d[3 * first + 2]))  # `limits` hold at least one micro-batch
    bounds.append(max(life[s] + d[3 * s + 2] for s in stages))
    return bounds


def _before_return(problem: Problem, stages: tuple[int, ...], limit: int) -> int:
    """The most time, in ticks, of forwards of a rank's stages whose activations fit into `limit` together."""
    d, a, m = problem.durations, problem.activation, problem.num_microbatches
    first, last = stages[0], stages[-1]
    most = 0
    for early in range(m + 1):
        left = limit - early * a[first]
        if left < 0:
            break
        if len(stages) == 1:
            most = max(most, early * d[3 * first])
        else:
            # Each of these forwards follows one of the earlier stage.
            late = min(early, left // a[last] if a[last] else m)
            most = max(most, early * d[3 * first] + late * d[3 * last])
    return most
