"""Finds out how long messages and gradient sums took, from the waits of ranks, and corrects links by that.

No rank records when a message arrives. But an action that waited began when the last of its messages was there [1], and
that message had its link for itself since it was sent, or since the one before it arrived [2]. A message for which no
rank waited took at most the time until its reader began [3].

    sender     0F0 s0 0F1 s1               s0 sent
    link           |---s0---|---s1---|     [2] begins when s0 has arrived
    receiver   ~~~~~~~~~~~~~1F0 .... 1F1   [1] 1F0 waited for s0 and begins when it arrives

Gradient sums run one after the other beside the compute, and a rank's iteration ends with the last of them.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from diffusionpipe.costs import AllReduce, Costs, Link, PairLink
from diffusionpipe.ir import COMPUTE_OPS, Action, Op, Plan, Span
from diffusionpipe.ir.flows import ends
from diffusionpipe.ir.recorded import Recorded
from diffusionpipe.planner.correction.observations import WAITED, spans_of_rank
from diffusionpipe.timing import START, Streams, machine_of
from diffusionpipe.timing.sends import waits_of
from diffusionpipe.timing.sequences import Sequences
from diffusionpipe.units import Bytes, Seconds

FEW_BYTES = 0.1
"""If less than this part of a message's time is for its bytes, its extra time counts as latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A message between two ranks: its bytes, its predicted time, and its measured time or a bound of it."""

    pair: tuple[int, int]
    """(rank that sends, rank that receives)."""
    num_bytes: Bytes
    predicted: Seconds
    seconds: Seconds
    """The measured time, or an upper bound of it."""
    is_bound: bool
    """Whether `seconds` is only an upper bound."""


def crossings(plan: Plan, recorded: Recorded, costs: Costs) -> list[Crossing]:
    """Each message of all groups whose time, or an upper bound of it, follows from the recording."""
    spans = {(span.worker, span.action): span for span in recorded.timeline.spans}
    begun = dict(_waits(recorded))
    found: list[Crossing] = []
    for group in range(plan.mesh.data_parallel):
        found += _of_group(plan, group, spans, begun, costs)
    return found


def _waits(recorded: Recorded) -> Iterator[tuple[tuple[int, Action], bool]]:
    """((rank, action), whether the rank had waited before it) for each recorded action."""
    for rank, spans in spans_of_rank(recorded).items():
        free = 0.0
        for span in spans:
            yield (rank, span.action), span.start - free > WAITED
            free = span.end


def _of_group(
    plan: Plan,
    group: int,
    spans: Mapping[tuple[int, Action], Span],
    has_waited: Mapping[tuple[int, Action], bool],
    costs: Costs,
) -> Iterator[Crossing]:
    schedule, stages = plan.train, plan.train.placement.stages
    sent: dict[int, Seconds] = {}
    prices: dict[int, tuple[Bytes, Seconds]] = {}
    pairs = [(stages[one.source].worker, stages[one.destination].worker) for one in schedule.messages]
    ranks_of = [(plan.mesh.rank(group, one), plan.mesh.rank(group, other)) for one, other in pairs]
    for slot, message in enumerate(schedule.messages):
        ranks = ranks_of[slot]
        both = [spans[rank, end] for rank, end in zip(ranks, ends(message, slot), strict=True) if (rank, end) in spans]
        if len(both) == len(ranks):
            # A message starts when both of its ends are posted.
            sent[slot] = max(span.start for span in both)
            num_bytes = len(message.samples) * sum(costs.tensor_bytes.get(name, 0) for name in message.tensors)
            prices[slot] = num_bytes, costs.link_between(*pairs[slot]).transfer(num_bytes)
    readers: dict[int, Seconds] = {}
    arrived: dict[int, Seconds] = {}
    for action, slots in waits_of(schedule).items():
        rank = plan.mesh.rank(group, stages[action.stage].worker)
        known = [slot for slot in slots if slot in sent]
        if known and (rank, action) in spans:
            start = spans[rank, action].start
            readers |= {slot: min(start, readers.get(slot, start)) for slot in known}
            if has_waited[rank, action]:
                # The last message by its prediction ended the wait; the first action that waited for it tells its
                # arrival.
                arrived.setdefault(max(known, key=lambda slot: sent[slot] + prices[slot][1]), start)  # [1]
    predicted = {slot: seconds for slot, (_, seconds) in prices.items()}
    seen = _Seen(sent=sent, arrived=arrived, readers=readers, predicted=predicted)
    machine = machine_of(Streams.DIRECTION)
    queues = [
        [(worker, machine(schedule, worker, end)) for worker, end in zip(pair, ends(message, slot), strict=True)]
        for slot, (pair, message) in enumerate(zip(pairs, schedule.messages, strict=True))
    ]
    for slot, (taken, is_bound) in _crossing_times(queues, seen).items():
        num_bytes, price = prices[slot]
        # A clock's error must not make a time negative.
        yield Crossing(
            pair=ranks_of[slot], num_bytes=num_bytes, predicted=price, seconds=max(taken, 1e-6), is_bound=is_bound
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """The times that ranks recorded around messages, by the number of the message."""

    sent: Mapping[int, Seconds]
    """The time at which both ends of a message were posted, by the message's number."""
    arrived: Mapping[int, Seconds]
    """The time at which a message was there, by its number; only messages for which an action waited."""
    readers: Mapping[int, Seconds]
    """The time at which the first reader of a message began, by the message's number."""
    predicted: Mapping[int, Seconds]
    """The predicted time of each message, by its number."""


def _crossing_times(queues: Sequence[Sequence[Hashable]], seen: _Seen) -> dict[int, tuple[Seconds, bool]]:
    """Message -> (its seconds, whether they are only an upper bound); messages without recorded times are left out.

    `queues`: for each message the two queues, at the sender and the receiver, in which messages follow each other.
    """
    found: dict[int, tuple[Seconds, bool]] = {}
    free: dict[Hashable, tuple[Seconds, bool]] = {}
    for slot in sorted(seen.sent, key=lambda one: (seen.sent[one], one)):
        sent = seen.sent[slot]
        before = [free.get(queue, (0.0, True)) for queue in queues[slot]]
        # The start on the link is known if the link was surely free when the message was sent, or since when it was.
        is_known = all(exact or end <= sent for end, exact in before)
        if slot in seen.arrived:
            if is_known:
                found[slot] = seen.arrived[slot] - max(sent, *(end for end, _ in before)), False  # [2]
            over = seen.arrived[slot], True
        elif slot in seen.readers:
            found[slot] = seen.readers[slot] - sent, True  # [3]
            over = seen.readers[slot], False
        else:  # read in the next iteration
            over = max(sent, *(end for end, _ in before)) + seen.predicted[slot], False
        # A later end counts, and at equal ends the one that is exact.
        for queue in queues[slot]:
            free[queue] = max(over, free.get(queue, over))
    return found


def corrected_link(link: Link, found: Sequence[Crossing]) -> Link:
    """The link with latency and bandwidth fitted to the measured times of these messages.

    The link stays as it is if there are only upper bounds and the link keeps to them.
    """
    seen = [one for one in found if not one.is_bound]
    if not seen:
        ratio = bounded_ratio(found)
        return replace(link, latency=link.latency * ratio, bandwidth=link.bandwidth / ratio)
    usual = usual_ratio(seen)
    points = [(float(one.num_bytes), usual * one.predicted) for one in seen]
    latency, rate = corrected_line(link.latency, link.bandwidth, points)
    return replace(link, latency=latency, bandwidth=rate)


def corrected_pair(pair: PairLink, own: Sequence[Crossing], others: Sequence[Crossing]) -> PairLink:
    """The link of two ranks, fitted to their own messages, or to messages of other pairs if they sent none.

    `others` are messages of the same kind, within nodes or between them. Only the ratio of measured to predicted times
    is taken from them, because their links have other figures.
    """
    link = Link(pair.latency, pair.bandwidth)
    if own:
        link = corrected_link(link, own)
    elif others:
        seen = [one for one in others if not one.is_bound]
        ratio = usual_ratio(seen) if seen else bounded_ratio(others)
        link = Link(link.latency * ratio, link.bandwidth / ratio)
    return replace(pair, latency=link.latency, bandwidth=link.bandwidth)


def usual_ratio(seen: Sequence[Crossing]) -> float:
    """The lower quartile of measured / predicted times: some messages wait for others that were not recorded."""
    ratios = sorted(one.seconds / one.predicted for one in seen)
    return ratios[len(ratios) // 4]


def bounded_ratio(found: Sequence[Crossing]) -> float:
    """The median of upper bound / predicted time of messages, but at most 1; 1 if there are no messages."""
    ratios = [one.seconds / one.predicted for one in found if one.predicted > 0]
    return min(1.0, median(ratios)) if ratios else 1.0


def corrected_line(latency: Seconds, rate: float, points: Sequence[tuple[float, Seconds]]) -> tuple[Seconds, float]:
    """(latency, bandwidth) of a line of time over bytes, moved so that it passes through the median of `points`.

    `points`: (bytes, measured seconds). The line before has `latency` and the bandwidth `rate`. Times below that line
    shorten both parts. Times above it lower the bandwidth or, if the bytes take little of the time, raise the latency.
    """
    predicted = [latency + num_bytes / rate for num_bytes, _ in points]
    ratio = median(seconds / one for (_, seconds), one in zip(points, predicted, strict=True))
    for_bytes = median(num_bytes / rate / one for (num_bytes, _), one in zip(points, predicted, strict=True))
    if ratio <= 1:
        return latency * ratio, rate / ratio
    if for_bytes < FEW_BYTES:
        return latency + median(seconds - one for (_, seconds), one in zip(points, predicted, strict=True)), rate
    return latency, rate / median((seconds - latency) * rate / num_bytes for num_bytes, seconds in points if num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSums:
    """The predicted times of the gradient sums of an iteration, and the ratio of the measured ones to them."""

    predicted: Seconds
    """Predicted time of all sums of a rank, on average over the ranks that waited for theirs."""
    count: float
    """The number of sums of a rank, on average over the ranks that waited for theirs."""
    ratio: float
    """Measured / predicted time; 1 if no rank waited for a sum."""


def sums_of(plan: Plan, recorded: Recorded, costs: Costs) -> GradientSums:
    """The predicted time and the number of the gradient sums for which ranks waited, and measured / predicted time.

    Only ranks count that waited for their sums at the end of the iteration.
    """
    spans, found, predicted, counts = spans_of_rank(recorded), [], [], []
    issued = _issued(plan, spans)
    for rank, own in spans.items():
        reduces = [span.action for span in own if span.action.op is Op.REDUCE_GRAD]
        prices = [costs.reduces[action.stage] if costs.reduces else 0.0 for action in reduces]
        computed = max((s.end for s in own if s.action.op in COMPUTE_OPS or s.action.op is Op.ENCODE), default=0.0)
        if sum(prices) > 0 and recorded.ends[rank] - computed > WAITED:
            group = plan.mesh.place(rank)[0]
            starts = [issued[_meeting(plan, action, group)] for action in reduces]
            found.append(_solved(starts, prices, recorded.ends[rank]))
            predicted.append(sum(prices))
            counts.append(sum(price > 0 for price in prices))
    if not found:
        return GradientSums(predicted=0.0, count=0.0, ratio=1.0)
    # A rank may wait at the end for messages too, so each of these is at least the sums' own.
    return GradientSums(predicted=fmean(predicted), count=fmean(counts), ratio=min(found))


def _meeting(plan: Plan, action: Action, group: int) -> tuple[int, int]:
    """A key of a gradient sum: (block, 0 if all groups sum it together, else the group)."""
    return plan.train.placement.stages[action.stage].weights, 0 if plan.mesh.data_parallel > 1 else group


def _issued(plan: Plan, spans: Mapping[int, Sequence[Span]]) -> dict[tuple[int, int], Seconds]:
    """Key of a gradient sum (`_meeting`) -> the second at which the last rank came to the sum."""
    found: dict[tuple[int, int], Seconds] = {}
    for rank, own in spans.items():
        for span in own:
            if span.action.op is Op.REDUCE_GRAD:
                key = _meeting(plan, span.action, plan.mesh.place(rank)[0])
                found[key] = max(span.start, found.get(key, 0.0))
    return found


def _solved(starts: Sequence[Seconds], prices: Sequence[Seconds], end: Seconds) -> float:
    """The factor of the prices with which sums that run one after the other end at `end`; at least 0.02.

    `starts`: the seconds from which each sum may run. `prices`: the predicted seconds of each.
    """

    # Rises with the factor, so bisection finds it.
    def last(factor: float) -> Seconds:
        sequences, over = Sequences(), START
        for index, (start, price) in enumerate(zip(starts, prices, strict=True)):
            over = sequences.add("sums", factor * price, behind=sequences.add(index, start))
        return sequences.ends()[over]

    low, high = 0.0, 1.0
    while last(high) < end and high < 1e4:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if last(middle) < end else (low, middle)
    return max(high, 0.02)


def corrected_sum(rate: AllReduce, sums: GradientSums) -> AllReduce:
    """The rate of gradient sums with which they take their measured time; extra time lowers the bandwidth."""
    for_bytes = sums.predicted - sums.count * rate.latency
    if sums.ratio <= 1 or for_bytes < FEW_BYTES * sums.predicted:
        return replace(rate, latency=rate.latency * sums.ratio, bandwidth=rate.bandwidth / sums.ratio)
    longer = sums.ratio * sums.predicted - sums.count * rate.latency
    return replace(rate, bandwidth=rate.bandwidth * for_bytes / longer)
