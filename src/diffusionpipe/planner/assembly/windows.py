"""Windows of the families that warm up with forwards and then alternate; all others are refused."""

from dataclasses import replace

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import MESSAGE_OPS, Action, Op, Schedule, Span, Timeline, compute_action
from diffusionpipe.ir.unroll import fold, unroll
from diffusionpipe.passes import communicate, without_flush
from diffusionpipe.schedules import REGISTRY


def overlap(num_workers: int, num_microbatches: int, family: str = "1f1b") -> Schedule:
    """The compute-only window of a family of schedules, with a chain of stages.

    Raises:
        ConfigError: there is no such family, or its orders do not alternate.
    """
    flushed = REGISTRY[family](num_workers, num_microbatches)
    return without_flush(flushed, forwards_ahead(family, num_workers))


def forwards_ahead(family: str, num_workers: int) -> tuple[int, ...]:
    """For each worker the forwards that it runs ahead of its backwards where there is no end.

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
    ends then. So every window has the same times, but for its start. A message leaves as soon as it is there: one that
    waited for room in a far reader would leave after its batch.
    """
    batches = 2 * (window.lead + 2) + 2
    unrolled = unroll(window, batches)
    timetable = _timetable(unrolled)
    explicit = communicate(unrolled, timetable, lookahead=8 * window.num_workers)
    return fold(_encoding(explicit, timetable, batches), batches)


def _encoding(explicit: Schedule, timetable: Timeline, batches: int) -> Schedule:
    """With an ENCODE for each batch on every worker: the place at which all workers encode it.

    In the one order of everything that `communicate` describes it stands right before the batch's first forward. So the
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
    """The compute that a message stands behind; of all else itself."""
    if action.op not in MESSAGE_OPS or action.slot is None:
        return action
    message = schedule.messages[action.slot]
    return compute_action(message.source, Op.B if message.is_gradient else Op.F, message.microbatch)


def _timetable(unrolled: Schedule) -> Timeline:
    """The times of a window's batches; each differs from all others by its stage, so that nothing is left to ties.

    Replicas of a stage have its times.
    """
    spans, unit, stages = [], _unit(unrolled), unrolled.placement.stages
    for worker, order in enumerate(unrolled.orders):
        computes = [action for action in order if action.op in (Op.F, Op.B)]
        ahead = [action.op for action in computes].index(Op.B) - 1
        numbers = unrolled.placement.pipeline_of(computes[0].stage).stages
        place = numbers.index(computes[0].stage)
        blocks = [*dict.fromkeys(stages[stage].weights for stage in numbers)]
        behind = len(blocks) - 1 - blocks.index(stages[computes[0].stage].weights)
        for action in computes:
            assert action.microbatch is not None
            is_forward = action.op is Op.F
            end = 3 * (action.microbatch - ahead * is_forward) + 2 * behind + 2 * (not is_forward)
            distinct = (2 * (place if is_forward else len(numbers) - 1 - place) + (not is_forward)) / unit
            spans.append(Span(worker=worker, action=action, start=0, end=end + distinct))
    earliest = min(span.end for span in spans) - 1
    return Timeline(
        num_workers=unrolled.num_workers,
        spans=tuple(replace(span, end=span.end - earliest) for span in spans),
        memory=(),
    )


def _unit(unrolled: Schedule) -> int:
    """The differences of times in the timetable are multiples of one over this; it is a power of two."""
    return 1 << (4 * unrolled.num_workers).bit_length()
