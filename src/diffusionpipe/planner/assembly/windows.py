"""Windows of the families that warm up with forwards and then alternate; all others are refused."""

from collections.abc import Sequence
from dataclasses import replace

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import MESSAGE_OPS, Action, Op, Schedule, Span, Timeline, compute_action
from diffusionpipe.ir.unroll import fold, occurrences, unroll
from diffusionpipe.passes import communicate, without_flush
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.units import Seconds


def overlap(num_workers: int, num_microbatches: int, family: str = "1f1b") -> Schedule:
    """The compute-only window of a family of schedules, with a chain of stages.

    Raises:
        ConfigError: there is no such family, or its orders do not alternate.
    """
    flushed = REGISTRY[family](num_workers, num_microbatches)
    return without_flush(flushed, forwards_ahead(family, num_workers))


def forwards_ahead(family: str, num_workers: int) -> tuple[int, ...]:
    """The number of forwards that each worker runs ahead of its backwards where there is no end, by worker.

    Raises:
        ConfigError: the family's orders are not warm-up, alternation and drain on one stage for each worker.
    """
    if num_workers < 2:
        raise ConfigError('versions need at least 2 stages: with one nothing is in flight; set versions = "flushed"')
    count = 4 * num_workers  # more than any family runs ahead
    found = []
    for order in REGISTRY[family](num_workers, count).orders:
        ops = [action.op for action in order]
        ahead = ops.index(Op.B) - 1 if Op.B in ops else 0
        usual = [Op.F] * ahead + [Op.F, Op.B] * (count - ahead) + [Op.B] * ahead
        if 2 * ahead >= count or ops != usual or len({action.stage for action in order}) > 1:
            raise ConfigError(
                f"the schedule {family!r} does not alternate forwards and backwards of one stage for each rank, so it "
                'has no window without a flush; use schedule = "1f1b", or versions = "flushed"'
            )
        found.append(ahead)
    return tuple(found)


def communicate_window(window: Schedule) -> Schedule:
    """The compute-only window, of which no versions are known yet, with explicit messages as `communicate` places them.

    It follows a timetable in which no worker ever waits, with a forward of 1 and a backward of 2: the backward of
    micro-batch k of stage s of p, counted over all batches, begins at 3 k + 2 (p - 1 - s), and the forward next to it
    ends then. So every window has the same times, but for its start. Fills come after the computes before them. A
    message leaves as soon as it is there: one that waited for room in a far reader would leave after its batch. But
    messages of encoders wait until the store that it goes to is free (`_rooms`).
    """
    batches = 2 * (window.lead + 2) + 2
    unrolled = unroll(window, batches)
    timetable = _timetable(window, unrolled, batches)
    everything = max(map(len, unrolled.orders))
    explicit = communicate(unrolled, timetable, lookahead=everything, rooms=_rooms(window, unrolled, batches))
    return fold(window, explicit if window.fills else _encoding(explicit, timetable, batches), batches)


def _rooms(window: Schedule, unrolled: Schedule, batches: int) -> dict[tuple[int, int], Action]:
    """(encoder stage, reading worker) -> the first compute of the reader's window in which it may receive a batch.

    That is the window in which the batch is encoded. In the one before, the store still holds another batch's rows.
    """
    rooms = {}
    count = window.num_microbatches()
    encoders = [stage for pipeline in window.placement.pipelines if pipeline.is_ahead for stage in pipeline.stages]
    for worker, order in enumerate(window.orders):
        first = next(action for action in order if action.op in (Op.F, Op.B))
        assert first.microbatch is not None
        for number in range(batches - window.lead):
            room = compute_action(first.stage, first.op, first.microbatch + (number + first.reading.lead) * count)
            for stage in encoders:
                rooms[stage + (number + window.lead) * len(encoders), worker] = room
    return rooms


def _encoding(explicit: Schedule, timetable: Timeline, batches: int) -> Schedule:
    """The window with an ENCODE for each batch on every worker: the place at which all workers encode it.

    In the one order of everything that `communicate` describes it comes right before the batch's first forward. So the
    messages of the encoding are in one order with all others.
    """
    ends = {span.action: span.end for span in timetable.spans}
    pipeline = explicit.placement.pipelines[0]
    first, count = pipeline.stages[0], len(pipeline.microbatches) // batches
    before = 0.5 / _unit(explicit)
    places = [ends[compute_action(first, Op.F, batch * count)] - before for batch in range(batches)]
    orders = []
    for order in explicit.orders:
        stage = next(action.stage for action in order if action.op is Op.F)
        merged: list[Action] = []
        batch = 0
        for action in order:
            reached = ends.get(_producer(explicit, action), 0)
            while batch < batches and reached > places[batch]:
                merged.append(Action(stage=stage, op=Op.ENCODE, slot=batch))
                batch += 1
            merged.append(action)
        orders.append(tuple(merged))
    return replace(explicit, orders=tuple(orders))


def _producer(schedule: Schedule, action: Action) -> Action:
    """The compute after which a message comes; of all else itself."""
    if action.op not in MESSAGE_OPS or action.slot is None:
        return action
    message = schedule.messages[action.slot]
    return compute_action(message.source, Op.B if message.is_gradient else Op.F, message.microbatch)


def _timetable(window: Schedule, unrolled: Schedule, batches: int) -> Timeline:
    """The times of a window's batches; each differs from all others, so that nothing is left to ties."""
    spans, length = list[Span](), 3 * window.num_microbatches()
    for worker, order in enumerate(window.orders):
        ends = _ends(window, order)
        for number, place, action in occurrences(window, worker, batches):
            if place in ends:
                spans.append(Span(worker=worker, action=action, start=0, end=ends[place] + length * number))
    earliest = min(span.end for span in spans) - 1
    return Timeline(
        num_workers=unrolled.num_workers,
        spans=tuple(replace(span, end=span.end - earliest) for span in spans),
        memory=(),
    )


def _ends(window: Schedule, order: Sequence[Action]) -> dict[int, Seconds]:
    """The ends of a worker's computes and fills in window 0, by their places in its order.

    Ends at one time differ by their stage, or by the number of the fill: replicas of a stage have its times.
    """
    placement, unit, num_fills = window.placement, _unit(window), len(window.fills)
    computes = [action for action in order if action.op in (Op.F, Op.B)]
    stages = placement.pipeline_of(computes[0].stage).stages
    number, blocks = stages.index(computes[0].stage), [*dict.fromkeys(placement.stages[s].weights for s in stages)]
    behind = len(blocks) - 1 - blocks.index(placement.stages[computes[0].stage].weights)
    ahead = _ahead(window, computes)
    ends, now = {}, 2 * behind - 1
    for place, action in enumerate(order):
        if action.op is Op.ENCODE and action.slot is not None:
            ends[place] = now + (1 + action.slot / (1 << num_fills.bit_length())) / 2
        elif action.op in (Op.F, Op.B) and action.microbatch is not None:
            is_forward = action.op is Op.F
            counted = action.microbatch + action.reading.lead * window.num_microbatches()
            now = 3 * (counted - ahead * is_forward) + 2 * behind + 2 * (not is_forward)
            ends[place] = now + (2 * (number if is_forward else len(stages) - 1 - number) + (not is_forward)) / unit
    return ends


def _ahead(window: Schedule, computes: Sequence[Action]) -> int:
    """The forwards that a worker runs ahead of its backwards: the first forward of a window belongs to this one."""
    first = next(action for action in computes if action.op is Op.F)
    assert first.microbatch is not None
    return first.microbatch + first.reading.lead * window.num_microbatches()


def _unit(schedule: Schedule) -> int:
    """The differences of times of computes in the timetable are multiples of one over this; it is a power of two."""
    return 1 << (4 * schedule.num_workers).bit_length()
