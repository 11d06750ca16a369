"""List scheduling: a worker that is free starts the most urgent of what it could start.

For families whose orders follow from priorities instead of a formula. Time goes from event to event; nothing is looked
ahead, and a worker never waits for something more urgent than what it has.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from diffusionpipe.ir import Action, Op, compute_action
from diffusionpipe.schedules.shapes import Pipe
from diffusionpipe.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """How long the actions of a stage take, equal for all stages, and a transfer between two workers."""

    forward: Seconds = 1
    backward: Seconds = 2
    input_grad: Seconds = 1
    weight_grad: Seconds = 1
    latency: Seconds = 0

    def of(self, op: Op) -> Seconds:
        """The time of F, B, I or W."""
        return {Op.F: self.forward, Op.B: self.backward, Op.I: self.input_grad, Op.W: self.weight_grad}[op]


UNIT_TIMES = StageTimes()
"""F = I = W = 1, B = 2, free communication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSchedule:
    """The orders of all workers, and when the last action ends."""

    orders: list[list[Action]]
    makespan: Seconds


def list_schedule(
    pipe: Pipe,
    urgency: Callable[[Action], tuple[Seconds, ...]],
    *,
    times: StageTimes = UNIT_TIMES,
    max_in_flight: int | None = None,
) -> ListSchedule:
    """The schedule in which each worker always starts the startable action of the least `urgency`.

    At most `max_in_flight` micro-batches (None: any number) are between the start of their first forward and the end
    of their last B or I; they enter in order. Equally urgent actions start in the order in which they became
    startable. Cost: O(log of the number of actions) for each action.
    """
    run = _Run(pipe, urgency, times, max_in_flight or len(pipe.microbatches))
    return ListSchedule(orders=run.orders, makespan=run.time)


class _Run:
    """One run: what is startable on each worker, and the events to come.

    An event is an action that becomes startable, or None: the worker becomes free.
    """

    def __init__(
        self, pipe: Pipe, urgency: Callable[[Action], tuple[Seconds, ...]], times: StageTimes, max_in_flight: int
    ) -> None:
        num_workers = 1 + max(pipe.workers)
        self.workers, self.urgency, self.latency = pipe.workers, urgency, times.latency
        self.durations = {op: times.of(op) for op in pipe.ops}
        self.backward = Op.B if Op.B in pipe.ops else Op.I
        self.orders: list[list[Action]] = [[] for _ in range(num_workers)]
        self.startable: list[list[tuple[tuple[Seconds, ...], int, Action]]] = [[] for _ in range(num_workers)]
        self.free_at: list[Seconds] = [0] * num_workers
        self.events: list[tuple[Seconds, int, int, Action | None]] = []
        self.num_events = 0
        self.time: Seconds = 0
        self.outside = iter(range(len(pipe.microbatches)))
        for _ in range(max_in_flight):
            self._enter(0)
        while self.events:
            self._advance()

    def _enter(self, time: Seconds) -> None:
        """Let the next micro-batch in, if there is one."""
        for microbatch in self.outside:
            self._at(time, self.workers[0], compute_action(0, Op.F, microbatch))
            return

    def _at(self, time: Seconds, worker: int, action: Action | None) -> None:
        self.num_events += 1
        heappush(self.events, (time, self.num_events, worker, action))

    def _advance(self) -> None:
        """Go to the next moment at which something happens, and start what can be started then."""
        self.time = self.events[0][0]
        touched = set()
        while self.events and self.events[0][0] == self.time:
            _, number, worker, action = heappop(self.events)
            touched.add(worker)
            if action is not None:
                heappush(self.startable[worker], (self.urgency(action), number, action))
        for worker in sorted(touched):
            if self.free_at[worker] <= self.time and self.startable[worker]:
                self._start(worker, heappop(self.startable[worker])[2])

    def _start(self, worker: int, action: Action) -> None:
        end = self.time + self.durations[action.op]
        self.orders[worker].append(action)
        self.free_at[worker] = end
        self._at(end, worker, None)
        for stage, op in self._next(action):
            target = self.workers[stage]
            lag = 0 if target == worker else self.latency
            self._at(end + lag, target, compute_action(stage, op, action.microbatch))
        if action.op is self.backward and action.stage == 0:
            self._enter(end)

    def _next(self, action: Action) -> Iterator[tuple[int, Op]]:
        """(stage, op) of what becomes startable by the end of the action."""
        last = len(self.workers) - 1
        if action.op is Op.F:
            yield (action.stage + 1, Op.F) if action.stage < last else (last, self.backward)
        elif action.op is self.backward:
            if action.stage:
                yield action.stage - 1, self.backward
            if self.backward is Op.I:
                yield action.stage, Op.W
