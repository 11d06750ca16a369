"""Windows: one period of an order that goes on for ever, as data, and the finite schedules that they stand for.

In a **window** every action of one batch stands once, but some belong to a later batch: they **lead**. No action waits
for the end of the batch, so there is no flush. With 3 stages and 2 micro-batches, 1F1B's window is

    worker 0   0F0+1 0B0  0F1+1 0B1  0STEP        0F0+1: the forward of micro-batch 0 of the next batch
    worker 1   1F1   1B0  1F0+1 1B1  1STEP
    worker 2   2F0   2B0  2F1   2B1  2STEP

`unroll` gives the schedule of a number of batches: as many windows one behind the other, and before them those that
only begin batches [1]. Actions of batches that do not exist are left out [2]. So start-up and drain are derived.
Micro-batches count on from batch to batch. An ENCODE of a window is the place at which all workers together encode its
batch, by a schedule of their own; an unrolled schedule has none.

>>> from diffusionpipe.ir.action import parse_action
>>> from diffusionpipe.schedules import one_f_one_b
>>> orders = ("0F0+1 0B0 0F1+1 0B1 0STEP", "1F1 1B0 1F0+1 1B1 1STEP", "2F0 2B0 2F1 2B1 2STEP")
>>> window = replace(one_f_one_b(3, 2), orders=tuple(tuple(map(parse_action, order.split())) for order in orders))
>>> for order in unroll(window, 2).orders:
...     print(*order)
0F0 0F1 0F2 0B0 0F3 0B1 0STEP 0B2 0B3 0STEP
1F0 1F1 1B0 1F2 1B1 1STEP 1F3 1B2 1B3 1STEP
2F0 2B0 2F1 2B1 2STEP 2F2 2B2 2F3 2B3 2STEP
>>> fold(unroll(window, 4), 4).orders == window.orders
True
"""

from collections.abc import Iterator
from dataclasses import replace

from diffusionpipe.ir.action import COMPUTE_OPS, PRESENT, Action, Op, Reading
from diffusionpipe.ir.placement import Range
from diffusionpipe.ir.schedule import Message, Schedule


def unroll(window: Schedule, batches: int) -> Schedule:
    """The finite schedule of so many batches; it reads no frozen outputs, and its actions say nothing of versions."""
    placement = window.placement
    pipelines = tuple(
        replace(pipeline, microbatches=pipeline.microbatches * batches) for pipeline in placement.pipelines
    )
    return replace(
        window,
        placement=replace(placement, pipelines=pipelines),
        orders=tuple(tuple(_unrolled(window, order, batches)) for order in window.orders),
        messages=tuple(
            replace(message, microbatch=message.microbatch + batch * _count(window, message.source))
            for batch in range(batches)
            for message in window.messages
        ),
    )


def _count(window: Schedule, stage: int) -> int:
    """The micro-batches of a batch in the stage's pipeline."""
    return len(window.placement.pipeline_of(stage).microbatches)


def _unrolled(window: Schedule, order: tuple[Action, ...], batches: int) -> Iterator[Action]:
    for number in range(-window.lead, batches):  # [1]
        for action in order:
            batch = number + action.reading.lead
            if 0 <= batch < batches and action.op is not Op.ENCODE:  # [2]
                yield _of_batch(window, action, batch)


def _of_batch(window: Schedule, action: Action, batch: int) -> Action:
    """An action of a window as one of an unrolled schedule."""
    microbatch, slot = action.microbatch, action.slot
    return replace(
        action,
        microbatch=None if microbatch is None else microbatch + batch * _count(window, action.stage),
        slot=None if slot is None else slot + batch * len(window.messages),
        reading=PRESENT,
    )


def fold(unrolled: Schedule, batches: int) -> Schedule:
    """The window that repeats in the middle of an unrolled schedule, whose messages may have been made since.

    Whether the windows do repeat, the checker sees: it unrolls
    the result.
    """
    middle, placement = batches // 2, unrolled.placement
    counts = [len(placement.pipeline_of(stage).microbatches) // batches for stage in range(len(placement.stages))]
    kept: dict[int, int] = {}
    messages: list[Message] = []
    number_of: dict[tuple[object, ...], int] = {}
    for message in unrolled.messages:
        batch, microbatch = divmod(message.microbatch, counts[message.source])
        if batch == middle:
            number_of[_key(message, microbatch)] = len(messages)
            messages.append(replace(message, microbatch=microbatch))
    for slot, message in enumerate(unrolled.messages):
        kept[slot] = number_of[_key(message, message.microbatch % counts[message.source])]

    def folded(action: Action) -> Action:
        if action.op is Op.ENCODE and action.slot is not None:
            return replace(action, slot=0, reading=Reading(lead=action.slot - middle))
        if action.microbatch is None:
            return action
        batch, microbatch = divmod(action.microbatch, counts[action.stage])
        slot = None if action.slot is None else kept[action.slot]
        return replace(action, microbatch=microbatch, slot=slot, reading=Reading(lead=max(batch - middle, 0)))

    return replace(
        unrolled,
        placement=replace(
            placement,
            pipelines=tuple(
                replace(p, microbatches=p.microbatches[: len(p.microbatches) // batches]) for p in placement.pipelines
            ),
        ),
        orders=tuple(tuple(map(folded, _window_of(order, middle, batches))) for order in unrolled.orders),
        messages=tuple(messages),
    )


def _key(message: Message, microbatch: int) -> tuple[object, ...]:
    samples: Range = message.samples
    return message.source, message.destination, microbatch, message.is_gradient, samples


def _window_of(order: tuple[Action, ...], number: int, batches: int) -> tuple[Action, ...]:
    """A worker's actions from the first compute behind the batch before to that behind this batch, its STEPs last.

    What the last gradient is sent with comes before the update.
    """
    steps = [place for place, action in enumerate(order) if action.op is Op.STEP]
    blocks = len(steps) // batches
    start, stop = (_next_compute(order, steps[blocks * (number + i) - 1]) for i in (0, 1))
    window = order[start:stop]
    return tuple(sorted(window, key=lambda action: action.op is Op.STEP))


def _next_compute(order: tuple[Action, ...], place: int) -> int:
    return next((i for i in range(place, len(order)) if order[i].op in COMPUTE_OPS), len(order))
