"""Windows: one period of an order that repeats for ever, as data, and the finite schedules that they stand for.

In a **window** every action of one batch occurs once, but some belong to a later batch: they **lead**. No action waits
for the end of the batch, so there is no flush. With 3 stages and 2 micro-batches, 1F1B's window is

    worker 0   0F0+1 0B0  0F1+1 0B1  0STEP        0F0+1: the forward of micro-batch 0 of the next batch
    worker 1   1F1   1B0  1F0+1 1B1  1STEP
    worker 2   2F0   2B0  2F1   2B1  2STEP

`unroll` gives the schedule of a number of batches: as many windows one after the other, and before them those that only
begin batches [1]. Actions of batches that do not exist are left out [2]. So start-up and drain are derived.
Micro-batches count on from batch to batch. A window may encode a later batch in its fills: each batch of the unrolled
schedule has encoder stages of its own then, after all others [3]. Without fills an ENCODE of a window is the place at
which all workers together encode its batch, by a schedule of their own; an unrolled schedule has none.

>>> from diffusionpipe.ir.action import parse_action
>>> from diffusionpipe.schedules import one_f_one_b
>>> orders = ("0F0+1 0B0 0F1+1 0B1 0STEP", "1F1 1B0 1F0+1 1B1 1STEP", "2F0 2B0 2F1 2B1 2STEP")
>>> window = replace(one_f_one_b(3, 2), orders=tuple(tuple(map(parse_action, order.split())) for order in orders))
>>> for order in unroll(window, 2).orders:
...     print(*order)
0F0 0F1 0F2 0B0 0F3 0B1 0STEP 0B2 0B3 0STEP
1F0 1F1 1B0 1F2 1B1 1STEP 1F3 1B2 1B3 1STEP
2F0 2B0 2F1 2B1 2STEP 2F2 2B2 2F3 2B3 2STEP
>>> fold(window, unroll(window, 4), 4).orders == window.orders
True
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from diffusionpipe.ir.action import COMPUTE_OPS, PRESENT, Action, Op, Reading
from diffusionpipe.ir.placement import Edge, Pipeline
from diffusionpipe.ir.schedule import Fill, Message, Schedule


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The numbers in an unrolled schedule of a window's stages, micro-batches and samples, batch by batch."""

    window: Schedule
    first: int
    """The number of the first encoder stage; encoder stages come after all others."""

    @property
    def num_encoders(self) -> int:
        """The number of encoder stages that each batch has."""
        return len(self.window.placement.stages) - self.first

    def stage(self, stage: int, batch: int) -> int:
        """The unrolled schedule's stage for the window's stage and a batch; only encoder stages differ by batch."""
        return stage + batch * self.num_encoders if stage >= self.first else stage

    def microbatch(self, stage: int, microbatch: int, batch: int) -> int:
        """The number of a batch's micro-batch in the unrolled pipeline of the stage.

        The number of an encoder stage's micro-batch stays, as the frozen part has a pipeline for each batch.
        """
        if stage >= self.first:
            return microbatch
        return microbatch + batch * self.count(stage)

    def samples(self, batch: int) -> int:
        """The number of samples of all batches before this one."""
        return batch * self.window.placement.num_samples

    def count(self, stage: int) -> int:
        """The number of micro-batches that one batch has in the stage's pipeline."""
        return len(self.window.placement.pipeline_of(stage).microbatches)

    def origin(self, stage: int) -> tuple[int, int]:
        """(batch, the window's stage) of a stage of the unrolled schedule; the batch of a trained stage is 0."""
        if stage < self.first:
            return 0, stage
        batch, number = divmod(stage - self.first, self.num_encoders)
        return batch, self.first + number

    def pipelines(self, pipeline: Pipeline, batches: int) -> Iterator[Pipeline]:
        """The pipelines that one of the window's becomes in the unrolled schedule.

        A trained one becomes one with the micro-batches of all batches, a frozen one becomes one for each batch [3].
        """
        if Op.ENCODE not in pipeline.ops:
            frozen = [edge for edge in pipeline.edges if edge.producer >= self.first]
            later = (self._edge(edge, batch) for batch in range(1, batches) for edge in frozen)
            yield replace(pipeline, microbatches=pipeline.microbatches * batches, edges=(*pipeline.edges, *later))
            return
        for batch in range(batches):
            stages = tuple(self.stage(stage, batch) for stage in pipeline.stages)
            yield replace(pipeline, stages=stages, first_sample=self.samples(batch), is_ahead=False)

    def _edge(self, edge: Edge, batch: int) -> Edge:
        return replace(edge, producer=self.stage(edge.producer, batch))

    def message(self, message: Message, batch: int) -> Message:
        """The unrolled schedule's message of this batch for one of the window's."""
        is_frozen = message.source >= self.first
        return replace(
            message,
            source=self.stage(message.source, batch),
            microbatch=self.microbatch(message.source, message.microbatch, batch),
            samples=message.samples.shifted(self.samples(batch)) if is_frozen else message.samples,
        )

    def fill(self, fill: Fill, batch: int) -> Fill:
        """The unrolled schedule's fill of this batch for one of the window's."""
        return replace(fill, stage=self.stage(fill.stage, batch), samples=fill.samples.shifted(self.samples(batch)))

    def action(self, action: Action, batch: int) -> Action:
        """The unrolled schedule's action of this batch for one of the window's."""
        window, slot, microbatch = self.window, action.slot, action.microbatch
        source = action.stage
        # A message counts micro-batches in the pipeline of its sender, of which a RECV's own stage says nothing.
        if slot is not None and action.op is not Op.ENCODE:
            source = window.messages[slot].source
        count = len(window.fills if action.op is Op.ENCODE else window.messages)
        return replace(
            action,
            stage=self.stage(action.stage, batch),
            microbatch=None if microbatch is None else self.microbatch(source, microbatch, batch),
            slot=None if slot is None else slot + batch * count,
            reading=PRESENT,
        )


def _numbers_of(window: Schedule) -> _Numbers:
    encoders = [
        stage for pipeline in window.placement.pipelines if Op.ENCODE in pipeline.ops for stage in pipeline.stages
    ]
    first = min(encoders, default=len(window.placement.stages))
    assert sorted(encoders) == [*range(first, len(window.placement.stages))], "encoder stages stand behind all others"
    return _Numbers(window, first)


def unroll(window: Schedule, batches: int) -> Schedule:
    """The finite schedule that runs `batches` batches of a window one after the other.

    Its actions no longer say which version of the weights they read.
    """
    numbers, placement, every = _numbers_of(window), window.placement, range(batches)
    encoders = placement.stages[numbers.first :]
    pipelines = tuple(new for pipeline in placement.pipelines for new in numbers.pipelines(pipeline, batches))
    return replace(
        window,
        placement=replace(placement, stages=placement.stages + encoders * (batches - 1), pipelines=pipelines),
        orders=tuple(
            tuple(action for _, _, action in occurrences(window, worker, batches))
            for worker in range(len(window.orders))
        ),
        messages=tuple(numbers.message(message, batch) for batch in every for message in window.messages),
        fills=tuple(numbers.fill(fill, batch) for batch in every for fill in window.fills),
    )


def occurrences(window: Schedule, worker: int, batches: int) -> Iterator[tuple[int, int, Action]]:
    """(window's number, place in its order, action) of each action of a worker in `unroll(window, batches)`, in order.

    Windows before the first batch have negative numbers.
    """
    numbers = _numbers_of(window)
    for number in range(-window.lead, batches):  # [1]
        for place, action in enumerate(window.orders[worker]):
            batch = number + action.reading.lead
            if 0 <= batch < batches and (action.op is not Op.ENCODE or window.fills):  # [2]
                yield number, place, numbers.action(action, batch)


def fold(window: Schedule, unrolled: Schedule, batches: int) -> Schedule:
    """The window that repeats in the middle of `unrolled`, an unrolled schedule to which messages were added since.

    `window` is the window from which it was unrolled, into `batches` batches. That all its windows are equal is not
    checked here: the checker unrolls the result.
    """
    # Start-up and drain do not reach the window of the middle batch.
    numbers, middle = _numbers_of(window), batches // 2
    plain = [_plain(numbers, message) for message in unrolled.messages]
    messages = [message for batch, message in plain if batch == middle]
    number_of = {message: number for number, message in enumerate(messages)}

    def folded(action: Action) -> Action:
        slot, microbatch = action.slot, action.microbatch
        if action.op is Op.ENCODE and slot is not None:
            batch, slot = divmod(slot, len(window.fills) or 1)
            stage = numbers.origin(action.stage)[1]
            return replace(action, stage=stage, slot=slot, reading=Reading(lead=batch - middle))
        if microbatch is None:
            return action
        if slot is None:
            batch, microbatch = divmod(microbatch, numbers.count(action.stage))
        else:
            batch, message = plain[slot]
            slot, microbatch = number_of[message], message.microbatch
        reading = Reading(lead=max(batch - middle, 0))
        return replace(action, stage=numbers.origin(action.stage)[1], microbatch=microbatch, slot=slot, reading=reading)

    return replace(
        unrolled,
        placement=window.placement,
        orders=tuple(tuple(map(folded, _window_of(order, middle, batches))) for order in unrolled.orders),
        messages=tuple(messages),
        fills=window.fills,
    )


def _plain(numbers: _Numbers, message: Message) -> tuple[int, Message]:
    """The batch of a message of an unrolled schedule, and the window's message that it stands for."""
    batch, source = numbers.origin(message.source)
    if source >= numbers.first:
        return batch, replace(message, source=source, samples=message.samples.shifted(-numbers.samples(batch)))
    batch, microbatch = divmod(message.microbatch, numbers.count(source))
    return batch, replace(message, microbatch=microbatch)


def _window_of(order: tuple[Action, ...], number: int, batches: int) -> tuple[Action, ...]:
    """The actions of a worker's unrolled order that form the window of batch `number`, with its STEPs last.

    They begin with the first compute after the update of the batch before, and end before the first compute after the
    update of this batch.

    The message of the last gradient comes before the update.
    """
    steps = [place for place, action in enumerate(order) if action.op is Op.STEP]
    blocks = len(steps) // batches  # STEPs of one batch: one for each block of the worker
    # From the last STEP of the batch before to the last STEP of this one.
    start, stop = (_next_compute(order, steps[blocks * (number + i) - 1]) for i in (0, 1))
    window = order[start:stop]
    return tuple(sorted(window, key=lambda action: action.op is Op.STEP))  # stable: the rest keeps its order


def _next_compute(order: tuple[Action, ...], place: int) -> int:
    return next((i for i in range(place, len(order)) if order[i].op in COMPUTE_OPS), len(order))
