"""Message buffers of a worker through time, beside its activations.

    received     from its post [1] to the start of its reader, where an activation becomes one of the reader's
    sent         a gradient from the end of the action that made it to the moment at which it is dropped [2], which
                 `timing.sends` computes; an activation is one of its sender's, or until it is dropped where the sender
                 recomputes it and nothing else there reads it [3]
    handed on    the gradients of a stage, sent ones too, until the last reader on its own worker starts [4]

Received memory in which several stages of a worker hold a tensor, because one handed on a view, counts for each of
them: it is really free when the last one is done, so it is counted for as long or longer.

A receive is posted as soon as the host comes to it: at the end of the compute before it. In 1F1B with 2 workers and 2
micro-batches, activations of 7 bytes and messages of 5:

    worker 0   0F0 0F1 r2     0B0 0B1         at r2 two activations, and the buffer of 0B0's gradient: 2 x 7 + 5
    worker 1       1F0 r1 1B0 1F1 1B1         at r1 one, and the buffer of 1F1's input: 7 + 5; the same at 1F1, where
                                              the gradient that 1B0 has made is still being sent

>>> from diffusionpipe.ir import Edge
>>> from diffusionpipe.passes import communicate, connect_blocks
>>> from diffusionpipe.schedules import one_f_one_b
>>> from diffusionpipe.simulator import simulate, uniform_costs
>>> silent = connect_blocks(one_f_one_b(2, 2), [Edge(producer=0, consumer=1, tensors=("x",), gradients=("x",))])
>>> costs = uniform_costs(silent, activation=7)
>>> schedule = communicate(silent, simulate(silent, costs))
>>> moving_of(schedule, simulate(schedule, costs), {"x": 5})  # activations, messages
[(14, 5), (7, 5)]
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from diffusionpipe.ir import Action, Op, Schedule, Span, Timeline
from diffusionpipe.ir.flows import TIMED_OPS, backward_op
from diffusionpipe.timing.sends import drops_of, waits_of
from diffusionpipe.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class Moving:
    """The bytes of activations and message buffers that a worker holds, from moment to moment."""

    times: Sequence[Seconds]
    """The times at which activations or messages change, ascending, in seconds."""
    held: Sequence[tuple[Bytes, Bytes]]
    """Bytes of (activations, messages) from each of these times on."""

    @property
    def peak(self) -> tuple[Bytes, Bytes]:
        """The bytes of (activations, messages) at the moment when their sum is largest."""
        return max(self.held, key=sum, default=(0, 0))

    def most(self, start: Seconds, end: Seconds) -> Bytes:
        """The largest sum of activations and messages in bytes from `start`, always included, to before `end`."""
        # The last change at or before `start`: its sum still holds there.
        first = bisect_right(self.times, start) - 1
        return max(map(sum, self.held[max(first, 0) : max(first + 1, bisect_left(self.times, end))]), default=0)


def moving_of(schedule: Schedule, timeline: Timeline, sizes: Mapping[str, Bytes]) -> list[tuple[Bytes, Bytes]]:
    """For each worker, bytes of (activations, message buffers) at the moment when their sum is largest.

    Arguments as in `moving_through`.
    """
    return [moving.peak for moving in moving_through(schedule, timeline, sizes)]


def moving_through(
    schedule: Schedule,
    timeline: Timeline,
    sizes: Mapping[str, Bytes],
    handed: Mapping[int, Collection[str]] = MappingProxyType({}),
) -> list[Moving]:
    """The bytes of activations and message buffers of each worker through time, by worker.

    Args:
        schedule: without explicit messages, two messages of the largest size count for each worker all the time.
        timeline: the times of that schedule, with its activations.
        sizes: tensor -> bytes of one sample.
        handed: stage -> tensors among its activations that only other workers read.
    """
    changes: list[dict[Seconds, list[int]]] = [defaultdict(lambda: [0, 0]) for _ in range(schedule.num_workers)]
    held = [0] * schedule.num_workers
    # Samples say the bytes held from their time on; changes at equal times are added up, so differences are needed.
    for sample in sorted(timeline.memory, key=lambda sample: sample.time):
        changes[sample.worker][sample.time][0] += sample.held - held[sample.worker]
        held[sample.worker] = sample.held
    waiting = [0] * schedule.num_workers
    if schedule.has_communication:
        for worker, start, end, num_bytes in _buffers(schedule, timeline, sizes):
            changes[worker][start][1] += num_bytes
            changes[worker][end][1] -= num_bytes
        for worker, start, end, num_bytes in _dropped(schedule, timeline, sizes, handed):
            changes[worker][start][0] -= num_bytes
            changes[worker][end][0] += num_bytes
    else:
        waiting = two_messages(schedule, sizes)
    return [_summed(change, two) for change, two in zip(changes, waiting, strict=True)]


def _summed(changes: Mapping[Seconds, Sequence[int]], messages: Bytes) -> Moving:
    """The bytes that a worker holds after each change: the sums of all changes up to it.

    `changes`: time -> bytes that are added then to [activations, messages]. `messages`: bytes that are there all the
    time.
    """
    times = sorted(changes)
    # One sum more than there are changes: before the first change, at minus infinity.
    sums = accumulate(((changes[time][0], changes[time][1]) for time in times), _added, initial=(0, messages))
    return Moving((float("-inf"), *times), tuple(sums))


def _added(held: tuple[Bytes, Bytes], change: tuple[Bytes, Bytes]) -> tuple[Bytes, Bytes]:
    return held[0] + change[0], held[1] + change[1]


def two_messages(schedule: Schedule, sizes: Mapping[str, Bytes]) -> list[Bytes]:
    """The bytes of two messages of the largest size between trained stages for each worker, by worker.

    `sizes`: tensor -> bytes of one sample.
    """
    placement = schedule.placement
    forward: dict[int, Bytes] = defaultdict(int)
    backward: dict[int, Bytes] = defaultdict(int)
    for pipeline in placement.pipelines:
        for edge in pipeline.edges:
            source, destination = placement.stages[edge.producer], placement.stages[edge.consumer]
            # Frozen outputs lie in rows of the batch, which `timing.memory` counts for the whole iteration.
            if source.worker == destination.worker or placement.is_frozen(edge.producer):
                continue
            size = max(pipeline.microbatches)
            samples = len(source.share.samples(size).intersection(destination.share.samples(size)))
            forward[destination.worker] += samples * sum(sizes.get(name, 0) for name in edge.tensors)
            backward[source.worker] += samples * sum(sizes.get(name, 0) for name in edge.gradients)
    return [2 * max(forward[worker], backward[worker]) for worker in range(schedule.num_workers)]


def _buffers(
    schedule: Schedule, timeline: Timeline, sizes: Mapping[str, Bytes]
) -> Iterator[tuple[int, Seconds, Seconds, Bytes]]:
    """(worker, start, end, bytes) of each message buffer and of each gradient that a backward has made.

    A buffer is taken when its receive is posted, and ends when its reader starts. A gradient is there until it has been
    read by stages on its worker, and sent. An activation counts among the activations, at its sender and from its
    reader's start on; a frozen output among the frozen outputs.
    """
    placement, makespan = schedule.placement, timeline.makespan
    spans: dict[Action, Span] = {span.action: span for span in timeline.spans}
    waits, posted = waits_of(schedule), _posted(schedule, spans)
    drops = drops_of(schedule, waits)  # [2]
    handed_on = {}  # (stage, micro-batch) -> when the worker's last reader of its gradients starts
    for stage, microbatch, num_bytes, op, readers in _handed_on(schedule, sizes):
        made = spans[Action(stage=stage, op=op, microbatch=microbatch)]
        end = max(spans[Action(stage=reader, op=op, microbatch=microbatch)].start for reader in readers)
        handed_on[stage, microbatch] = end
        yield made.worker, made.end, end, num_bytes
    for reader, slots in waits.items():
        start, worker = spans[reader].start, spans[reader].worker
        for slot in slots:
            message = schedule.messages[slot]
            if placement.is_frozen(message.source):
                continue
            num_bytes = len(message.samples) * sum(sizes.get(name, 0) for name in message.tensors)
            yield worker, posted[slot], start, num_bytes
            if message.is_gradient:
                producer = spans[Action(stage=message.source, op=reader.op, microbatch=message.microbatch)]
                # Until its last reader on this worker starts, the gradient is already counted as handed on.
                since = max(producer.end, handed_on.get((message.source, message.microbatch), producer.end))
                end = spans[drops[slot]].start if slot in drops else makespan
                yield producer.worker, since, max(end, since), num_bytes  # `max`: it may be dropped before that


def _handed_on(schedule: Schedule, sizes: Mapping[str, Bytes]) -> Iterator[tuple[int, int, Bytes, Op, tuple[int, ...]]]:
    """(stage, micro-batch, bytes, backward op, readers): gradients of inputs that stages on the same worker read.

    The bytes count all gradients of the stage's inputs; readers are stages that read some of them. A skip
    between two stages of a worker has such gradients. The executor drops what a backward has made as a whole, so
    gradients that are sent stay as long [4].
    """
    placement = schedule.placement
    for pipeline in placement.pipelines:
        op = backward_op(pipeline)
        # Without a backward nothing is handed on.
        if op is None:
            continue
        for stage in pipeline.stages:
            worker = placement.stages[stage].worker
            edges = [edge for edge in pipeline.edges if edge.consumer == stage and edge.gradients]
            readers = tuple(edge.producer for edge in edges if placement.stages[edge.producer].worker == worker)
            if readers:
                num_bytes = sum(sizes.get(name, 0) for name in {name for edge in edges for name in edge.gradients})
                for microbatch in pipeline.numbers:
                    yield stage, microbatch, len(placement.samples(stage, microbatch)) * num_bytes, op, readers


def _dropped(
    schedule: Schedule, timeline: Timeline, sizes: Mapping[str, Bytes], handed: Mapping[int, Collection[str]]
) -> Iterator[tuple[int, Seconds, Seconds, Bytes]]:
    """(worker, start, end, bytes) of activations that are dropped at `start`, before the others go at `end` [3].

    The others go with the backward of the micro-batch. `handed` as in `moving_through`.
    """
    placement = schedule.placement
    spans: dict[Action, Span] = {span.action: span for span in timeline.spans}
    drops = drops_of(schedule, waits_of(schedule))
    sends: dict[tuple[int, int, str], list[int]] = defaultdict(list)
    for slot, message in enumerate(schedule.messages):
        if not message.is_gradient:
            for name in handed.get(message.source, ()):
                if name in message.tensors:
                    sends[message.source, message.microbatch, name].append(slot)
    for (stage, microbatch, name), slots in sends.items():
        op = backward_op(placement.pipeline_of(stage))
        # One receiver without news is enough: the tensor stays until the backward, with the others.
        if op is None or any(slot not in drops for slot in slots):
            continue
        span = spans[Action(stage=stage, op=op, microbatch=microbatch)]
        start = max(spans[drops[slot]].start for slot in slots)  # the last of its receivers decides
        end = span.end if op is Op.B else span.start  # what I leaves for W is there from its start on
        if start < end:
            yield span.worker, start, end, len(placement.samples(stage, microbatch)) * sizes.get(name, 0)


def _posted(schedule: Schedule, spans: Mapping[Action, Span]) -> dict[int, Seconds]:
    """Number of a message -> the time at which its receive is posted: after all computes before it in the order."""
    posted = {}
    for order in schedule.orders:
        reached: Seconds = 0.0
        for action in order:
            if action.op in (Op.RECV_F, Op.RECV_B) and action.slot is not None:
                posted[action.slot] = reached  # [1]
            elif action.op in TIMED_OPS:
                reached = spans[action].end
    return posted
