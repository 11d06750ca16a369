"""Latency and bandwidth between the ranks of a job, measured by all of them together.

Messages go back and forth between all pairs of ranks, in rounds of disjoint pairs (see `pairs`); sums run over the
ranks of the first node and over all ranks. Each is tried with several sizes, and a line is fitted, to each pair's times
and to the median of the pairs of a kind:

    message    latency + bytes / bandwidth
    sum        latency + 2 (n - 1) / n x bytes / bandwidth        (n ranks)

Where the processor computes, a message takes from it: posting each tensor, copying, and the caches and the core that
the threads which carry it take from the compute. So on CPUs the ranks also compute while messages cross, and a line
through what that takes longer, for each end of a message, gives a link's overhead per tensor and per byte. Sums go over
memory that has long left the caches, as most of a model's gradients have when they are summed.
"""

import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from math import ceil
from statistics import mean, median

import torch
import torch.distributed as dist

from diffusionpipe.costs import AllReduce, Cluster, Device, Link, PairLink
from diffusionpipe.errors import ConfigError
from diffusionpipe.profiler.measured import Report, device_name, silent
from diffusionpipe.profiler.pairs import Pair, Round, rounds_across, rounds_inside
from diffusionpipe.runtime.comm.exchange import form_of, gather, gather_numbers
from diffusionpipe.runtime.comm.transport import Pending, ProcessTransport
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.units import Bytes, Seconds

MESSAGE_SIZES: tuple[Bytes, ...] = (64, 2**16, 2**20, 2**22, 2**24)
SUM_SIZES: tuple[Bytes, ...] = (64, 2**18, 2**22, 2**24, 2**26)
AT_ONCE = 8
"""The most tensors that are sent together while the ranks compute, as the tensors of an edge are."""
BESIDE: Bytes = 2**22
"""The most bytes that are sent together while the ranks compute; larger tensors are not tried there."""
SHORTEST: Seconds = 0.005
"""The least time of the compute beside messages."""
SMALL: Bytes = 2**18
"""Transfers up to this size are repeated more often than larger ones."""
COLD: Bytes = 2**26
"""The number of bytes through which repeated sums go before they use the same memory again."""
USABLE_OF_FREE = 0.96
"""The share of a GPU's free memory that training may use when the communicators exist; the rest is fragmentation."""
USABLE_OF_HOST = 0.8
"""The share of a machine's memory that its ranks may use together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The measured time of one size of messages or sums, within a node or between nodes."""

    what: str
    """"message" or "sum", within a node or between nodes."""
    ranks: int
    """The number of ranks that took part in each transfer."""
    num_bytes: Bytes
    """The bytes of one message or sum."""
    seconds: Seconds
    """The time of a message, the median over all pairs, or of a sum, the median over the times of the slowest rank."""
    busy: Seconds = 0.0
    """The seconds by which compute takes longer for each end of a message beside it; 0 if that was not tried."""
    pairs: tuple[tuple[Pair, Seconds], ...] = ()
    """(pair of ranks, time of a message between them), for each pair; () for sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The cluster that was measured, and the trials from which its links were fitted."""

    cluster: Cluster
    trials: tuple[Trial, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """The host name and the device name of a rank."""

    host: str
    device: str


def measure_links(job: Job, *, name: str, repeats: int = 7, progress: Report = silent) -> Links:
    """Measure messages and sums between the job's ranks; returns the cluster and the trials. Every rank calls it.

    All ranks get the same. `name`: the cluster's name. `progress` is called with the number of trials done and the
    number of all.

    Raises:
        ConfigError: there is only one rank, or the ranks of one machine do not follow each other.
    """
    world_size = job.membership.world_size
    if world_size < 2:
        raise ConfigError("one rank has no links to measure; use --ranks 2 or more")
    ranks = gather(_Rank(host=socket.gethostname(), device=device_name(job.device)), form_of(_Rank))
    nodes = _nodes([rank.host for rank in ranks])
    first_node, everyone = tuple(r for r in range(world_size) if nodes[r] == 0), tuple(range(world_size))
    transport = ProcessTransport(job.device, summing=(first_node, everyone))
    measure = _Measure(job=job, transport=transport, repeats=repeats)
    inside, across = rounds_inside(nodes), rounds_across(nodes)
    to_try: list[Callable[[], Trial]] = []
    for what, rounds in (("message in a node", inside), ("message between nodes", across)):
        to_try += [partial(measure.message, what, rounds, size) for size in MESSAGE_SIZES if rounds]
    for what, members in (("sum in a node", first_node), ("sum between nodes", everyone if across else ())):
        to_try += [partial(measure.sum, what, members, size) for size in SUM_SIZES if len(members) > 1]
    trials: list[Trial] = []
    for trial in to_try:
        progress(len(trials), len(to_try))
        trials.append(trial())
    memories = gather(usable_memory(job), form_of(int))
    transport.close()
    links = {what: _fit(trials, what) for what in dict.fromkeys(trial.what for trial in trials)}
    overheads = {what: _fit_overhead(trials, what) for what in links}
    near = "message in a node" if inside else "message between nodes"
    far = "message between nodes" if across else near
    # Machines with one rank each have no links inside; the links between them take its place.
    intra = links.get("message in a node") or links["message between nodes"]
    intra_sum = links.get("sum in a node") or links["sum between nodes"]
    inter, inter_sum = links.get("message between nodes", intra), links.get("sum between nodes", intra_sum)
    cluster = Cluster(
        name=name,
        devices=tuple(Device(name=rank.device, memory=own) for rank, own in zip(ranks, memories, strict=True)),
        nodes=nodes,
        intra=Link(*intra, *overheads[near]),
        inter=Link(*inter, *overheads[far]),
        intra_reduce=AllReduce(latency=intra_sum[0], bandwidth=intra_sum[1]),
        inter_reduce=AllReduce(latency=inter_sum[0], bandwidth=inter_sum[1]),
        pairs=pair_links(trials),
    )
    return Links(cluster=cluster, trials=tuple(trials))


def usable_memory(job: Job) -> Bytes:
    """The bytes of this rank's device that training may use: the free part of a GPU less a share for fragmentation.

    On CPUs the ranks of a machine divide a share of its memory equally. All ranks call it.
    """
    if job.device.type == "cuda":
        # The part that torch holds for later tensors is free for training too.
        free = torch.cuda.mem_get_info(job.device)[0] + torch.cuda.memory_reserved(job.device)
        return int(free * USABLE_OF_FREE)
    on_this_machine = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * USABLE_OF_HOST)
    hosts = gather(socket.gethostname(), form_of(str))
    return on_this_machine // hosts.count(socket.gethostname())


def _nodes(hosts: Sequence[str]) -> tuple[int, ...]:
    """The number of each rank's node, from 0, by the host names of the ranks.

    Raises:
        ConfigError: the ranks of a machine do not follow each other.
    """
    order = list(dict.fromkeys(hosts))
    nodes = tuple(order.index(host) for host in hosts)
    if list(nodes) != sorted(nodes):
        raise ConfigError(f"the ranks of a machine must follow each other; their machines are {', '.join(hosts)}")
    return nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measure:
    """Measures messages and sums between the ranks of a job; every rank calls each method."""

    job: Job
    transport: ProcessTransport
    repeats: int

    def message(self, what: str, rounds: Sequence[Round], size: Bytes) -> Trial:
        """Measure messages of `size` bytes between the ranks of each pair: half of the time of a round trip.

        On CPUs it also measures the compute time that messages between the pairs of the first round cost. `what`: the
        kind of message, for the trial.
        """
        buffer = torch.zeros(size, dtype=torch.uint8, device=self.job.device)
        found: list[tuple[Pair, Seconds]] = []
        for pairs in rounds:
            times = self._times([partial(self._round_trip, self._partner(pairs), buffer)], self._count(size))
            of_rank = [[repetition[rank][0] / 2 for repetition in times] for rank in range(len(times[0]))]
            # The slower end's time counts.
            found += [(pair, median(map(max, *(of_rank[rank] for rank in pair)))) for pair in pairs]
        seconds = median(own for _, own in found)
        is_tried = self.job.device.type == "cpu" and size <= BESIDE
        longer = self._longer(self._partner(rounds[0]), size, seconds) if is_tried else []
        busy = mean(longer[rank] for pair in rounds[0] for rank in pair) if longer else 0.0
        return Trial(what=what, ranks=2, num_bytes=size, seconds=seconds, busy=busy, pairs=tuple(found))

    def _partner(self, pairs: Round) -> int | None:
        me = self.job.membership.rank
        return next((sum(pair) - me for pair in pairs if me in pair), None)  # the other one of the pair

    def _round_trip(self, partner: int | None, buffer: torch.Tensor) -> None:
        if partner is None:
            return
        turns = (self.transport.send, self.transport.recv)
        # Both ends would wait for each other if both sent first.
        for turn in turns if self.job.membership.rank < partner else turns[::-1]:
            turn(buffer, partner).wait()

    def _longer(self, partner: int | None, size: Bytes, seconds: Seconds) -> list[Seconds]:
        """The seconds by which each rank's compute takes longer for each end of a message beside it, by rank.

        `partner`: the rank with which this one exchanges messages, None for none; `seconds`: the time of a message.
        """
        count = min(AT_ONCE, BESIDE // size)
        sent, received = ([torch.zeros(size, dtype=torch.uint8) for _ in range(count)] for _ in range(2))
        # Long enough that all messages end beside it.
        compute = _compute_for(max(SHORTEST, 4 * count * seconds))

        def compute_beside() -> None:
            works: list[Pending] = []
            if partner is not None:
                works += [self.transport.recv(buffer, partner) for buffer in received]
                works += [self.transport.send(buffer, partner) for buffer in sent]
            compute()
            for work in works:
                work.wait()

        times = self._times([compute, compute_beside], repeats=2 * self.repeats)
        return [
            max(0.0, median(beside - alone for alone, beside in rank)) / (2 * count)
            for rank in zip(*times, strict=True)  # each rank is an end of `count` messages sent and of as many received
        ]

    def sum(self, what: str, members: tuple[int, ...], size: Bytes) -> Trial:
        """Measure a sum of `size` bytes over the ranks `members`; `what`: the kind of sum, for the trial."""
        count = max(1, min(2 * self.repeats, COLD // size))
        buffers = cycle([torch.ones(max(1, size // 4), device=self.job.device) for _ in range(count)])

        def add() -> None:
            buffer = next(buffers)
            if self.job.membership.rank in members:
                self.transport.all_reduce(buffer, members).wait()

        return Trial(what=what, ranks=len(members), num_bytes=size, seconds=self._slowest(add, size))

    def _slowest(self, transfer: Callable[[], None], size: Bytes) -> Seconds:
        """The time of a transfer of `size` bytes: the median over repetitions of the slowest rank's time."""
        return median(max(seconds for (seconds,) in ranks) for ranks in self._times([transfer], self._count(size)))

    def _count(self, size: Bytes) -> int:
        """The number of repetitions for transfers of this size; small ones, whose time varies most, have the most."""
        return self.repeats * (5 if size <= SMALL else 1)

    def _times(self, actions: Sequence[Callable[[], None]], repeats: int) -> list[list[list[Seconds]]]:
        """The times of some actions, indexed by repetition, rank and action.

        There is a warm-up before. The actions take turns, and all ranks start each one together.
        """
        mine: list[list[Seconds]] = []
        for _ in range(repeats + 1):  # the first one is the warm-up
            mine.append([])
            for action in actions:
                dist.barrier()
                start = time.perf_counter()
                action()
                if self.job.device.type == "cuda":
                    torch.cuda.synchronize(self.job.device)
                mine[-1].append(time.perf_counter() - start)
        everyone = [times.tolist() for times in gather_numbers(torch.tensor(mine[1:], dtype=torch.float64))]
        return [list(ranks) for ranks in zip(*everyone, strict=True)]


def _compute_for(seconds: Seconds) -> Callable[[], None]:
    """A function that computes for about this time."""
    left, right = torch.ones(2, 256, 256)
    product = torch.empty_like(left)

    def repeat(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right, out=product)

    repeat(10)
    start = time.perf_counter()
    repeat(10)
    return partial(repeat, ceil(10 * seconds / (time.perf_counter() - start)))


def _fit(trials: Sequence[Trial], what: str) -> tuple[Seconds, float]:
    """(latency in seconds, bytes a second), fitted to the trials of the kind `what`."""
    mine = [trial for trial in trials if trial.what == what]
    is_sum = what.startswith("sum")
    factor = 2 * (mine[0].ranks - 1) / mine[0].ranks if is_sum else 1.0
    return fit_line([(factor * trial.num_bytes, trial.seconds) for trial in mine])


def pair_links(trials: Sequence[Trial]) -> tuple[PairLink, ...]:
    """The links between all pairs of ranks that were tried, each with its fitted latency and bandwidth."""
    points: dict[Pair, list[tuple[float, Seconds]]] = defaultdict(list)
    for trial in trials:
        for pair, seconds in trial.pairs:
            points[pair].append((float(trial.num_bytes), seconds))
    lines = {pair: fit_line(own) for pair, own in sorted(points.items())}
    return tuple(
        PairLink(first=pair[0], second=pair[1], latency=latency, bandwidth=bandwidth)
        for pair, (latency, bandwidth) in lines.items()
    )


def _fit_overhead(trials: Sequence[Trial], what: str) -> tuple[Seconds, Seconds]:
    """(seconds for each tensor, seconds for each byte) of processor time that an end of a message costs.

    Fitted to the trials of the kind `what`; (0, 0) if that was not tried.
    """
    points = [(float(trial.num_bytes), trial.busy) for trial in trials if trial.what == what and trial.busy > 0]
    if not points:
        return 0.0, 0.0
    overhead, rate = fit_line(points)
    return overhead, 1 / rate  # seconds for a byte


def fit_line(points: Sequence[tuple[float, Seconds]]) -> tuple[Seconds, float]:
    """(latency in seconds, bytes a second) of the line through points (bytes, seconds) with least relative squares.

    The latency is at least 0 and at most the shortest time, and the bandwidth is positive.
    """
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    over = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    under = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = over / under if under else 0.0
    largest, longest = max(points)  # the point of the largest size
    if slope <= 0:  # noise: all that is known is the time of the largest
        slope = longest / largest
    latency = min(max(0.0, mean_y - slope * mean_x), min(seconds for _, seconds in points))
    return latency, 1 / slope
