"""One pipeline with split backwards and what its actions cost: by this orders are judged.

What the families with costs have in common: the work, the memory and the time of orders. How orders get shorter stands
in `squeeze`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from diffusionpipe.costs import StageCosts
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Action, Op, Schedule
from diffusionpipe.schedules.shapes import SPLIT, Pipe, schedule_of
from diffusionpipe.units import Bytes, Seconds

UNIT_COSTS = StageCosts()
"""F = I = W = 1; an activation counts 1 and is held until the end of W."""

OPS = (Op.F, Op.I, Op.W)
_RESOLUTION = 1 << 30
"""Ticks of the longest action where times are not whole numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitWork:
    """F, I and W of every stage and micro-batch. Stages are in forward order, costs one for each."""

    workers: tuple[int, ...]
    """The worker of every stage."""
    num_microbatches: int
    costs: tuple[StageCosts, ...]
    latency: Seconds = 0
    """Time from the end of an action to the start of what reads it on another worker."""
    limits: tuple[Bytes, ...]
    """The most that each worker may hold in activations."""

    def __post_init__(self) -> None:
        for worker, limit in enumerate(self.limits):
            needed = sum(c.activation for home, c in zip(self.workers, self.costs, strict=True) if home == worker)
            if needed > limit:
                raise ConfigError(
                    f"worker {worker} may hold {limit} in activations, but one micro-batch holds {needed} on it; "
                    "raise its memory limit, make micro-batches smaller or give it fewer layers"
                )


def costs_of_stages(costs: StageCosts | Sequence[StageCosts], num_stages: int) -> tuple[StageCosts, ...]:
    """One for each stage, of one for all or already one for each.

    Raises:
        ConfigError: their number is another one.
    """
    if isinstance(costs, StageCosts):
        return (costs,) * num_stages
    if len(costs) != num_stages:
        raise ConfigError(f"{len(costs)} costs for {num_stages} stages; give one for each stage, or one for all")
    return tuple(costs)


def schedule_of_work(name: str, work: SplitWork, orders: Sequence[Sequence[Action]], microbatch_size: int) -> Schedule:
    """The schedule that does the work in these orders."""
    pipe = Pipe(workers=work.workers, microbatches=(microbatch_size,) * work.num_microbatches, ops=SPLIT)
    return schedule_of(name, [pipe], orders)


def peaks(costs: Sequence[StageCosts], orders: Sequence[Sequence[Action]]) -> list[Bytes]:
    """The most that each worker holds in activations: from F, a part to the end of I, the rest to the end of W."""
    found = []
    for order in orders:
        held = peak = 0
        for action in order:
            cost = costs[action.stage]
            match action.op:
                case Op.F:
                    held += cost.activation
                    peak = max(peak, held)
                case Op.I:
                    held -= cost.activation - cost.kept_after_input_grad
                case _:
                    held -= cost.kept_after_input_grad
        found.append(peak)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The work as numbered actions with whole times: number = (3 stage + op) x micro-batches + micro-batch.

    The same fields describe it with time reversed: then actions wait for what they went before, and memory is acquired
    at the start of what released it.
    """

    num_microbatches: int
    workers: list[int]
    durations: list[int]
    """In ticks, at least 1."""
    before: list[list[tuple[int, int]]]
    """The actions that must have ended, and how long ago."""
    after: list[list[tuple[int, int]]]
    acquires: list[Bytes]
    """What is held from the start of the action on."""
    releases: list[Bytes]
    """What is held to the end of the action."""
    limits: tuple[Bytes, ...]

    def number(self, action: Action) -> int:
        """The number of an action."""
        assert action.microbatch is not None
        return (3 * action.stage + OPS.index(action.op)) * self.num_microbatches + action.microbatch

    def action(self, number: int) -> Action:
        """The action of a number."""
        kind, microbatch = divmod(number, self.num_microbatches)
        return Action(stage=kind // 3, op=OPS[kind % 3], microbatch=microbatch)

    def starts(self, orders: Sequence[Sequence[int]]) -> list[int]:
        """When each action starts if all start as early as their workers' orders let them."""
        following = {one: other for order in orders for one, other in pairwise(order)}
        missing = [len(inputs) for inputs in self.before]
        for number in following.values():
            missing[number] += 1
        starts = [0] * len(missing)
        ready = deque(number for number, count in enumerate(missing) if not count)
        num_done = 0
        while ready:
            number = ready.popleft()
            num_done += 1
            end = starts[number] + self.durations[number]
            waiting = self.after[number]
            if number in following:
                waiting = [*waiting, (following[number], 0)]
            for other, lag in waiting:
                starts[other] = max(starts[other], end + lag)
                missing[other] -= 1
                if not missing[other]:
                    ready.append(other)
        assert num_done == len(starts), "the orders wait in a circle"
        return starts

    def orders(self, starts: Sequence[int]) -> list[list[int]]:
        """Each worker's actions in the order of their starts."""
        found: list[list[int]] = [[] for _ in self.limits]
        for number in sorted(range(len(starts)), key=starts.__getitem__):
            found[self.workers[number]].append(number)
        return found

    def mirrored(self) -> "Network":
        """The same work with time reversed."""
        return Network(
            num_microbatches=self.num_microbatches,
            workers=self.workers,
            durations=self.durations,
            before=self.after,
            after=self.before,
            acquires=self.releases,
            releases=self.acquires,
            limits=self.limits,
        )


def network_of(work: SplitWork) -> Network:
    """The work as a network.

    Times that are whole numbers above 0 are its ticks; others are rounded to 2^-30 of the longest one, and what takes
    no time takes one tick.
    """
    m, num_stages = work.num_microbatches, len(work.workers)
    times = [time for c in work.costs for time in (c.forward, c.input_grad, c.weight_grad)]
    is_exact = all(time == int(time) for time in [*times, work.latency]) and min(times) > 0
    scale = 1 if is_exact else _RESOLUTION / (max([*times, work.latency]) or 1)
    size = 3 * num_stages * m
    network = Network(
        num_microbatches=m,
        workers=[worker for worker in work.workers for _ in range(3 * m)],
        durations=[max(1, round(time * scale)) for time in times for _ in range(m)],
        before=[[] for _ in range(size)],
        after=[[] for _ in range(size)],
        acquires=[0] * size,
        releases=[0] * size,
        limits=work.limits,
    )
    lag = round(work.latency * scale)
    for stage, cost in enumerate(work.costs):
        for microbatch in range(m):
            forward, input_grad, weight_grad = ((3 * stage + op) * m + microbatch for op in range(3))
            _join(network, forward, input_grad, 0)
            _join(network, input_grad, weight_grad, 0)
            if stage:
                hop = lag if work.workers[stage - 1] != work.workers[stage] else 0
                _join(network, forward - 3 * m, forward, hop)
                _join(network, input_grad, input_grad - 3 * m, hop)
            network.acquires[forward] = cost.activation
            network.releases[input_grad] = cost.activation - cost.kept_after_input_grad
            network.releases[weight_grad] = cost.kept_after_input_grad
    return network


def _join(network: Network, first: int, second: int, lag: int) -> None:
    network.after[first].append((second, lag))
    network.before[second].append((first, lag))
