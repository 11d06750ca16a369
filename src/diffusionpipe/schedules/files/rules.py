"""Orders by rules: a few lines say how every worker chooses its next action. The sizes come later.

    stages: loop 2               the workers of the stages: a chain, a loop or a wave (see `shapes`)
    traversal: rounds of ranks   the order of the forwards, and of the backwards
    limit: ranks - rank          most forwards of a worker whose B or I it has not run yet
    priority: F B                a worker takes the first of these ops that it may take, and waits for its input
    meanwhile: F                 while it waits, it runs the first of these ops whose input is there

A worker may take the next F of its traversal while it is below its limit, the next B or I after its F, the next W after
its I. It is found out with equal stages, F = I = W = 1, B = 2 and free messages what a worker waits for.

FlexPipe (2025, https://arxiv.org/abs/2510.05112) programs schedules by the priorities of their traversals. These rules
are our own. `rules_text` reads them from files.

1F1B: 2 workers, 3 micro-batches, worker 0 may have two forwards in flight, worker 1 one:

    worker 0    F0 F1 [1].  B0 ==  F2 [1].  B1 == [1].  B2 ==     [1] at its limit: the first op of `priority` that it
    worker 1    [2]F0 B0 == F1 B1 ==  [2]F2 B2 ==                     may take is B, so it waits for a gradient
                                                                  [2] it may take F, and waits for its input

>>> rules = Rules(shape=Shape.CHAIN, limit="ranks - rank", priority=(Op.F, Op.B))
>>> for order in schedule_by_rules(rules, 2, 3).orders:
...     print(*order)
0F0 0F1 0B0 0F2 0B1 0B2
1F0 1B0 1F1 1B1 1F2 1B2
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Action, Op, Schedule, compute_action
from diffusionpipe.schedules.building.alternation import depth_first, rounds
from diffusionpipe.schedules.building.list_scheduling import UNIT_TIMES
from diffusionpipe.schedules.building.shapes import Pipe, linear, loop, require_positive, schedule_of, wave
from diffusionpipe.schedules.files.expression import value_of
from diffusionpipe.units import Seconds

MAX_FORWARDS = 1_000_000


class Shape(StrEnum):
    """The ways in which stages can be placed on workers: one on each, in a loop, or in a wave."""

    CHAIN = "chain"
    LOOP = "loop"
    WAVE = "wave"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules by which workers choose their actions. Sizes are expressions with the names of `NAMES`."""

    shape: Shape
    chunks: int = 1
    """The number of stages on each worker."""
    group: str | None = None
    """The least number of micro-batches that a worker takes through all its chunks before the next ones; None: all."""
    is_unit: bool = False
    """Whether a worker ends all actions of a group before it begins the next one."""
    limit: str | None = None
    """The most forwards in flight on a worker; None: any number."""
    priority: tuple[Op, ...]
    """All ops of the schedule, the one that a worker prefers first."""
    meanwhile: tuple[Op, ...] = ()
    """The ops that a worker may run while it waits, the one that it prefers first."""


SIZES = ("ranks", "chunks", "microbatches")
"""The names of the sizes on which the length of a group may depend."""
NAMES = (*SIZES, "rank", "round")
"""The names of the sizes on which a limit may depend: also the worker, and the length of the longest group."""


def schedule_by_rules(
    rules: Rules, num_workers: int, num_microbatches: int, microbatch_size: int = 1, *, name: str = "rules"
) -> Schedule:
    """The schedule that follows from the rules at these sizes.

    Cost: O(log of the number of actions) for each action.

    Raises:
        ConfigError: a size is below 1, there is too much work to list, or the workers wait for each other in a circle.
    """
    require_positive(num_workers=num_workers, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
    if (num_forwards := num_workers * rules.chunks * num_microbatches) > MAX_FORWARDS:
        raise ConfigError(
            f"{num_workers} ranks x {rules.chunks} stages x {num_microbatches} micro-batches are {num_forwards:,} "
            f"forwards; use at most {MAX_FORWARDS:,}"
        )
    orders = _Run(rules, num_workers, num_microbatches).orders
    pipe = Pipe(
        workers=_workers(rules, num_workers),
        microbatches=(microbatch_size,) * num_microbatches,
        ops=frozenset(rules.priority),
    )
    return schedule_of(name, [pipe], orders)


def _workers(rules: Rules, num_workers: int) -> tuple[int, ...]:
    match rules.shape:
        case Shape.CHAIN:
            return linear(num_workers)
        case Shape.LOOP:
            return loop(num_workers, rules.chunks)
        case Shape.WAVE:
            return wave(num_workers, rules.chunks)


@dataclass(slots=True)
class _Part:
    """The actions that a worker does before it begins anything else: forwards, and backwards, each in its order."""

    forwards: list[tuple[int, int]]
    """(stage, micro-batch) of each forward, in order."""
    backwards: list[tuple[int, int]]
    """(stage, micro-batch) of each backward, in order."""
    counts: dict[Op, int]
    """Op -> the number of its actions that the worker has started."""


class _Run:
    """One run of the rules: moments at which workers look for their next action, in order of time."""

    def __init__(self, rules: Rules, num_workers: int, num_microbatches: int) -> None:
        self.rules, self.workers = rules, _workers(rules, num_workers)
        self.backward = Op.B if Op.B in rules.priority else Op.I
        sizes = dict(zip(SIZES, (num_workers, rules.chunks, num_microbatches), strict=True))
        group = num_microbatches if rules.group is None else self._at_least_one("traversal", rules.group, sizes)
        groups = rounds(num_microbatches, group)
        self.limits = [
            num_microbatches * rules.chunks
            if rules.limit is None
            else self._at_least_one("limit", rules.limit, {**sizes, "rank": rank, "round": len(groups[0])})
            for rank in range(num_workers)
        ]
        self.parts = [list(self._parts(worker, groups)) for worker in range(num_workers)]
        self.orders: list[list[Action]] = [[] for _ in range(num_workers)]
        self.in_flight, self.free_at = [0] * num_workers, [0.0] * num_workers
        self.ends: dict[tuple[Op, int, int], Seconds] = {}
        self.moments: list[tuple[Seconds, int]] = [(0, worker) for worker in range(num_workers)]
        while self.moments:
            self._look(*heappop(self.moments))
        if any(self.parts):
            raise ConfigError(self._stuck(sizes))

    def _at_least_one(self, key: str, text: str, values: dict[str, int]) -> int:
        number = value_of(text, values)
        if number < 1:
            sizes = ", ".join(f"{name} = {value}" for name, value in values.items())
            raise ConfigError(f"{key}: {text} is {number} with {sizes}; it must be at least 1")
        return number

    def _parts(self, worker: int, groups: tuple[range, ...]) -> Iterator[_Part]:
        """The parts of a worker's work in reverse: the part that it does first comes last."""
        own = [stage for stage, home in enumerate(self.workers) if home == worker]  # in forward order
        # Popped from the end.
        for some in ([one] for one in reversed(groups)) if self.rules.is_unit else [list(groups)]:
            sequence = depth_first(some, len(own))
            yield _Part(
                forwards=[(own[chunk], microbatch) for chunk, microbatch in sequence],
                backwards=[(own[-1 - chunk], microbatch) for chunk, microbatch in sequence],
                counts=dict.fromkeys(self.rules.priority, 0),
            )

    def _look(self, now: Seconds, worker: int) -> None:
        """Let the worker start an action at the time `now`, if it is free and may start one."""
        if self.free_at[worker] > now or not self.parts[worker]:
            return
        part = self.parts[worker][-1]
        takes = {op: next_ for op in self.rules.priority if (next_ := self._next(worker, part, op)) is not None}
        first = next(iter(takes), None)  # [1] [2]
        for op in (first, *self.rules.meanwhile):
            if op in takes and self._input(op, *takes[op]) <= now:
                self._start(now, worker, part, op)
                return

    def _next(self, worker: int, part: _Part, op: Op) -> tuple[int, int] | None:
        """(stage, micro-batch) of the worker's next action of this op; None if it may not take one."""
        work, count = part.forwards if op is Op.F else part.backwards, part.counts[op]
        if count == len(work):
            return None
        match op:
            case Op.F:
                may_take = self.in_flight[worker] < self.limits[worker]
            case Op.W:
                may_take = count < part.counts[Op.I]
            case _:
                # Its own forward has begun. The gradient may be on its way: then the worker waits for it.
                may_take = (Op.F, *work[count]) in self.ends
        return work[count] if may_take else None

    def _input(self, op: Op, stage: int, microbatch: int) -> Seconds:
        """The time at which an action's input from another stage is there; infinite as long as it is not known."""
        if op is Op.W or (op is Op.F and stage == 0):
            return 0
        if op is not Op.F and stage == len(self.workers) - 1:
            return self.ends[Op.F, stage, microbatch]
        # Infinite: no worker waits in vain, as the end of that action makes its reader look again.
        return self.ends.get((op, stage - 1 if op is Op.F else stage + 1, microbatch), float("inf"))

    def _start(self, now: Seconds, worker: int, part: _Part, op: Op) -> None:
        stage, microbatch = (part.forwards if op is Op.F else part.backwards)[part.counts[op]]
        end = now + UNIT_TIMES.of(op)
        self.orders[worker].append(compute_action(stage, op, microbatch))
        self.ends[op, stage, microbatch] = self.free_at[worker] = end
        part.counts[op] += 1
        self.in_flight[worker] += {Op.F: 1, self.backward: -1}.get(op, 0)
        if all(count == len(part.forwards) for count in part.counts.values()):
            self.parts[worker].pop()
        # The stage that reads the result; W has none.
        reader = {Op.F: stage + 1, self.backward: stage - 1}.get(op, stage)
        for other in {worker, self.workers[reader] if 0 <= reader < len(self.workers) else worker}:
            heappush(self.moments, (end, other))

    def _stuck(self, sizes: dict[str, int]) -> str:
        """A text that names, for every worker that has work left, the action for which it waits."""
        waits = []
        for worker, parts in enumerate(self.parts):
            if not parts:
                continue
            takes = ((op, self._next(worker, parts[-1], op)) for op in self.rules.priority)
            waits.append(
                next(
                    (f"rank {worker} waits at {compute_action(n[0], op, n[1])}" for op, n in takes if n is not None),
                    f"rank {worker} has reached its limit of {self.limits[worker]}",
                )
            )
        named = ", ".join(f"{value} {name}" for name, value in sizes.items())
        return (
            f"with {named} the ranks wait for each other in a circle: {'; '.join(waits[:4])}; raise `limit`, or name "
            "the ops that may run in waits under `meanwhile`"
        )
