"""How long messages and gradient sums took, from what ranks waited for them.

Nobody records when a message arrives. But an action that waited began when the last of its messages was there [1], and
that message had its link for itself since it was sent, or since the one before it arrived [2]. A message for which
nobody waited took at most the time until its reader began [3].

    sender     0F0 s0 0F1 s1               s0 sent
    link           |---s0---|---s1---|     [2] begins when s0 has arrived
    receiver   ~~~~~~~~~~~~~1F0 .... 1F1   [1] 1F0 waited for s0 and begins when it arrives

Gradient sums run one after the other beside the compute, and a rank's iteration ends with the last of them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from diffusionpipe.costs import AllReduce, Costs, Link
from diffusionpipe.ir import COMPUTE_OPS, Action, Op, Plan, Span
from diffusionpipe.ir.flows import ends
from diffusionpipe.ir.recorded import Recorded
from diffusionpipe.planner.correction.observations import WAITED, spans_of_rank
from diffusionpipe.timing.sends import waits_of
from diffusionpipe.units import Bytes, Seconds

FEW_BYTES = 0.1
"""A message of whose time less than this part is for its bytes speaks of the latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A message of one pipeline between two workers."""

    pair: tuple[int, int]
    num_bytes: Bytes
    predicted: Seconds
    seconds: Seconds
    is_bound: bool
    """Whether it took at most `seconds`."""


def crossings(plan: Plan, recorded: Recorded, costs: Costs) -> list[Crossing]:
    """Every message of which something is known."""
    spans = {(span.worker, span.action): span for span in recorded.timeline.spans}
    begun = dict(_waits(recorded))
    found: list[Crossing] = []
    for group in range(plan.mesh.data_parallel):
        found += _of_group(plan, group, spans, begun, costs)
    return found


def _waits(recorded: Recorded) -> Iterator[tuple[tuple[int, Action], bool]]:
    """Whether a rank had waited before an action."""
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
    of_pair: dict[tuple[int, int], list[int]] = defaultdict(list)
    for slot, message in enumerate(schedule.messages):
        pair = stages[message.source].worker, stages[message.destination].worker
        rank_of = [plan.mesh.rank(group, worker) for worker in pair]
        both = [spans.get((rank, end)) for rank, end in zip(rank_of, ends(message, slot), strict=True)]
        if any(span is None for span in both):
            continue
        sent[slot] = max(span.start for span in both if span is not None)
        num_bytes = len(message.samples) * sum(costs.tensor_bytes.get(name, 0) for name in message.tensors)
        prices[slot] = num_bytes, costs.link_between(*pair).transfer(num_bytes)
        of_pair[pair].append(slot)
    readers: dict[int, Seconds] = {}
    arrived: dict[int, Seconds] = {}
    for action, slots in waits_of(schedule).items():
        rank = plan.mesh.rank(group, stages[action.stage].worker)
        known = [slot for slot in slots if slot in sent]
        if not known or (rank, action) not in spans:
            continue
        start = spans[rank, action].start
        for slot in known:
            readers[slot] = min(start, readers.get(slot, start))
        if has_waited[rank, action]:
            arrived.setdefault(max(known, key=lambda slot: sent[slot] + prices[slot][1]), start)  # [1]
    for pair, of_link in of_pair.items():
        yield from _of_link(pair, of_link, sent, arrived, readers, prices)


def _of_link(
    pair: tuple[int, int],
    slots: Sequence[int],
    sent: Mapping[int, Seconds],
    arrived: Mapping[int, Seconds],
    readers: Mapping[int, Seconds],
    prices: Mapping[int, tuple[Bytes, Seconds]],
) -> Iterator[Crossing]:
    free: Seconds | None = 0.0
    for slot in sorted(slots, key=lambda one: (sent[one], one)):
        if free is not None and slot in arrived:
            yield _crossing(pair, prices[slot], arrived[slot] - max(sent[slot], free))  # [2]
        elif slot in readers and slot not in arrived:
            yield _crossing(pair, prices[slot], readers[slot] - sent[slot], is_bound=True)  # [3]
        over = arrived.get(slot, readers.get(slot))
        later = [sent[one] for one in slots if sent[one] > sent[slot]]
        is_over = over is not None and (slot in arrived or not later or over <= min(later))
        free = over if is_over else None


def _crossing(
    pair: tuple[int, int], priced: tuple[Bytes, Seconds], seconds: Seconds, *, is_bound: bool = False
) -> Crossing:
    num_bytes, predicted = priced
    return Crossing(pair=pair, num_bytes=num_bytes, predicted=predicted, seconds=max(seconds, 1e-6), is_bound=is_bound)


def corrected_link(link: Link, found: Sequence[Crossing]) -> Link:
    """The link on which these messages take what they took, in the median; it stays where nothing contradicts it."""
    seen = [one for one in found if not one.is_bound]
    if not seen:
        ratios = [one.seconds / one.predicted for one in found if one.predicted > 0]
        ratio = min(1.0, median(ratios)) if ratios else 1.0
        return replace(link, latency=link.latency * ratio, bandwidth=link.bandwidth / ratio)
    latency, rate = corrected_line(link.latency, link.bandwidth, [(float(one.num_bytes), one.seconds) for one in seen])
    return replace(link, latency=latency, bandwidth=rate)


def corrected_line(latency: Seconds, rate: float, points: Sequence[tuple[float, Seconds]]) -> tuple[Seconds, float]:
    """Latency and bandwidth of a line that passes the (bytes, seconds) in the median.

    What is too short shortens both. What is too long lies with the bytes, or where there are few with the latency.
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
class Sums:
    """What the gradient sums of an iteration took."""

    predicted: Seconds
    """All sums of a rank, on average over the ranks that waited for theirs,"""
    count: float
    """and how many these are."""
    ratio: float
    """Measured over predicted; 1 where no rank waited for a sum."""


def sums_of(plan: Plan, recorded: Recorded, costs: Costs) -> Sums:
    """How much longer than predicted the sums took that ranks waited for at the end."""
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
        return Sums(predicted=0.0, count=0.0, ratio=1.0)
    return Sums(predicted=fmean(predicted), count=fmean(counts), ratio=median(found))


def _meeting(plan: Plan, action: Action, group: int) -> tuple[int, int]:
    """What is summed: a block, by all groups together."""
    return plan.train.placement.stages[action.stage].weights, 0 if plan.mesh.data_parallel > 1 else group


def _issued(plan: Plan, spans: Mapping[int, Sequence[Span]]) -> dict[tuple[int, int], Seconds]:
    """When the last rank came to each sum."""
    found: dict[tuple[int, int], Seconds] = {}
    for rank, own in spans.items():
        for span in own:
            if span.action.op is Op.REDUCE_GRAD:
                key = _meeting(plan, span.action, plan.mesh.place(rank)[0])
                found[key] = max(span.start, found.get(key, 0.0))
    return found


def _solved(starts: Sequence[Seconds], prices: Sequence[Seconds], end: Seconds) -> float:
    """The factor with which sums of these prices, one after the other, end then."""

    def last(factor: float) -> Seconds:
        free = 0.0
        for start, price in zip(starts, prices, strict=True):
            free = max(free, start) + factor * price
        return free

    low, high = 0.0, 1.0
    while last(high) < end and high < 1e4:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if last(middle) < end else (low, middle)
    return max(high, 0.02)


def corrected_sum(rate: AllReduce, sums: Sums) -> AllReduce:
    """The rate with which sums take what they took; what is too long lies with the bytes, as in `corrected_line`."""
    for_bytes = sums.predicted - sums.count * rate.latency
    if sums.ratio <= 1 or for_bytes < FEW_BYTES * sums.predicted:
        return replace(rate, latency=rate.latency * sums.ratio, bandwidth=rate.bandwidth / sums.ratio)
    longer = sums.ratio * sums.predicted - sums.count * rate.latency
    return replace(rate, bandwidth=rate.bandwidth * for_bytes / longer)
