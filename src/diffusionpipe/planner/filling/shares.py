"""Divides the samples of a batch among the workers that encode, and packs each worker's share into its waits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from diffusionpipe.planner.filling.compute_graph import ComputeGraph
from diffusionpipe.planner.filling.fill_queue import FillQueue, Piece
from diffusionpipe.planner.filling.frozen_layers import FillOptions, FrozenLayers
from diffusionpipe.units import Seconds

CLOSE = 1.001
"""An iteration this close to its lower bound, as a ratio, is not improved further."""
MAX_MOVES = 8
"""The most moves of samples between workers, for each host."""


def hosts_of(options: FillOptions, num_workers: int) -> tuple[int, ...]:
    """The workers that may encode: the `workers` of the options, or all."""
    return options.workers or tuple(range(num_workers))


def seconds_a_sample(frozen: FrozenLayers, options: FillOptions, chunk: int) -> Seconds:
    """The seconds of frozen work for one sample in chunks of `chunk` samples, on a device of speed 1."""
    return frozen.running(chunk, options.overhead)[-1] / chunk


def idle_level(unfilled: Seconds, busy: Sequence[Seconds], work: Seconds, speeds: Mapping[int, float]) -> Seconds:
    """The least seconds of an iteration in which hosts of these speeds can do `work` seconds of frozen work.

    It is a lower bound: every wait counts as usable to the last second, and the work as divisible. `unfilled`: the
    seconds without that work. `busy`: the seconds of compute of each worker. `speeds`: host -> speed of its device.
    """
    idle = sum((unfilled - busy[worker]) * speed for worker, speed in speeds.items())
    return unfilled + max(0.0, work - idle) / sum(speeds.values())


@dataclass(frozen=True, kw_only=True)
class Case:
    """The compute of one iteration, and the frozen work to place in it."""

    graph: ComputeGraph
    frozen: FrozenLayers
    options: FillOptions
    batch: int
    """Samples to encode."""

    @property
    def hosts(self) -> tuple[int, ...]:
        """The workers that may encode."""
        return hosts_of(self.options, self.graph.num_workers)

    def seconds_a_sample(self, chunk: int) -> Seconds:
        """The seconds of frozen work for one sample in chunks of `chunk` samples, on a device of speed 1."""
        return seconds_a_sample(self.frozen, self.options, chunk)

    def level(self, rate: Seconds) -> Seconds:
        """The lower bound `idle_level` of this iteration, if frozen work takes `rate` seconds a sample."""
        speeds = {worker: self.options.speed(worker) for worker in self.hosts}
        return idle_level(self.graph.makespan, self.graph.busy, self.batch * rate, speeds)

    def queue(self, worker: int, samples: int, chunk: int) -> FillQueue:
        """A queue with the frozen work of `samples` samples on a worker, in chunks of at most `chunk` samples."""
        return FillQueue(self.frozen, self.options, worker=worker, samples=samples, chunk=chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """A way to place the frozen work of an iteration: the pieces of all workers at their places, and the times then."""

    shares: tuple[int, ...]
    """The number of samples that each worker encodes, by worker."""
    chunk: int
    """The most samples that go through the layers together."""
    pieces: tuple[list[Piece], ...]
    """The pieces of each worker in order, by worker."""
    ends: tuple[Seconds, ...]
    """The end of each worker's last action or fill, by worker, in seconds."""
    used: tuple[Seconds, ...]
    """The time of frozen work on each worker, by worker, in seconds."""
    makespan: Seconds
    """The time of the iteration with these fills, in seconds."""
    is_shifted: bool
    """Whether some compute starts later than without fills."""


@dataclass(slots=True)
class Visits:
    """A budget of a search, counted in events, so that its result does not depend on the machine's speed."""

    left: int
    """Events and fills that evaluations may still visit."""


def bound_of(case: Case, packing: Packing) -> Seconds:
    """The least seconds of an iteration with the packing's frozen work, if all hosts waited equally long."""
    work = sum(packing.used) + sum(case.graph.busy[worker] for worker in case.hosts)
    return max(case.graph.makespan, work / len(case.hosts))


def in_proportion(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to the weights, with the sum `total`, by largest remainders."""
    scale = total / sum(weights)
    exact = [weight * scale for weight in weights]
    shares = [int(value) for value in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: shares[i] - exact[i])  # most remains first
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


def fluid_shares(case: Case, rate: Seconds) -> list[int]:
    """The samples of each worker, by worker, in proportion to its idle time in the iteration of the lower bound.

    `rate`: seconds of frozen work for a sample.
    """
    level, hosts = case.level(rate), case.hosts
    weights = [0.0] * case.graph.num_workers
    for worker in hosts:
        weights[worker] = max(0.0, level - case.graph.busy[worker]) * case.options.speed(worker)
    # No host has idle time, so all get equal shares.
    if not sum(weights):
        weights = [float(worker in hosts) for worker in range(case.graph.num_workers)]
    return in_proportion(weights, case.batch)


def pack_unshifted(case: Case, chunk: int) -> Packing:
    """The packing that uses waits alone: no compute starts later, and work that does not fit runs at the workers' ends.

    Shares start in proportion to idle time; then samples move from the worker that ends last to the one that ends first
    with them, as long as that helps.
    """
    graph = case.graph
    known: dict[tuple[int, int], tuple[FillQueue, Seconds]] = {}

    def packed(worker: int, samples: int) -> tuple[FillQueue, Seconds]:
        if (worker, samples) not in known:
            known[worker, samples] = _packed(case, worker, samples, chunk)
        return known[worker, samples]

    rate = case.seconds_a_sample(chunk)
    shares = balanced(case, fluid_shares(case, rate), rate, lambda worker, samples: packed(worker, samples)[1])
    queues = [packed(worker, share) for worker, share in enumerate(shares)]
    return Packing(
        shares=tuple(shares),
        chunk=chunk,
        pieces=tuple(queue.pieces for queue, _ in queues),
        ends=tuple(end for _, end in queues),
        used=tuple(queue.used for queue, _ in queues),
        makespan=max(graph.makespan, *(end for _, end in queues)),
        is_shifted=False,
    )


def _packed(case: Case, worker: int, samples: int, chunk: int) -> tuple[FillQueue, Seconds]:
    """(queue with the pieces of a worker's samples in its waits and at its end, second at which the worker ends)."""
    queue = case.queue(worker, samples, chunk)
    for gap in case.graph.gaps[worker]:
        if queue.is_empty:
            break
        queue.fill(gap.position, gap.end - gap.start)
    return queue, case.graph.ends[worker] + queue.drain(case.graph.places[worker][-1])


def balanced(case: Case, shares: list[int], rate: Seconds, end_of: Callable[[int, int], Seconds]) -> list[int]:
    """The samples of each worker after moving some off the worker that ends last, as long as that helps.

    `end_of`: (worker, samples) -> its end in seconds. `rate`: seconds of frozen work for a sample.
    """
    shares, floor = list(shares), case.graph.makespan
    for _ in range(MAX_MOVES * len(case.hosts)):
        ends = {worker: end_of(worker, shares[worker]) for worker in case.hosts}
        last = max(case.hosts, key=lambda worker: ends[worker])
        excess = ends[last] - max(floor, min(ends.values()))
        # Half of what it is late: the other worker ends later by about as much as this one ends earlier.
        count = max(1, min(shares[last], int(excess / 2 / rate * case.options.speed(last))))
        if ends[last] <= floor or not _moved(shares, ends, count, end_of):
            break
    return shares


def _moved(shares: list[int], ends: dict[int, Seconds], count: int, end_of: Callable[[int, int], Seconds]) -> bool:
    """Move at most `count` samples off the worker that ends last, in `shares`; return whether samples were moved.

    They are moved only if both workers then end before the present last end. `ends`: worker -> its end in seconds.
    `end_of`: (worker, samples) -> its end.
    """
    *others, last = sorted(ends, key=lambda worker: ends[worker])
    while count:
        for worker in others:
            if ends[worker] >= ends[last]:
                break
            after = max(end_of(last, shares[last] - count), end_of(worker, shares[worker] + count))
            if after < ends[last]:
                shares[last] -= count
                shares[worker] += count
                return True
        count //= 2
    return False
