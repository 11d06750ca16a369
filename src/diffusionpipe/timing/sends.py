"""When a send is over, as its sender can tell without asking: the one rule for the executor and for the memory model.

A sender keeps a tensor until its receiver has waited for it. It cannot ask: gloo does not say whether a send has ended.
But it has the receiver's order. An action waits for the messages that it reads [1]. The next message that the receiver
sends to the sender after that wait, and for which an action waits there, brings the news with it [2]. The sender drops
the tensor in front of that action [3], or at the end of the iteration, where no such message comes. A sender waits for
the end of a send before it drops the tensor. So the rule frees nothing that is still read: it only says when this wait
is short, and cannot be for something that waits for the sender.

    worker 0   0F0  s0   0F1  s1            r2   0B0   r3   0B1        s0 is over in front of 0B0, which waits for 2
    worker 1        r0   1F0  r1  1B0  s2   1F1  1B1   s3              s1 in front of 0B1; s2 and s3 at the end

>>> from diffusionpipe.ir import Edge
>>> from diffusionpipe.passes import communicate, connect_blocks
>>> from diffusionpipe.schedules import one_f_one_b
>>> from diffusionpipe.simulator import simulate, uniform_costs
>>> silent = connect_blocks(one_f_one_b(2, 2), [Edge(producer=0, consumer=1, tensors=("x",), gradients=("x",))])
>>> schedule = communicate(silent, simulate(silent, uniform_costs(silent)))
>>> for order in schedule.orders:
...     print(*order)
0F0 0SEND_F0>0 0F1 0SEND_F1>1 0RECV_B0>2 0B0 0RECV_B1>3 0B1
1RECV_F0>0 1F0 1RECV_F1>1 1B0 1SEND_B0>2 1F1 1B1 1SEND_B1>3
>>> waits = waits_of(schedule)
>>> {slot: str(action) for slot, action in drops_of(schedule, waits).items()}
{0: '0B0', 1: '0B1'}
>>> {str(action): over for action, over in releases_of(schedule).items()}
{'0B0': (0,), '0B1': (1,)}

Without a flush the news may be of another batch [4]. In a window of these workers, message 0 of a batch leaves after
0B0 of the batch before, so it tells worker 1 that message 2 of the batch before has been received. A message without
news is dropped at the end of the window after the window of its batch.

>>> from diffusionpipe.planner.assembly.windows import communicate_window, overlap
>>> window = communicate_window(connect_blocks(overlap(2, 2), silent.placement.pipelines[0].edges))
>>> for order in window.orders:
...     print(*order)
0F1 0SEND_F1>1 0RECV_B0>2 0B0 0ENCODE#0+1 0F0+1 0SEND_F0>0+1 0RECV_B1>3 0B1 0STEP
1F0 1RECV_F1>1 1B0 1SEND_B0>2 1F1 1ENCODE#0+1 1RECV_F0>0+1 1B1 1SEND_B1>3 1STEP
>>> {str(action): over for action, over in window_releases_of(window).items()}
{'0B0': ((0, 0),), '0B1': ((1, 0),), '1F0': ((2, -1),), '1F1': ((3, -1),)}
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from diffusionpipe.ir import MESSAGE_OPS, SEND_OPS, Action, Op, Schedule, Timeline
from diffusionpipe.ir.flows import backward_op, frozen_flows, slots_of_encoder
from diffusionpipe.ir.own_schedules import own_schedules
from diffusionpipe.ir.unroll import occurrences, unroll
from diffusionpipe.ir.versions import batches_held

Waits = Mapping[Action, Sequence[int]]
"""Action -> the numbers of the messages that it waits for, ascending."""


def waits_of(schedule: Schedule) -> Waits:
    """Action -> indices of the messages that it waits for, ascending; actions that wait for none are left out.

    No action waits for frozen outputs of the next batch.
    """
    placement, found = schedule.placement, defaultdict[Action, list[int]](list)
    for slot, message in enumerate(schedule.messages):
        if not placement.is_frozen(message.source):
            op = backward_op(placement.pipeline_of(message.source)) if message.is_gradient else Op.F
            assert op is not None, message
            found[Action(stage=message.destination, op=op, microbatch=message.microbatch)].append(slot)
    of_encoder = slots_of_encoder(schedule)
    for flow in frozen_flows(schedule):
        slots = () if flow.is_ahead else of_encoder.get((flow.source, placement.stages[flow.destination].worker), ())
        if reading := [s for s in slots if schedule.messages[s].samples.overlaps(flow.samples)]:
            found[flow.consumer] = sorted({*found[flow.consumer], *reading})
    return found


def waits_of_step(timeline: Timeline, schedule: Schedule) -> Waits:
    """Action -> numbers of the messages that it waits for, in a timeline whose copies may have schedules of their own.

    `schedule`: the plan's, which all copies ran where the timeline has none.
    Messages are numbered as `ir.own_schedules.in_one_table` does; an action has the messages of all copies.
    """
    if not timeline.schedules:
        return waits_of(schedule)
    found = defaultdict[Action, list[int]](list)
    for own in own_schedules(timeline, schedule):
        for action, slots in waits_of(own.schedule).items():
            found[action] += [own.message + slot for slot in slots]
    return found


def releases_of(schedule: Schedule) -> dict[Action, tuple[int, ...]]:
    """Action -> indices of the messages whose tensors its worker drops before it."""
    found = defaultdict[Action, list[int]](list)
    for sent, action in drops_of(schedule, waits_of(schedule)).items():
        found[action].append(sent)
    return {action: tuple(over) for action, over in found.items()}


def window_releases_of(window: Schedule) -> dict[Action, tuple[tuple[int, int], ...]]:
    """Action of a window -> (message, its batch less the action's batch) of each message that is dropped before it.

    A batch that does not exist, after a flush or before a start, has sent nothing. The orders of the other batches are
    the window's without its actions, so news here is news there.
    """
    lead, count = batches_held(window) - 2, len(window.messages)
    middle = lead + 2  # all batches that bear on this window of the unrolled schedule exist
    batches = middle + lead + 2
    unrolled = unroll(window, batches)
    releases, frozen = releases_of(unrolled), window.placement.is_frozen
    found = {}
    for worker, order in enumerate(window.orders):
        for number, place, action in occurrences(window, worker, batches):
            if number != middle or action not in releases:
                continue
            over = []
            for batch, sent in (divmod(slot, count) for slot in releases[action]):
                # Another batch may have taken the place of one before these: it has been waited for then.
                if batch - number >= (0 if frozen(window.messages[sent].source) else -1):
                    over.append((sent, batch - number - order[place].reading.lead))  # [4]
            if over:
                found[order[place]] = tuple(over)
    return found


def drops_of(schedule: Schedule, waits: Waits) -> dict[int, Action]:
    """Index of a message -> the action before which its sender drops its tensors; no entry: after the iteration.

    `waits`: the messages that each action waits for, by `waits_of`.
    """
    first, news = dict[int, Action](), dict[int, list[int]]()
    awaited = {slot for slots in waits.values() for slot in slots}
    for order in schedule.orders:
        over = defaultdict[int, list[int]](list)  # sender -> what has been waited for since the last message to it
        for action in order:
            if action.op in SEND_OPS and action.slot in awaited:
                receiver = _worker(schedule, schedule.messages[action.slot].destination)
                news[action.slot] = over.pop(receiver, [])  # [2]
            for slot in () if action.op in MESSAGE_OPS else waits.get(action, ()):  # [1]
                if slot not in first:  # rows of the frozen part may be waited for by several forwards
                    first[slot] = action
                    over[_worker(schedule, schedule.messages[slot].source)].append(slot)
    return {sent: first[slot] for slot, over in news.items() for sent in over}  # [3]


def _worker(schedule: Schedule, stage: int) -> int:
    return schedule.placement.stages[stage].worker
