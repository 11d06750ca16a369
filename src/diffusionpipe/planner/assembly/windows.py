"""Makes windows of schedule families that warm up with forwards and then alternate; all others are refused."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import MESSAGE_OPS, Action, Op, Schedule, Span, Timeline, compute_action
from diffusionpipe.ir.unroll import fold, occurrences, unroll
from diffusionpipe.passes import communicate, turn_of, without_flush
from diffusionpipe.schedules import generator_of
from diffusionpipe.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The turns by which every worker of a family alternates in a window: forwards, then as many backwards."""

    length: int
    """The forwards of a turn; its backwards are as many."""
    ahead: tuple[int, ...]
    """The number of micro-batches by which a worker's forwards run ahead of its backwards, by worker."""


def overlap(num_workers: int, num_microbatches: int, family: str = "1f1b") -> Schedule:
    """The compute-only window of a schedule family over a chain of stages: its order repeated without a flush.

    Raises:
        ConfigError: there is no such family, its orders do not alternate, or its turns do not divide the micro-batches.
    """
    turns = turns_of(family, num_workers, num_microbatches)
    return without_flush(generator_of(family)(num_workers, num_microbatches), turns.ahead, turns.length)


def turns_of(family: str, num_workers: int, num_microbatches: int) -> Turns:
    """The numbers of forwards and backwards by which a family's workers alternate at these sizes, read from its orders.

    Raises:
        ConfigError: there is no such family, fewer than 2 workers, its orders are not warm-up, alternation and drain on
            one stage for each worker, or its turns do not divide the micro-batches.
    """
    turns = _turns(family, num_workers, 4 * num_workers + 2 * num_microbatches)
    if num_microbatches % turns.length:
        raise ConfigError(
            f"the schedule {family!r} runs {turns.length} forwards and {turns.length} backwards in turn, without a "
            f"flush all of one batch, and {num_microbatches} micro-batches are not a multiple of {turns.length}; use "
            f"{-(-num_microbatches // turns.length) * turns.length}"
        )
    return turns


@lru_cache(maxsize=64)
def _turns(family: str, num_workers: int, count: int) -> Turns:
    """The turns of a family, read from orders of `count` micro-batches; a turn must be shorter than that.

    Raises:
        ConfigError: there is no such family, fewer than 2 workers, or its orders are not warm-up, alternation and drain
            on one stage for each worker.
    """
    if num_workers < 2:
        raise ConfigError('versions need at least 2 stages: with one nothing is in flight; set versions = "flushed"')
    # The last worker leads by nothing, so its first forwards are one turn.
    length = _leading_forwards(generator_of(family)(num_workers, count).orders[-1])
    found = []
    # Without a turn, one empty order, which is refused below.
    for order in generator_of(family)(num_workers, 4 * num_workers * length).orders if 0 < length < count else ((),):
        ops, num_turns = [action.op for action in order], 4 * num_workers
        lead = max(0, _leading_forwards(order) // (length or 1) - 1)
        forwards, backwards = [Op.F] * length, [Op.B] * length
        usual = forwards * lead + (forwards + backwards) * (num_turns - lead) + backwards * lead
        if not ops or 2 * lead >= num_turns or ops != usual or len({action.stage for action in order}) > 1:
            raise ConfigError(
                f"the schedule {family!r} does not alternate forwards and backwards of one stage for each rank, so it "
                'has no window without a flush; use schedule = "1f1b", or versions = "flushed"'
            )
        found.append(lead * length)
    return Turns(length=length, ahead=tuple(found))


def _leading_forwards(order: Sequence[Action]) -> int:
    """The number of forwards before the order's first other action; 0 if it has forwards alone."""
    return next((place for place, action in enumerate(order) if action.op is not Op.F), 0)


def communicate_window(window: Schedule) -> Schedule:
    """The window with explicit sends, receives and messages; `window` has none, and no versions.

    The messages follow a timetable in which no worker ever waits, with a forward of 1 and a backward of 2: the
    backwards of turn t of k micro-batches of stage s of p, counted over all batches, begin at 3 k t + 2 k (p - 1 - s),
    and the forwards next to them end then. So every window has the same times, but for its start. Fills come after the
    computes before them. A message leaves as soon as it is ready: one that waited for room in a far reader would leave
    after its batch. But messages of encoders wait until the store that they go to is free (`_rooms`).
    """
    # More windows on both sides of the middle one than any reading spans, so the middle one is like all others.
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
    """The unrolled window with an ENCODE for each batch in every worker's order, where all workers encode the batch.

    In the one order of everything that `communicate` describes it comes right before the batch's first forward. So the
    messages of the encoding are in one order with all others.
    """
    ends = {span.action: span.end for span in timetable.spans}
    pipeline = explicit.placement.pipelines[0]
    first, count = pipeline.stages[0], len(pipeline.microbatches) // batches
    # Half the least difference of two times: nothing else is between this place and the forward.
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
    """The compute that makes the tensors of a send or receive; for any other action the action itself."""
    if action.op not in MESSAGE_OPS or action.slot is None:
        return action
    message = schedule.messages[action.slot]
    return compute_action(message.source, Op.B if message.is_gradient else Op.F, message.microbatch)


def _timetable(window: Schedule, unrolled: Schedule, batches: int) -> Timeline:
    """The times of the computes and fills of all batches; no two are equal, so that the order of messages is unique."""
    spans, length = list[Span](), 3 * window.num_microbatches()
    for worker, order in enumerate(window.orders):
        ends = _ends(window, order)
        for number, place, action in occurrences(window, worker, batches):
            if place in ends:
                spans.append(Span(worker=worker, action=action, start=0, end=ends[place] + length * number))
    # So that the first end is at 1: times of a timeline are not negative.
    earliest = min(span.end for span in spans) - 1
    return Timeline(
        num_workers=unrolled.num_workers,
        spans=tuple(replace(span, end=span.end - earliest) for span in spans),
        memory=(),
    )


def _ends(window: Schedule, order: Sequence[Action]) -> dict[int, Seconds]:
    """Index in a worker's order -> the time at which that compute or fill ends in window 0.

    Ends at one time differ by their stage, or by the number of the fill: replicas of a stage have its times.
    """
    placement, unit, num_fills = window.placement, _unit(window), len(window.fills)
    computes = [action for action in order if action.op in (Op.F, Op.B)]
    stages = placement.pipeline_of(computes[0].stage).stages
    number, blocks = stages.index(computes[0].stage), [*dict.fromkeys(placement.stages[s].weights for s in stages)]
    behind = len(blocks) - 1 - blocks.index(placement.stages[computes[0].stage].weights)
    ahead, turn = _ahead(window, computes), turn_of(window)
    ends, now = {}, 2 * turn * behind - 1
    for place, action in enumerate(order):
        if action.op is Op.ENCODE and action.slot is not None:
            # After the compute before it, by less than the least distance of computes, in the order of the fills'
            # numbers.
            ends[place] = now + (1 + action.slot / (1 << num_fills.bit_length())) / 2
        elif action.op in (Op.F, Op.B) and action.microbatch is not None:
            is_forward = action.op is Op.F
            counted = action.microbatch + action.reading.lead * window.num_microbatches()
            number_of_turn, place_in_turn = divmod(counted - ahead * is_forward, turn)
            between = turn * (3 * number_of_turn + 2 * behind)  # the turn's last forward ends and its backwards begin
            now = between - (turn - 1 - place_in_turn) if is_forward else between + 2 * (place_in_turn + 1)
            # Forwards at even places, backwards at odd ones, so that no two computes of all stages end at one time.
            ends[place] = now + (2 * (number if is_forward else len(stages) - 1 - number) + (not is_forward)) / unit
    return ends


def _ahead(window: Schedule, computes: Sequence[Action]) -> int:
    """The number of micro-batches by which a worker's forwards run ahead, read from its first forward in the window."""
    first = next(action for action in computes if action.op is Op.F)
    assert first.microbatch is not None
    return first.microbatch + first.reading.lead * window.num_microbatches()


def _unit(schedule: Schedule) -> int:
    """The number u, a power of two: times of computes in the timetable differ by multiples of 1/u."""
    return 1 << (4 * schedule.num_workers).bit_length()
