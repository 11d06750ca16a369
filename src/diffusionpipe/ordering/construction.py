"""Orders made action by action: at each moment the most urgent one that memory admits.

Memory admits a forward of a rank's only stage s, or of its later stage s', if it fits beside what is held. A forward
of the earlier stage s of two also has to leave a way out: all micro-batches that have been through s but not through s'
are held until they have been through s', so beside them there must be room for one activation of s':

    (started on s - started on s') activation(s) + activation(s')  <=  limit

More is not needed, and less would not do. A micro-batch that has been through s' can be finished by input and weight
gradients alone, which take no memory; by induction from the last stage on, every rank gets the room for its next s'. So
a rank never waits for memory for ever, for any keys, and with room for one micro-batch on all its stages every order
ends.

Two stages on two ranks, three micro-batches, all times 1, memory for two activations on each rank. The keys prefer
input gradients, then forwards, then weight gradients:

    time     0  1  2  3  4  5  6  7  8  9  10     [1] at 2 rank 0 has no room for F2
    rank 0   F0 F1 .  I0 W0 I1 F2 W1 .  I2 W2     [2] at 5 it can be F2 or I1, [3] and I1 is preferred
    rank 1   .  F0 I0 F1 I1 W0 W1 F2 I2 W2 .      [4] the end of I0 on rank 1 wakes rank 0 at 3

>>> from diffusionpipe.ordering.instance import HalfStage, Instance, Placing
>>> from diffusionpipe.ordering.problem import problem_of
>>> from diffusionpipe.schedules.building.split_work import Goal
>>> half = HalfStage(forward=0.5, input_grad=0.5, weight_grad=0.5, activation=0.5, kept_after_input_grad=0.5)
>>> instance = Instance(
...     ranks=2, microbatches=3, placement=Placing.LINEAR, stages=(half,) * 4, comm=0, memory_limit=(2, 2),
...     objective=Goal.MAKESPAN, seconds=0,
... )
>>> rule = Rule(keys=[[(2, 1, 3)[letter % 3]] * 3 for letter in range(6)], patience=0, leads=(3, 3))
>>> built = Builder(problem_of(instance, Placing.LINEAR)).build(rule)
>>> [" ".join("FIW"[letter % 3] for letter in order) for order in built.orders], built.value
(['F F I W I F W I W', 'F I F I W W F I W'], 11)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from operator import sub

from diffusionpipe.ordering.evaluation import changes_of
from diffusionpipe.ordering.problem import Letters, Problem
from diffusionpipe.timing.march import NOTHING

Keys = Sequence[Sequence[float]]
"""The urgency of each action, by letter and micro-batch; the action with the least key comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule by which a rank chooses its next action: urgencies, patience, and the room for its later stage."""

    keys: Keys
    patience: float
    """From 0 to 1: which actions compete. 0: those that can start first. 1: those that can start before the first of
    them could end (Giffler and Thompson, "Algorithms for Solving Production-Scheduling Problems", Operations Research
    8(4), 1960, https://doi.org/10.1287/opre.8.4.487)."""
    leads: Sequence[int]
    """The most micro-batches between a rank's earlier and its later stage, by rank; for ranks with two stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The orders that a rule gave, and the objective that they reach, in ticks."""

    value: int
    orders: Letters


class Builder:
    """Builds orders for one problem, each by a rule; it holds the tables that all builds share."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._changes = changes_of(problem)
        self._readers = [NOTHING] * len(problem.durations)
        for letter, before in enumerate(problem.waits_for):
            if before >= 0:
                self._readers[before] = letter
        self._stages = [problem.stages_of(rank) for rank in range(problem.num_ranks)]
        self._work = [problem.work(rank) for rank in range(problem.num_ranks)]
        self._most_between = [
            (limit - problem.activation[own[-1]]) // problem.activation[own[0]] if problem.activation[own[0]] else inf
            for limit, own in zip(problem.limits, self._stages, strict=True)
        ]
        """The most micro-batches that may be between a rank's two stages without a deadlock, by rank."""

    def build(self, rule: Rule, *, below: float = inf) -> Built | None:
        """The orders by this rule with their objective; None if it is not below `below`, which is often seen early.

        Cost: linear in the actions, about five times as much as `evaluation.ends_of`.
        """
        problem, keys, patience = self._problem, rule.keys, rule.patience
        durations, lags, home, activation = problem.durations, problem.lags, problem.rank, problem.activation
        changes, readers, stages = self._changes, self._readers, self._stages
        num_ranks, last_forward = problem.num_ranks, len(durations) - 3
        arrivals: list[list[int]] = [[] for _ in durations]  # when the next ones can start, as far as is known
        arrivals[0] = [0] * problem.num_microbatches
        counts, room = [0] * len(durations), list(problem.limits)
        most_between = list(map(min, rule.leads, self._most_between))
        free, first = [0] * num_ranks, [0] * num_ranks
        orders: list[list[int]] = [[] for _ in range(num_ranks)]
        spare = [below - work for work in self._work]  # what a rank may be idle until it is too late
        events = [(0, rank) for rank in range(num_ranks)]
        while events:
            now, rank = heappop(events)
            if free[rank] > now:  # busy: the end of what it runs wakes it
                continue
            late = stages[rank][-1]
            found = []  # [2] (start, letter)
            for stage in stages[rank]:
                letter = 3 * stage
                count, coming = counts[letter], arrivals[letter]
                # Otherwise the ranks could wait for memory for ever, see the module's docstring.
                has_way_out = stage == late or count - counts[3 * late] < most_between[rank]
                if has_way_out and count < len(coming) and activation[stage] <= room[rank]:  # [1]
                    found.append((coming[count] if coming[count] > now else now, letter))
                letter += 1
                count, coming = counts[letter], arrivals[letter]
                if count < len(coming):
                    found.append((coming[count] if coming[count] > now else now, letter))
                # W reads what I left on the same rank, so it can start at once.
                if counts[letter + 1] < count:
                    found.append((now, letter + 1))
            if not found:
                continue
            start, letter = _chosen(found, keys, counts, durations, patience) if len(found) > 1 else found[0]  # [3]
            if start > now and not patience:  # until then something more urgent may come
                heappush(events, (start, rank))
                continue
            # A window begins with the rank's first action, so idle time before it does not count.
            if start > free[rank] and (orders[rank] or not problem.is_window):
                spare[rank] -= start - free[rank]
            if spare[rank] <= 0:
                return None
            if problem.is_window and not orders[rank]:
                first[rank] = start
            free[rank] = end = start + durations[letter]
            counts[letter] += 1
            room[rank] -= changes[letter]
            orders[rank].append(letter)
            # `waits_for` lists what another stage sends; the last stage's I reads its own F.
            reader = letter + 1 if letter == last_forward else readers[letter]
            if reader >= 0:
                arrival = end + lags[reader]
                arrivals[reader].append(arrival)
                other = home[reader // 3]
                if other != rank and free[other] <= arrival:  # if it is busy longer, the end of what it runs wakes it
                    heappush(events, (arrival, other))  # [4]
            heappush(events, (end, rank))
        return Built(value=max(map(sub, free, first)), orders=tuple(map(tuple, orders)))


def _chosen(
    found: Sequence[tuple[int, int]], keys: Keys, counts: Sequence[int], durations: Sequence[int], patience: float
) -> tuple[int, int]:
    """The (start, letter) in `found` whose action is the most urgent of all that can start soon enough.

    `found`: the actions that a rank can do next. `counts`: the times that each letter has occurred, by letter. The
    `patience` is the one of `Rule`.
    """
    soonest = min(found)[0]
    latest: float = soonest
    if patience:
        latest += patience * (min([start + durations[letter] for start, letter in found]) - soonest)
    choice, least = found[0], None
    for start, letter in found:
        if start <= latest:
            key = keys[letter][counts[letter]]
            if least is None or key < least:
                least, choice = key, (start, letter)
    return choice
