"""List scheduling: a worker that is free starts the most urgent of what it could start.

For families whose orders follow from priorities instead of a formula. Time goes from event to event; nothing is looked
ahead, and a worker never waits for something more urgent than what it has.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from diffusionpipe.ir import Action, Op, compute_action
from diffusionpipe.schedules.building.shapes import Pipe
from diffusionpipe.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """The times of a stage's actions, and of a transfer of their results to another worker, in any one unit."""

    forward: Seconds = 1
    backward: Seconds = 2
    input_grad: Seconds = 1
    weight_grad: Seconds = 1
    latency: Seconds = 0

    def of(self, op: Op) -> Seconds:
        """The time of the op F, B, I or W."""
        return {Op.F: self.forward, Op.B: self.backward, Op.I: self.input_grad, Op.W: self.weight_grad}[op]


UNIT_TIMES = StageTimes()
"""The times F = I = W = 1 and B = 2, with free communication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSchedule:
    """The orders of all workers, by worker, and the time at which the last action ends."""

    orders: list[list[Action]]
    makespan: Seconds


def list_schedule(
    pipes: Sequence[Pipe],
    urgency: Callable[[Action], tuple[Seconds, ...]],
    *,
    times: Sequence[StageTimes],
    limits: Sequence[int],
) -> ListSchedule:
    """The list schedule in which each free worker always starts the startable action with the least `urgency`.

    Stages are numbered through, pipe after pipe, as `schedule_of` numbers them; `times` and `limits` have one entry for
    each. A stage holds at most as many micro-batches as its limit says: from when their forward may start to the end of
    their B or I. They come in the order of their arrival. Equally urgent actions start in the order in which they
    became startable. Cost: O(log of the number of actions) for each action.
    """
    run = _Run(pipes, urgency, times, limits)
    return ListSchedule(orders=run.orders, makespan=run.time)


class _Run:
    """One run of list scheduling: the actions that each worker could start, and the events to come.

    An event is the arrival of an action's inputs, or its end.
    """

    def __init__(
        self,
        pipes: Sequence[Pipe],
        urgency: Callable[[Action], tuple[Seconds, ...]],
        times: Sequence[StageTimes],
        limits: Sequence[int],
    ) -> None:
        self.pipe_of = [pipe for pipe in pipes for _ in pipe.workers]
        self.workers = [worker for pipe in pipes for worker in pipe.workers]
        self.is_first = [position == 0 for pipe in pipes for position in range(len(pipe.workers))]
        self.is_last = [*self.is_first[1:], True]  # the stage before another pipe's first, and the very last
        self.urgency, self.times, self.room = urgency, times, list(limits)
        num_workers = 1 + max(self.workers)
        self.orders: list[list[Action]] = [[] for _ in range(num_workers)]
        self.startable: list[list[tuple[tuple[Seconds, ...], int, Action]]] = [[] for _ in range(num_workers)]
        self.outside: list[deque[Action]] = [deque() for _ in self.workers]  # forwards for which there is no room
        self.running: list[Action | None] = [None] * num_workers
        self.events: list[tuple[Seconds, int, Action]] = []
        self.num_events = 0
        self.time: Seconds = 0
        for stage, pipe in enumerate(self.pipe_of):
            if self.is_first[stage]:
                for microbatch in range(len(pipe.microbatches)):
                    self._at(0, compute_action(stage, Op.F, microbatch))
        while self.events:
            self._advance()

    def _at(self, time: Seconds, action: Action) -> None:
        self.num_events += 1
        heappush(self.events, (time, self.num_events, action))

    def _advance(self) -> None:
        """Go to the next moment at which something happens, and start what can be started then."""
        self.time = self.events[0][0]
        touched = set()
        # First all that happens at this moment, so that a worker chooses among all that it could start then.
        while self.events and self.events[0][0] == self.time:
            _, number, action = heappop(self.events)
            worker = self.workers[action.stage]
            touched.add(worker)
            if self.running[worker] == action:  # an end: an arrival is of an action that is not running yet
                self.running[worker] = None
                self._leave(action, number)
            elif action.op is not Op.F or self.room[action.stage]:
                self._enter(action, number)
            else:
                self.outside[action.stage].append(action)
        for worker in sorted(touched):
            if self.running[worker] is None and self.startable[worker]:
                self._start(worker, heappop(self.startable[worker])[2])

    def _enter(self, action: Action, number: int) -> None:
        """Make the action startable; a forward takes a place among the micro-batches that its stage may hold."""
        self.room[action.stage] -= action.op is Op.F
        heappush(self.startable[self.workers[action.stage]], (self.urgency(action), number, action))

    def _leave(self, action: Action, number: int) -> None:
        """Note the end of the action; a backward gives its place in the stage to the next waiting forward."""
        if action.op in (Op.B, Op.I):
            self.room[action.stage] += 1
            if self.outside[action.stage]:
                self._enter(self.outside[action.stage].popleft(), number)

    def _start(self, worker: int, action: Action) -> None:
        end = self.time + self.times[action.stage].of(action.op)
        self.orders[worker].append(action)
        self.running[worker] = action
        self._at(end, action)
        for target, op in self._next(action):
            lag = 0 if self.workers[target] == worker else self.times[action.stage].latency
            # From the end of the action: results for the stage's own worker need no transfer.
            self._at(end + lag, compute_action(target, op, action.microbatch))

    def _next(self, action: Action) -> Iterator[tuple[int, Op]]:
        """(stage, op) of each action that becomes startable by the end of this one, for the same micro-batch."""
        stage = action.stage
        backward = Op.B if Op.B in self.pipe_of[stage].ops else Op.I
        if action.op is Op.F:
            yield (stage, backward) if self.is_last[stage] else (stage + 1, Op.F)
        elif action.op is backward:
            if not self.is_first[stage]:
                yield stage - 1, backward
            if backward is Op.I:
                yield stage, Op.W
