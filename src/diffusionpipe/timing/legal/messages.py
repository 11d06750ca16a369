"""The rules of explicit messages."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import inf

from diffusionpipe.ir.action import MESSAGE_OPS, SEND_OPS, Action, Op
from diffusionpipe.ir.flows import Flow, ends, serving
from diffusionpipe.ir.placement import Range
from diffusionpipe.ir.ranges import is_disjoint, is_within, merged
from diffusionpipe.ir.schedule import Message, Schedule


def message_problems(schedule: Schedule, flows: Sequence[Flow]) -> Iterator[str]:
    """One sentence for each send or receive without its other end, and each flow not carried exactly once."""
    yield from _pairing(schedule)
    yield from _carried(schedule, flows)


def _pairing(schedule: Schedule) -> Iterator[str]:
    stages = schedule.placement.stages
    sent, received = [0] * len(schedule.messages), [0] * len(schedule.messages)
    strangers: dict[Action, None] = {}
    for _, action in schedule.actions():
        if action.op in MESSAGE_OPS:
            assert action.slot is not None
            if not _is_end(action, schedule.messages[action.slot]):
                strangers[action] = None
            elif action.op in SEND_OPS:
                sent[action.slot] += 1
            else:
                received[action.slot] += 1
    for slot, message in enumerate(schedule.messages):
        if stages[message.source].worker == stages[message.destination].worker:
            yield f"message {slot} starts and ends on worker {stages[message.source].worker}; remove it"
        if sent[slot] != 1 or received[slot] != 1:
            for action, count in zip(ends(message, slot), (sent[slot], received[slot]), strict=True):
                if count != 1:
                    yield f"worker {stages[action.stage].worker}: {action} occurs {count} times, not once"
    for action in strangers:
        assert action.slot is not None
        send, recv = ends(schedule.messages[action.slot], action.slot)
        worker = stages[action.stage].worker
        yield f"worker {worker}: {action} is not an end of message {action.slot}, whose ends are {send} and {recv}"


def _is_end(action: Action, message: Message) -> bool:
    """Whether a send or receive with the number of this message is its SEND or its RECV, by stage and micro-batch."""
    is_gradient = action.op in (Op.SEND_B, Op.RECV_B)
    stage = message.source if action.op in SEND_OPS else message.destination
    return (action.stage, action.microbatch, is_gradient) == (stage, message.microbatch, message.is_gradient)


def _carried(schedule: Schedule, flows: Sequence[Flow]) -> Iterator[str]:
    """One sentence for each read whose tensors or samples do not arrive exactly once, and each unread message."""
    stages = schedule.placement.stages
    wanted: dict[tuple[object, ...], dict[str, list[Range]]] = defaultdict(lambda: defaultdict(list))
    readers: dict[tuple[object, ...], Action] = {}
    frozen = {s for p in schedule.placement.pipelines if Op.ENCODE in p.ops for s in p.stages}

    def key(source: int, destination: int, microbatch: int, is_gradient: bool) -> tuple[object, ...]:
        # A worker receives an encoder's output once for all its stages; everything else goes edge by edge.
        if source in frozen:
            return source, stages[destination].worker
        return source, destination, microbatch, is_gradient

    for flow in flows:
        if stages[flow.source].worker != stages[flow.destination].worker:
            group = key(flow.source, flow.destination, flow.microbatch, flow.is_gradient)
            readers.setdefault(group, flow.consumer)
            for name in flow.tensors:
                wanted[group][name].append(flow.samples)
    sent: dict[tuple[object, ...], list[tuple[int, Message]]] = defaultdict(list)
    for slot, message in enumerate(schedule.messages):
        sent[key(message.source, message.destination, message.microbatch, message.is_gradient)].append((slot, message))
    for group, tensors in wanted.items():
        worker = stages[readers[group].stage].worker
        where = f"worker {worker}: {readers[group]} reads from stage {group[0]}"
        yield from _exactly(where, tensors, [message for _, message in sent[group]])
    for group, messages in sent.items():
        if group not in wanted:
            for slot, message in messages:
                worker = stages[message.source].worker
                yield f"worker {worker}: message {slot} ({ends(message, slot)[0]}) has no reader"


def _exactly(where: str, tensors: Mapping[str, Sequence[Range]], messages: Sequence[Message]) -> Iterator[str]:
    is_usual = len(messages) == 1 and messages[0].tensors == tuple(tensors)
    if is_usual and all(ranges == [messages[0].samples] for ranges in tensors.values()):
        return  # one message brings what is read, and nothing else
    names = {name for message in messages for name in message.tensors}
    for name in sorted(names - tensors.keys()):
        yield f"{where} no {name!r}, but it is sent"
    # Stages of one worker may read different tensors of an encoder for different rows: each is sent for all of them.
    needed = [part for ranges in tensors.values() for part in ranges]
    for name, ranges in tensors.items():
        sent = [message.samples for message in messages if name in message.tensors]
        # Nothing twice, all that is read, and nothing that no action reads.
        if not (is_disjoint(sent) and is_within(ranges, sent) and is_within(sent, needed)):
            yield f"{where} samples {_text(merged(ranges))} of {name!r}, messages bring {_text(sent)}"


def _text(ranges: Sequence[Range]) -> str:
    return ", ".join(map(str, ranges)) or "none"


def timing_problems(schedule: Schedule, flows: Sequence[Flow], positions: Mapping[Action, int]) -> Iterator[str]:
    """One sentence for each send before its tensors are there, and each receive after the action that reads it.

    `positions`: action -> its index in its worker's order.
    """
    stages = schedule.placement.stages
    for index, slots in serving(schedule, flows).items():
        flow = flows[index]
        for slot in slots:
            send, recv = ends(schedule.messages[slot], slot)
            for producer in flow.producers:
                # The defaults never complain: an action that is missing is reported by the rules of completeness.
                if positions.get(send, inf) < positions.get(producer, -1):
                    yield f"worker {stages[flow.source].worker}: {send} comes before {producer}, which produces it"
            if not flow.is_ahead and positions.get(flow.consumer, inf) < positions.get(recv, -1):
                yield f"worker {stages[flow.destination].worker}: {recv} comes after {flow.consumer}, which reads it"


def channel_problems(schedule: Schedule) -> Iterator[str]:
    """One sentence for each pair of workers that send and receive their messages in different orders."""
    stages = schedule.placement.stages
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for _, action in schedule.actions():
        if action.op in MESSAGE_OPS:
            assert action.slot is not None
            message = schedule.messages[action.slot]
            channel = stages[message.source].worker, stages[message.destination].worker
            (sent if action.op in SEND_OPS else received)[channel].append(action)
    for channel in sorted(sent.keys() | received.keys()):
        # Unequal numbers of ends are reported already, by `_pairing`.
        for send, recv in zip(sent[channel], received[channel], strict=False):
            if send.slot != recv.slot:
                source, destination = channel
                yield f"worker {source} comes to {send} where worker {destination} comes to {recv}: the order differs"
                break
