"""An event-driven machine that runs a schedule: the judge of `timing`, from which it imports nothing.

It moves hosts and streams on one step at a time, as a machine does; `timing` sorts events and takes longest paths.
It is the simulator's engine of an earlier version, with costs in the place of its table of durations.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from diffusionpipe.costs import Costs
from diffusionpipe.costs.waking import wake_time
from diffusionpipe.ir.action import COMPUTE_OPS, MESSAGE_OPS, Action, Op
from diffusionpipe.ir.flows import TIMED_OPS, Flow, flows
from diffusionpipe.ir.schedule import Schedule
from diffusionpipe.units import Seconds


class Streams(StrEnum):
    """Which transfers of a worker run one after the other."""

    PAIR = "pair"
    """Every ordered pair of workers has a stream of its own."""
    DIRECTION = "direction"
    """A worker has one stream for all transfers towards higher workers and one for all towards lower ones, its
    receives and its sends alike: one NCCL communicator per direction."""
    HOST = "host"
    """A worker waits for each of its transfers, reductions and gathers to end."""


class Durations:
    """How long things take by the costs of a schedule."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs

    def compute(self, action: Action) -> Seconds:
        """Time of a compute action or a fill."""
        if action.op is Op.ENCODE:
            assert action.slot is not None
            return self.costs.fills[action.slot]
        stage = self.costs.stages[action.stage]
        times = {Op.F: stage.forward, Op.B: stage.backward, Op.I: stage.input_grad, Op.W: stage.weight_grad}
        return times[action.op]

    def host(self, action: Action) -> Seconds:
        """The time in which the host issues a compute action or a fill."""
        if action.op is Op.ENCODE:
            assert action.slot is not None
            return self.costs.host_fills[action.slot] if self.costs.host_fills else 0
        host = self.costs.stages[action.stage].host
        backward = host.input_grad + host.weight_grad
        return {Op.F: host.forward, Op.B: backward, Op.I: host.input_grad, Op.W: host.weight_grad}[action.op]

    def waking(self, idle: Seconds, busy: Seconds) -> Seconds:
        """What an action of `busy` seconds takes longer after its worker has waited `idle` seconds for it."""
        return wake_time(self.costs.waking, idle, busy)

    def message(self, slot: int) -> Seconds:
        """Time of a message on its link."""
        message = self.schedule.messages[slot]
        return self._transfer(message.source, message.destination, message.tensors, len(message.samples))

    def flow(self, flow: Flow) -> Seconds:
        """Time of a flow between workers where messages are not explicit."""
        return self._transfer(flow.source, flow.destination, flow.tensors, len(flow.samples))

    def reduce(self, stage: int) -> Seconds:
        """Time of a stage's gradient reduction."""
        return self.costs.reduces[stage] if self.costs.reduces else 0

    def unshard(self, stage: int) -> Seconds:
        """Time in which the parameters of a stage's block are gathered."""
        return self.costs.unshards[stage] if self.costs.unshards else 0

    def _transfer(self, source: int, destination: int, tensors: Sequence[str], num_samples: int) -> Seconds:
        stages = self.schedule.placement.stages
        num_bytes = num_samples * sum(self.costs.tensor_bytes.get(name, 0) for name in tensors)
        return self.costs.link_between(stages[source].worker, stages[destination].worker).transfer(num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What happened. Times stand worker by worker in the order of the actions; None: it never happened."""

    starts: tuple[tuple[Seconds | None, ...], ...]
    ends: tuple[tuple[Seconds | None, ...], ...]
    finished: tuple[tuple[int, int], ...]
    """(worker, index) of the compute actions in an order in which one processor could run them all."""
    blocked: tuple[str, ...]
    """For each worker that did not come to its end, the action it waits at; for each stream, its head."""


def execute(schedule: Schedule, costs: Costs, *, streams: Streams = Streams.DIRECTION) -> Execution:
    """Run the schedule until nothing can go on."""
    machine = _Machine(schedule, Durations(schedule, costs), streams, flows(schedule))
    machine.run()
    return machine.result()


def makespan(schedule: Schedule, costs: Costs) -> Seconds:
    """When the last action of a legal schedule ends."""
    run = execute(schedule, costs)
    assert not run.blocked, run.blocked
    return max(end for ends in run.ends for end in ends if end is not None)


def serving(schedule: Schedule, all_flows: Sequence[Flow]) -> dict[int, tuple[int, ...]]:
    """Index of each flow between workers -> the messages that carry it."""
    stages = schedule.placement.stages
    frozen = {s for p in schedule.placement.pipelines if Op.ENCODE in p.ops for s in p.stages}
    of_edge: dict[tuple[int, int, int, bool], list[int]] = defaultdict(list)
    of_encoder: dict[tuple[int, int], list[int]] = defaultdict(list)
    for slot, message in enumerate(schedule.messages):
        if message.source in frozen:
            of_encoder[message.source, stages[message.destination].worker].append(slot)
        else:
            of_edge[message.source, message.destination, message.microbatch, message.is_gradient].append(slot)
    served = {}
    for index, flow in enumerate(all_flows):
        worker = stages[flow.destination].worker
        if stages[flow.source].worker == worker:
            continue
        if flow.is_frozen:
            candidates = of_encoder[flow.source, worker]
        else:
            candidates = of_edge[flow.source, flow.destination, flow.microbatch, flow.is_gradient]
        served[index] = tuple(s for s in candidates if schedule.messages[s].samples.intersection(flow.samples))
    return served


def lone_blocks(schedule: Schedule) -> frozenset[int]:
    """The trained blocks that one worker alone holds; data-parallel copies of it are not in the schedule."""
    holders: dict[int, set[int]] = defaultdict(set)
    for stage in schedule.placement.stages:
        holders[stage.weights].add(stage.worker)
    return frozenset(weights for weights, workers in holders.items() if len(workers) == 1)


def gathers(schedule: Schedule) -> tuple[tuple[tuple[int, Action], ...], ...]:
    """For each worker its gathers that are read: (index of the UNSHARD, first compute action behind it)."""
    stages = schedule.placement.stages
    found = []
    for order in schedule.orders:
        gathered: list[tuple[int, Action]] = []
        open_gathers: dict[int, int] = {}
        for index, action in enumerate(order):
            if action.op is Op.UNSHARD:
                open_gathers[stages[action.stage].weights] = index
            elif (
                action.op in COMPUTE_OPS and (start := open_gathers.pop(stages[action.stage].weights, None)) is not None
            ):
                gathered.append((start, action))
        found.append(tuple(gathered))
    return tuple(found)


class _Machine:
    """The state of one run. Events are numbered: first all actions worker by worker, then all transfers.

    A gather, or the reduction of a block that one worker alone holds, is a transfer with one end: its own action.
    """

    def __init__(self, schedule: Schedule, durations: Durations, streams: Streams, all_flows: Sequence[Flow]) -> None:
        self.schedule, self.durations, self.streams = schedule, durations, streams
        self.offsets = [0]
        for order in schedule.orders:
            self.offsets.append(self.offsets[-1] + len(order))
        num_actions, num_messages = self.offsets[-1], len(schedule.messages)
        num_events = num_actions + num_messages + 1 + max(s.weights for s in schedule.placement.stages)
        self.first_message, self.first_reduce = num_actions, num_actions + num_messages
        self.starts: list[Seconds | None] = [None] * num_events
        self.ends: list[Seconds | None] = [None] * num_events
        self.next = [0] * schedule.num_workers
        self.host: list[Seconds] = [0] * schedule.num_workers
        self.processor: list[Seconds] = [0] * schedule.num_workers  # when each host has issued what it has come to
        self.finished: list[tuple[int, int]] = []
        self.waiting: dict[int, list[int]] = defaultdict(list)  # event -> workers
        self.queues: dict[tuple[int, ...], deque[int]] = defaultdict(deque)
        self.free: dict[tuple[int, ...], Seconds] = defaultdict(int)
        self.issued: dict[int, list[tuple[tuple[int, ...], int, Seconds]]] = defaultdict(list)  # stream, action, time
        self.transfer_of = {}
        self.begun = set[int]()  # transfers' ends that a worker has come to
        self.lone = lone_blocks(schedule)
        num_collectives: dict[int, int] = defaultdict(int)
        for worker, order in enumerate(schedule.orders):
            for i, action in enumerate(order):
                transfer = self._transfer(action, self.offsets[worker] + i)
                if transfer is not None:
                    self.transfer_of[self.offsets[worker] + i] = transfer
                    num_collectives[transfer] += action.op in (Op.REDUCE_GRAD, Op.UNSHARD)
        self.num_ends = {t: num_collectives[t] or 2 for t in self.transfer_of.values()}
        self.inputs = self._inputs(all_flows)

    def _transfer(self, action: Action, event: int) -> int | None:
        if action.op in MESSAGE_OPS:
            assert action.slot is not None
            return self.first_message + action.slot
        if action.op is Op.UNSHARD:
            return event
        if action.op is Op.REDUCE_GRAD:
            weights = self.schedule.placement.stages[action.stage].weights
            return event if weights in self.lone else self.first_reduce + weights
        return None

    def _inputs(self, all_flows: Sequence[Flow]) -> Mapping[Action, list[tuple[int, Seconds]]]:
        """Compute action -> the events it waits for, and how long after each of them."""
        schedule, stages = self.schedule, self.schedule.placement.stages
        event_of = {
            action: self.offsets[worker] + i
            for worker, order in enumerate(schedule.orders)
            for i, action in enumerate(order)
            if action.op in TIMED_OPS
        }
        served = serving(schedule, all_flows) if schedule.has_communication else {}
        inputs: dict[Action, list[tuple[int, Seconds]]] = defaultdict(list)
        for index, flow in enumerate(all_flows):
            if flow.is_ahead:
                continue
            is_local = stages[flow.source].worker == stages[flow.destination].worker
            if index in served:
                inputs[flow.consumer].extend((self.first_message + slot, 0) for slot in served[index])
            else:
                lag = 0 if is_local else self.durations.flow(flow)
                inputs[flow.consumer].extend((event_of[p], lag) for p in flow.producers)
        for worker, gathered in enumerate(gathers(schedule)):
            for index, action in gathered:
                inputs[action].append((self.offsets[worker] + index, 0))
        return inputs

    def run(self) -> None:
        """Let every worker go as far as it can, again whenever something it waits for has ended."""
        ready = deque(range(self.schedule.num_workers))
        while ready:
            self._advance(ready.popleft(), ready)

    def _advance(self, worker: int, ready: deque[int]) -> None:
        order = self.schedule.orders[worker]
        while self.next[worker] < len(order):
            event = self.offsets[worker] + self.next[worker]
            action = order[self.next[worker]]
            if event in self.transfer_of:
                if event not in self.begun:
                    self.begun.add(event)
                    self._issue(worker, event, ready)
                if self.streams is Streams.HOST and not self._wait(worker, self.transfer_of[event]):
                    return
            elif not self._compute(worker, event, action, ready):
                return
            self.next[worker] += 1

    def _compute(self, worker: int, event: int, action: Action, ready: deque[int]) -> bool:
        start = self.host[worker]
        for source, lag in self.inputs.get(action, ()) if action.op in TIMED_OPS else ():
            end = self.ends[source]
            if end is None:
                self.waiting[source].append(worker)
                return False
            start = max(start, end + lag)
        is_timed = action.op in TIMED_OPS
        busy, issuing = (self.durations.compute(action), self.durations.host(action)) if is_timed else (0, 0)
        if issuing:
            start = max(start, self.processor[worker])
            self.processor[worker] += issuing
        if start > self.host[worker]:
            busy += self.durations.waking(start - self.host[worker], busy)
        self.starts[event] = start
        issued = self.processor[worker] if issuing else 0
        self.ends[event] = self.host[worker] = max(start + busy, issued)
        if is_timed:
            self.finished.append((worker, self.next[worker]))
        ready.extend(self.waiting.pop(event, ()))
        return True

    def _wait(self, worker: int, transfer: int) -> bool:
        """Whether a worker that waits for its transfer goes on."""
        end = self.ends[transfer]
        if end is None:
            self.waiting[transfer].append(worker)
            return False
        self.host[worker] = end
        return True

    def _issue(self, worker: int, event: int, ready: deque[int]) -> None:
        transfer = self.transfer_of[event]
        stream = self._stream(worker, transfer)
        self.queues[stream].append(transfer)
        self.issued[transfer].append((stream, event, self.host[worker]))
        candidates = [transfer]
        while candidates:
            candidates.extend(self._start(candidates.pop(), ready))

    def _stream(self, worker: int, transfer: int) -> tuple[int, ...]:
        if self.streams is Streams.HOST or not self.first_message <= transfer < self.first_reduce:
            return (worker,)
        message = self.schedule.messages[transfer - self.first_message]
        stages = self.schedule.placement.stages
        source, destination = stages[message.source].worker, stages[message.destination].worker
        if self.streams is Streams.PAIR:
            return (worker, source, destination)
        return (worker, int(source < destination))

    def _start(self, transfer: int, ready: deque[int]) -> list[int]:
        """Run the transfer if it is the head of its streams at all ends; the transfers that come to the head by it."""
        issued = self.issued[transfer]
        if self.ends[transfer] is not None:  # it came to the head of two streams at once
            return []
        if len(issued) < self.num_ends[transfer] or any(self.queues[s][0] != transfer for s, _, _ in issued):
            return []
        start = max(max(time, self.free[stream]) for stream, _, time in issued)
        if self.first_message <= transfer < self.first_reduce:
            end = start + self.durations.message(transfer - self.first_message)
        else:
            end = start + max(self._collective(self._action(event)) for _, event, _ in issued)
        self.starts[transfer], self.ends[transfer] = start, end
        heads = []
        for stream, event, _ in issued:
            self.starts[event], self.ends[event], self.free[stream] = start, end, end
            queue = self.queues[stream]
            queue.popleft()
            if queue:
                heads.append(queue[0])
        ready.extend(self.waiting.pop(transfer, ()))
        return heads

    def _collective(self, action: Action) -> Seconds:
        is_gather = action.op is Op.UNSHARD
        return self.durations.unshard(action.stage) if is_gather else self.durations.reduce(action.stage)

    def _action(self, event: int) -> Action:
        worker = next(w for w in range(self.schedule.num_workers) if event < self.offsets[w + 1])
        return self.schedule.orders[worker][event - self.offsets[worker]]

    def _blocked(self) -> tuple[str, ...]:
        lines = []
        for worker, order in enumerate(self.schedule.orders):
            if self.next[worker] < len(order):
                lines.append(f"worker {worker} waits at {order[self.next[worker]]} for its inputs")
        for stream, queue in sorted(self.queues.items()):
            if queue:
                head = next(self._action(event) for s, event, _ in self.issued[queue[0]] if s == stream)
                lines.append(f"worker {stream[0]} has {head} at the head of its stream {self._name(stream)}")
        return tuple(lines)

    def _name(self, stream: tuple[int, ...]) -> str:
        if len(stream) == 1:
            return "of reductions and gathers"
        if len(stream) == 2:
            return f"towards {'higher' if stream[1] else 'lower'} workers"
        return f"from worker {stream[1]} to worker {stream[2]}"

    def result(self) -> Execution:
        """The times, and what is stuck."""
        borders = list(zip(self.offsets, self.offsets[1:], strict=False))
        return Execution(
            starts=tuple(tuple(self.starts[a:b]) for a, b in borders),
            ends=tuple(tuple(self.ends[a:b]) for a, b in borders),
            finished=tuple(self.finished),
            blocked=self._blocked(),
        )
