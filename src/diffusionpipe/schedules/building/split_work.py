"""One pipeline with split backwards and the costs of its actions: by this orders are judged.

The families with costs have this in common: the work, the memory and the time of orders. `squeeze` makes orders
shorter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

from diffusionpipe.costs import StageCosts
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Action, Op, Schedule, compute_action
from diffusionpipe.schedules.building.shapes import SPLIT, Pipe, schedule_of
from diffusionpipe.timing.held import changes_of, peak_of
from diffusionpipe.timing.march import NOTHING, march
from diffusionpipe.units import Bytes, Seconds

UNIT_COSTS = StageCosts()
"""The costs F = I = W = 1; an activation counts 1 and is held until the end of W."""

OPS = (Op.F, Op.I, Op.W)
_RESOLUTION = 1 << 30
"""The number of ticks of the longest action where times are not whole numbers."""


class Goal(StrEnum):
    """The time that an order should make short; the two differ where workers do not all start and end together."""

    MAKESPAN = "makespan"
    """The time from 0 to the end of the last action."""
    WINDOW = "window"
    """The largest (last end - first start) of a worker: the time of an iteration where the workers do not wait for each
    other between two of them, and the time of "zero bubble"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitWork:
    """The work of a pipeline with split backwards: F, I and W of all stages and micro-batches, costs, memory limits.

    Stages are in forward order, costs one for each.

    Raises:
        ConfigError: a worker's limit is below the activations of one micro-batch.
    """

    workers: tuple[int, ...]
    """The worker of every stage."""
    num_microbatches: int
    costs: tuple[StageCosts, ...]
    latency: Seconds = 0
    """The time from the end of an action to the start of an action on another worker that reads its result."""
    limits: tuple[Bytes, ...]
    """The most bytes of activations that each worker may hold, by worker."""

    def __post_init__(self) -> None:
        for worker, limit in enumerate(self.limits):
            needed = sum(c.activation for home, c in zip(self.workers, self.costs, strict=True) if home == worker)
            if needed > limit:
                raise ConfigError(
                    f"worker {worker} may hold {limit} in activations, but one micro-batch holds {needed} on it; "
                    "raise its memory limit, make micro-batches smaller or give it fewer layers"
                )


def costs_of_stages(costs: StageCosts | Sequence[StageCosts], num_stages: int) -> tuple[StageCosts, ...]:
    """The costs of each stage, from costs for all stages alike, or from a sequence with one for each.

    Raises:
        ConfigError: the sequence has another length.
    """
    if isinstance(costs, StageCosts):
        return (costs,) * num_stages
    if len(costs) != num_stages:
        raise ConfigError(f"{len(costs)} costs for {num_stages} stages; give one for each stage, or one for all")
    return tuple(costs)


def schedule_of_work(name: str, work: SplitWork, orders: Sequence[Sequence[Action]], microbatch_size: int) -> Schedule:
    """The schedule that does the work in these orders, one for each worker, in micro-batches of `microbatch_size`."""
    pipe = Pipe(workers=work.workers, microbatches=(microbatch_size,) * work.num_microbatches, ops=SPLIT)
    return schedule_of(name, [pipe], orders)


def peaks(costs: Sequence[StageCosts], orders: Sequence[Sequence[Action]]) -> list[Bytes]:
    """The most bytes of activations that each worker holds with its order, by worker."""
    changes = [changes_of(SPLIT, cost.activation, cost.kept_after_input_grad) for cost in costs]
    return [peak_of(changes[action.stage][action.op] for action in order) for order in orders]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The work as numbered actions with whole times: number = letter x micro-batches + micro-batch.

    A letter is an op of a stage, 3 stage + op. Its costs and waits are the same for all micro-batches. The same fields
    describe the work with time reversed: then actions wait for what they went before, and memory is acquired at the
    start of what released it.
    """

    num_microbatches: int
    workers: tuple[int, ...]
    """The worker of each letter, by letter."""
    durations: tuple[int, ...]
    """The duration of each letter, by letter, in ticks, at least 1."""
    waits: tuple[tuple[tuple[int, int], ...], ...]
    """For each letter, (number of an action that has to start before less the action's own number, least ticks between
    the two starts)."""
    reversed_waits: tuple[tuple[tuple[int, int], ...], ...]
    """The pairs of `waits` in the work with time reversed, where an action waits for the actions that waited for it."""
    acquires: tuple[Bytes, ...]
    """Bytes that an action takes at its start, by letter."""
    releases: tuple[Bytes, ...]
    """Bytes that an action gives back at its end, by letter."""
    limits: tuple[Bytes, ...]
    """The most bytes of activations that each worker may hold, by worker."""

    @property
    def size(self) -> int:
        """The number of actions of all workers."""
        return len(self.workers) * self.num_microbatches

    def number(self, action: Action) -> int:
        """The number of an action in the network."""
        assert action.microbatch is not None
        return (3 * action.stage + OPS.index(action.op)) * self.num_microbatches + action.microbatch

    def action(self, number: int) -> Action:
        """The action with this number."""
        letter, microbatch = divmod(number, self.num_microbatches)
        return compute_action(letter // 3, OPS[letter % 3], microbatch)

    def starts(self, orders: Sequence[Sequence[int]]) -> list[int]:
        """The start of each action, by number, in ticks, if all start as early as their workers' orders let them.

        `orders`: the numbers of each worker's actions, in order.
        """
        m, inputs = self.num_microbatches, inputs_of(len(self.workers) // 3)
        # `waits` counts from start to start, `march` from end to start.
        lags = [
            0 if before == NOTHING else dict(self.waits[letter])[(before - letter) * m] - self.durations[before]
            for letter, before in enumerate(inputs)
        ]
        ends = march([[number // m for number in order] for order in orders], self.durations, inputs, lags)
        assert ends is not None, "the orders wait in a circle"
        return [end - duration for row, duration in zip(ends, self.durations, strict=True) for end in row]

    def sequences(self, starts: Sequence[int]) -> list[list[int]]:
        """The numbers of each worker's actions in the order of their starts."""
        found: list[list[int]] = [[] for _ in self.limits]
        for number in sorted(range(len(starts)), key=starts.__getitem__):
            found[self.workers[number // self.num_microbatches]].append(number)
        return found

    def orders(self, starts: Sequence[int]) -> list[list[Action]]:
        """The actions of each worker in the order of their starts."""
        return [[self.action(number) for number in sequence] for sequence in self.sequences(starts)]

    def mirrored(self) -> "Network":
        """The network of the same work with time reversed."""
        return replace(
            self,
            waits=self.reversed_waits,
            reversed_waits=self.waits,
            acquires=self.releases,
            releases=self.acquires,
        )


@cache
def inputs_of(num_stages: int) -> tuple[int, ...]:
    """For each letter, the letter of another stage that it waits for, or NOTHING; its k-th waits for the other's k-th.

    The letters are F, I and W of stages 0, 1, ..., as in `Network`.
    """
    found = []
    for stage in range(num_stages):
        # F waits for the stage before, I for the stage after. The own F and I come earlier in the order of the same
        # worker.
        found += [3 * stage - 3 if stage else NOTHING, 3 * stage + 4 if stage < num_stages - 1 else NOTHING, NOTHING]
    return tuple(found)


def network_of(work: SplitWork) -> Network:
    """The work as numbered actions with whole durations and waits.

    Times that are whole numbers above 0 are its ticks; others are rounded to 2^-30 of the longest one, and an action
    without a time takes one tick.
    """
    m, last = work.num_microbatches, len(work.workers) - 1
    times = [time for c in work.costs for time in (c.forward, c.input_grad, c.weight_grad)]
    is_exact = all(time == int(time) for time in [*times, work.latency]) and min(times) > 0
    scale = 1 if is_exact else _RESOLUTION / (max([*times, work.latency]) or 1)
    durations = tuple(max(1, round(time * scale)) for time in times)
    lag = round(work.latency * scale)
    waits: list[list[tuple[int, int]]] = [[] for _ in times]
    reversed_waits: list[list[tuple[int, int]]] = [[] for _ in times]

    def join(first: int, second: int, lag: int = 0) -> None:
        waits[second].append(((first - second) * m, durations[first] + lag))
        # With time reversed an action starts where it ended, so the later one's duration lies between.
        reversed_waits[first].append(((second - first) * m, durations[second] + lag))

    for stage in range(last + 1):
        forward, input_grad, weight_grad = range(3 * stage, 3 * stage + 3)
        join(input_grad, weight_grad)
        if stage:
            hop = lag if work.workers[stage - 1] != work.workers[stage] else 0
            join(forward - 3, forward, hop)
            join(input_grad, input_grad - 3, hop)
    join(3 * last, 3 * last + 1)  # the last stage's I follows its own F
    changes = [changes_of(SPLIT, c.activation, c.kept_after_input_grad)[op] for c in work.costs for op in OPS]
    return Network(
        num_microbatches=m,
        workers=tuple(worker for worker in work.workers for _ in range(3)),
        durations=durations,
        waits=tuple(map(tuple, waits)),
        reversed_waits=tuple(map(tuple, reversed_waits)),
        acquires=tuple(taken for taken, _ in changes),
        releases=tuple(-given_back for _, given_back in changes),
        limits=work.limits,
    )
