"""Places frozen work in a window without a flush: there are no bubbles, so ranks with less work encode more.

        rank 0   F B F B F B ...              busy 12 of every window; the slowest rank sets the pace
        rank 1   F B v F B v F B v ...        busy 8: it encodes most samples
        rank 2   F B v F B v F B v ...

Each rank repeats its window, and the slowest one sets the pace. With c seconds for the frozen layers on a sample:

    period >= max over ranks r of  busy of r + samples of r * c  >= (all work) / ranks

Own algorithm. For each chunk size the samples are given out one by one, each to the rank that would end first with it
[1]: samples cost the same, so the longest rank is as short as whole samples allow. Within a rank the work is spread
evenly after its backwards [2], because work in one place delays the ranks that follow. The last part comes after the
start of the gradient sum and in front of the update, which waits for the sum.

>>> from diffusionpipe.costs import StageCosts
>>> from diffusionpipe.passes import without_flush
>>> from diffusionpipe.schedules import one_f_one_b
>>> window = without_flush(one_f_one_b(2, 2, 4), (1, 0))
>>> costs = Costs(stages=(StageCosts(forward=2, backward=4), StageCosts(forward=1, backward=2)))
>>> frozen = FrozenLayers(components=("v",), forward=lambda layer, samples: samples)
>>> for worker, fills in window_fills(window, costs, frozen).items():  # 12 + 1 on worker 0, 6 + 7 on worker 1
...     print(worker, [(fill.position, str(fill.samples)) for fill in fills])
0 [(4, '0:1')]
1 [(2, '1:4'), (4, '4:8')]
"""

from collections.abc import Mapping
from heapq import heapify, heapreplace
from itertools import accumulate

from diffusionpipe.costs import Costs
from diffusionpipe.ir import COMPUTE_OPS, Op, Schedule
from diffusionpipe.passes import PlacedFill
from diffusionpipe.planner.filling.fill_queue import FillQueue, Piece, placed
from diffusionpipe.planner.filling.frozen_layers import FillOptions, FrozenLayers, check_options
from diffusionpipe.planner.filling.shares import hosts_of, seconds_a_sample
from diffusionpipe.timing.prices import price_of
from diffusionpipe.timing.work import Compute
from diffusionpipe.units import Seconds


def window_fills(
    window: Schedule, costs: Costs, frozen: FrozenLayers, options: FillOptions | None = None
) -> Mapping[int, tuple[PlacedFill, ...]]:
    """Worker -> its fills in the window, as `insert_fills` takes them; together they encode a batch.

    Args:
        window: compute, reductions and steps.
        costs: the costs of that window.
        frozen: the layers; keep the object between calls, it remembers times.
        options: chunk sizes, hosts, speeds; None for the defaults.

    Raises:
        ConfigError: the options do not fit the layers and workers.
    """
    options = options or FillOptions()
    check_options(options, frozen, window.num_workers)
    busy = [
        sum(price_of(Compute(action.stage, action.op), costs) for action in order if action.op in COMPUTE_OPS)
        for order in window.orders
    ]
    batch = window.placement.num_samples
    found = []
    for chunk in options.allowed_chunks(batch):
        rate = seconds_a_sample(frozen, options, chunk)
        shares = _shares(busy, batch, {worker: rate / options.speed(worker) for worker in hosts_of(options, len(busy))})
        queues = [
            FillQueue(frozen, options, worker=worker, samples=share, chunk=chunk) for worker, share in enumerate(shares)
        ]
        used = [queue.drain(0) for queue in queues]
        # The fastest; of equals the one with least frozen work, and then the largest chunk.
        found.append((max(map(sum, zip(busy, used, strict=True))), sum(used), -chunk, shares, used))
    *_, least, shares, used = min(found)  # `least` is the chunk size with a minus
    firsts = accumulate(shares, initial=0)
    fills = {}
    for worker, (share, seconds, first) in enumerate(zip(shares, used, firsts, strict=False)):
        queue = FillQueue(frozen, options, worker=worker, samples=share, chunk=-least)
        pieces = _spread(window, worker, queue, seconds)
        fills[worker] = tuple(fill for fill, _ in placed(pieces, frozen, options, worker=worker, first=first))
    return {worker: own for worker, own in fills.items() if own}


def _shares(busy: list[Seconds], batch: int, rates: Mapping[int, Seconds]) -> list[int]:
    """The samples that each worker encodes, by worker, so that the longest worker is as short as possible [1].

    `busy`: seconds of compute of each worker. `rates`: worker that encodes -> its seconds for a sample.
    """
    shares = [0] * len(busy)
    heap = [(busy[worker] + rate, worker) for worker, rate in rates.items()]
    heapify(heap)
    for _ in range(batch):
        end, worker = heap[0]
        shares[worker] += 1
        heapreplace(heap, (end + rates[worker], worker))
    return shares


def _spread(window: Schedule, worker: int, queue: FillQueue, seconds: Seconds) -> list[Piece]:
    """The pieces of a worker's frozen work, which takes `seconds`, in equal parts after its backwards [2]."""
    order = window.orders[worker]
    places = [place + 1 for place, action in enumerate(order) if action.op in (Op.B, Op.W)]
    # The last part comes before the update: it runs beside the gradient sum, for which the update waits.
    places[-1] = next(place for place, action in enumerate(order) if action.op is Op.STEP)
    for number, place in enumerate(places[:-1]):
        queue.fill(place, seconds * (number + 1) / len(places) - queue.used)
    queue.drain(places[-1])
    return queue.pieces
