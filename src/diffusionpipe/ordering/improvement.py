"""Better orders out of good ones: simulated annealing with moves on critical paths.

The objective cannot fall unless, on a critical path, some action that follows another one on the same rank comes before
it. So a move takes two places of one rank that a critical path runs through without leaving the rank, and swaps the
actions there, or puts one or a few of them to the other end:

    F3 I1 W0 F4 I2        F3 W0 I1 F4 I2        I2 F3 I1 W0 F4
     the block             a swap                to the front

This is the neighbourhood of van Laarhoven, Aarts and Lenstra, "Job Shop Scheduling by Simulated Annealing", Operations
Research 40(1), 1992, https://doi.org/10.1287/opre.40.1.113, with insertions, and restricted to sequences that keep a
micro-batch's ops in order and fit into memory. A move that makes the ranks wait for each other in a circle is undone.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from random import Random

from diffusionpipe.ordering.evaluation import changes_of, ends_of
from diffusionpipe.ordering.problem import Letters, Problem

SWAPS = 0.4
"""The share of moves that swap neighbours; of the other moves one half goes forward, one half back."""
GROUPS = 0.25
"""The share of the other moves that move up to `GROUP` actions together, and not one alone."""
GROUP = 3

MAX_REPAIRS = 2
"""The most weight gradients that a move may bring forward to free memory."""

Place = tuple[int, int]
"""(rank, index in its sequence) of an action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The settings of one round of simulated annealing, from high to low temperature."""

    steps: int
    temperature: float
    """The temperature at the first step, in units of time; it falls to 0 linearly."""
    seed: int
    target: int
    """The objective, in ticks, at which the round stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Improved:
    """The best orders of one round of improvement, their objective, and the steps that it took."""

    orders: Letters
    value: int
    steps: int
    """The number of steps that the round took."""


class Improver:
    """Improves orders of one problem by rounds of simulated annealing; it holds the tables that all rounds share."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._waits_for = problem.waits_for
        self._changes = changes_of(problem)
        stages = [problem.stages_of(rank) for rank in range(problem.num_ranks)]
        self._lasts = [[3 * stage + 2 for stage in own] for own in stages]

    def anneal(self, orders: Letters, options: Round, *, max_steps: int) -> Improved:
        """The best orders that simulated annealing met from `orders` on, in at most `max_steps` steps of the round.

        They are legal if `orders` are.
        """
        problem, random = self._problem, Random(options.seed)
        current = [list(order) for order in orders]
        ends = ends_of(problem, current)
        assert ends is not None
        value, worst = self._value(current, ends)
        best, best_orders = value, orders
        path = self._critical_path(current, ends, worst, random)
        step = 0
        while step < min(options.steps, max_steps) and best > options.target:
            heat = options.temperature * (1 - step / options.steps)
            step += 1
            found = self._move(current, path, random)
            if found is None:
                # The path has no two neighbours on a rank. Ties are drawn, so another one may have.
                path = self._critical_path(current, ends, worst, random)
                continue
            rank, order = found
            # The order after its repairs may be the one that there was.
            if not self._is_legal(order, rank) or order == current[rank]:
                continue
            old, current[rank] = current[rank], order
            reached = ends_of(problem, current)
            if reached is None:
                current[rank] = old
                continue
            candidate, at = self._value(current, reached)
            # Metropolis: a worse order is taken with the probability exp(- difference / heat).
            if candidate > value and (heat <= 0 or random.random() >= exp((value - candidate) / heat)):
                current[rank] = old
                continue
            value, worst, ends = candidate, at, reached
            path = self._critical_path(current, ends, worst, random)
            if value < best:
                best, best_orders = value, tuple(map(tuple, current))
        return Improved(orders=best_orders, value=best, steps=step)

    def _value(self, orders: Sequence[Sequence[int]], ends: list[list[int]]) -> tuple[int, int]:
        """(objective of the orders in ticks, the rank that decides it), from the `ends` of their actions."""
        is_window, durations = self._problem.is_window, self._problem.durations
        most = worst = -1
        for rank, lasts in enumerate(self._lasts):
            end = max([ends[letter][-1] for letter in lasts])
            if is_window:
                first = orders[rank][0]
                end -= ends[first][0] - durations[first]
            if end > most:
                most, worst = end, rank
        return most, worst

    def _critical_path(
        self, orders: Sequence[Sequence[int]], ends: list[list[int]], rank: int, random: Random
    ) -> list[Place]:
        """The places of a critical path, from the rank's last action back to one that starts at 0 or with the window.

        Where several paths are critical, `random` chooses.
        """
        problem, waits_for = self._problem, self._waits_for
        durations, lags, home = problem.durations, problem.lags, problem.rank
        places: list[list[list[int]]] = [[]] * len(orders)
        for worker, order in enumerate(orders):
            rows: list[list[int]] = [[] for _ in durations]
            for place, letter in enumerate(order):
                rows[letter].append(place)
            places[worker] = rows
        stop = 0
        if problem.is_window:
            first = orders[rank][0]
            stop = ends[first][0] - durations[first]
        place = len(orders[rank]) - 1
        letter = orders[rank][place]
        k = len(ends[letter]) - 1
        path = [(rank, place)]
        while True:
            start = ends[letter][k] - durations[letter]
            if start <= stop:
                return path
            before = waits_for[letter]
            comes_from_other = before >= 0 and ends[before][k] + lags[letter] == start
            if place:
                previous = orders[rank][place - 1]
                # Which occurrence of its letter the previous action is: as many as come before `place`, less one.
                j = bisect_left(places[rank][previous], place) - 1
                if ends[previous][j] == start and not (comes_from_other and random.random() < 0.5):
                    place, letter, k = place - 1, previous, j
                    path.append((rank, place))
                    continue
            if not comes_from_other:  # only where an action takes no time
                return path
            letter, rank = before, home[before // 3]
            place = places[rank][letter][k]
            path.append((rank, place))

    def _move(self, orders: list[list[int]], path: list[Place], random: Random) -> tuple[int, list[int]] | None:
        """(rank, its sequence after a random move on the path); None if no two places of the path are neighbours."""
        pairs = [
            i for i in range(len(path) - 1)
            if path[i][0] == path[i + 1][0] and path[i][1] == path[i + 1][1] + 1
        ]  # fmt: skip
        if not pairs:
            return None
        at = pairs[int(random.random() * len(pairs))]
        rank, place = path[at]
        order = orders[rank].copy()
        chance = random.random()
        if chance < SWAPS:
            order[place - 1], order[place] = order[place], order[place - 1]
            return rank, order
        last, first = _block(path, at)
        one, other = sorted((_between(random, first, last), _between(random, first, last)))
        size = 1 + int(random.random() * GROUP) if random.random() < GROUPS else 1
        if chance < SWAPS + (1 - SWAPS) / 2:  # what stands at `other` goes before `one`
            group = order[other : other + size]
            del order[other : other + size]
            order[one:one] = group
        else:  # what stands at `one` goes behind `other`
            size = min(size, other - one + 1)
            group = order[one : one + size]
            order[other + 1 : other + 1] = group
            del order[one : one + size]
        return rank, order

    def _is_legal(self, order: list[int], rank: int) -> bool:
        """Whether the rank's order fits into memory and keeps F before I before W of every micro-batch.

        Where a forward does not fit, it changes `order`: the next weight gradient that could come before is put there.
        """
        changes, limit = self._changes, self._problem.limits[rank]
        counts = [0] * len(changes)
        held = place = repairs = 0
        while place < len(order):
            letter = order[place]
            if held + changes[letter] > limit:
                repairs += 1
                # 0 is "none", as a later place is at least 1.
                later = self._next_release(order, place, counts) if repairs <= MAX_REPAIRS else 0
                if not later:
                    return False
                order.insert(place, order.pop(later))
                continue
            held += changes[letter]
            counts[letter] += 1
            # Its op before: I needs the F of its micro-batch, W its I.
            if letter % 3 and counts[letter] > counts[letter - 1]:
                return False
            place += 1
        return True

    def _next_release(self, order: Sequence[int], place: int, counts: Sequence[int]) -> int:
        """The index of the next weight gradient after `place` whose input gradient comes before `place`; 0 if none."""
        for later in range(place + 1, len(order)):
            letter = order[later]
            if letter % 3 == 2 and counts[letter - 1] > counts[letter]:
                return later
        return 0


def _block(path: list[Place], at: int) -> Place:
    """(last, first) index in the rank's sequence of the path's part around `path[at]` that has no gap on this rank."""
    rank, last = path[at]
    low = at
    while low and path[low - 1] == (rank, last + 1):
        low, last = low - 1, last + 1
    first, high = path[at][1], at
    while high + 1 < len(path) and path[high + 1] == (rank, first - 1):
        high, first = high + 1, first - 1
    return last, first


def _between(random: Random, low: int, high: int) -> int:
    return low + int(random.random() * (high - low + 1))
