"""The ranks' side of a rehearsal: messages between them timed, then iterations in which compute is waits.

    rank 0   F0  F1 ~~~~~~~~ B0  B1      waits of the planned length; messages, executor and processes are real
    rank 1   ~~~ F0  B0  F1  B1 ~~
             |                     |
             barrier               every rank notes its start and its end on the clock that a machine's processes share

A wait counts from when a device would have begun: see `DeviceClock`. A gradient reduction is a wait too. Its ranks
tell each other when they came to it, so it ends for all at the same moment: the last start and the planned length.
`Executor` waits for it at the end of the iteration. So is the gathering of a sharded block, which its compute waits
for.
"""

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter, process_time, sleep

import torch
import torch.distributed as dist

from diffusionpipe.costs import Costs, TensorSpec
from diffusionpipe.ir import Mesh, Op, Schedule, Span
from diffusionpipe.runtime.equipment import Equipment
from diffusionpipe.runtime.executor import Executor
from diffusionpipe.runtime.process_group import Job
from diffusionpipe.runtime.transport import ProcessTransport, Transport, Work
from diffusionpipe.runtime.virtual import VirtualEncoder, Wait, precise_wait, virtual_stages
from diffusionpipe.units import Bytes, Seconds

PAUSE: Seconds = 0.01
"""Between two timed messages: in a rehearsal, too, the ranks sleep most of the time."""


BLOCKED: Seconds = 1e-4
"""A wait for a message that takes longer has blocked; what is there already takes microseconds."""


@dataclass(slots=True)
class DeviceClock:
    """When a rank's virtual device has done what it was given. Mutable.

        device   | F0 |     | F1 | B0 |        its queue: an action begins when the one before is over and its
        host     | F0 late|    F1 late |B0     messages are there, however late the host is

    Hosts run ahead of devices; here they share a few cores and wake up late instead. So what a host was late by is
    taken from its next wait, as far as nothing arrived in between. Messages are still sent when the host comes to it.
    """

    free: Seconds = 0.0

    def begin(self) -> None:
        """The device has nothing to do at this moment."""
        self.free = perf_counter()

    def wait(self, duration: Seconds) -> None:
        """Until the device has done that much more."""
        self.free += duration
        precise_wait(max(0.0, self.free - perf_counter()))


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A message on its way to a device."""

    work: Work
    clock: DeviceClock

    def wait(self) -> None:
        """See `Work`. A device that had to wait begins its next action now."""
        start = perf_counter()
        self.work.wait()
        end = perf_counter()
        if end - start > BLOCKED:
            self.clock.free = max(self.clock.free, end)


@dataclass(frozen=True, slots=True)
class _Listening:
    """A transport whose arrivals a clock hears of."""

    transport: Transport
    clock: DeviceClock

    def send(self, tensor: torch.Tensor, destination: int) -> Work:
        """See `Transport`."""
        return self.transport.send(tensor, destination)

    def recv(self, buffer: torch.Tensor, source: int) -> Work:
        """See `Transport`."""
        return _Arrival(self.transport.recv(buffer, source), self.clock)

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Work:
        """See `Transport`."""
        return self.transport.all_reduce(tensor, ranks)

    def reduce(self, tensor: torch.Tensor, destination: int, ranks: tuple[int, ...]) -> Work:
        """See `Transport`."""
        return self.transport.reduce(tensor, destination, ranks)

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: tuple[int, ...]) -> Work:
        """See `Transport`."""
        return self.transport.broadcast(tensor, source, ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualRun:
    """A schedule with the waits and tensors of its rehearsal."""

    schedule: Schedule
    """With explicit messages."""
    costs: Costs
    """Lengths of the waits."""
    tensors: Mapping[str, TensorSpec]
    """As they travel: every tensor of the schedule's edges, `inputs` and `output`."""
    mesh: Mesh
    """Of the ranks that rehearse."""
    inputs: tuple[str, ...] = ()
    """Raw inputs of the model."""
    output: str = "loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIteration:
    """One iteration of one rank."""

    start: Seconds
    end: Seconds
    """On the clock that all processes of a machine share."""
    spans: tuple[Span, ...]
    """`worker` is the rank; times count from `start`."""
    cpu: Seconds
    """Processor time of all its threads."""


def rehearse(
    job: Job, runs: Mapping[str, VirtualRun], order: Sequence[str]
) -> Generator[int, None, dict[str, list[RankIteration]]]:
    """One iteration for each name of `order`; every rank calls this with the same arguments.

    One iteration of every run comes before, unmeasured: it opens the connections. Yields how many iterations have been
    measured: 0 before the first, then after each.

    Raises:
        ScheduleError: a schedule holds ops that the executor does not know.
    """
    rank = job.membership.rank
    clock = DeviceClock()
    executors = {name: _executor(run, rank, clock) for name, run in runs.items()}
    for executor in executors.values():
        dist.barrier()
        clock.begin()
        executor.run()
    found: dict[str, list[RankIteration]] = {name: [] for name in runs}
    for done, name in enumerate(order):
        yield done
        dist.barrier()
        cpu, start = process_time(), perf_counter()
        clock.begin()
        executors[name].run()
        end = perf_counter()
        spans, _ = executors[name].spans()
        found[name].append(
            RankIteration(
                start=start,
                end=end,
                spans=tuple(Span(worker=rank, action=s.action, start=s.start, end=s.end) for s in spans),
                cpu=process_time() - cpu,
            )
        )
    yield len(order)
    return found


def time_messages(job: Job, sizes: Sequence[Bytes], repeats: int) -> list[tuple[Bytes, Seconds]]:
    """(bytes, median time) of messages between ranks 0 and 1, 2 and 3, ...; [] on the rank that has no partner.

    Half a round trip, with pauses between; so a message wakes a sleeping rank, as in an iteration.
    """
    rank, partner = job.membership.rank, job.membership.rank ^ 1
    transport = ProcessTransport()
    if partner >= job.membership.world_size:
        return []
    found = []
    for size in sizes:
        buffer = torch.zeros(size, dtype=torch.uint8)
        times = []
        for _ in range(repeats + 1):
            if rank < partner:
                sleep(PAUSE)
                start = perf_counter()
                transport.send(buffer, partner).wait()
                transport.recv(buffer, partner).wait()
                times.append((perf_counter() - start) / 2)
            else:
                transport.recv(buffer, partner).wait()
                transport.send(buffer, partner).wait()
        if times:
            found.append((size, median(times[1:])))
    return found


def _executor(run: VirtualRun, rank: int, clock: DeviceClock) -> Executor:
    """The rank's executor with virtual stages. Every rank calls this: it makes process groups."""
    schedule, mesh = run.schedule, run.mesh
    group, worker = mesh.place(rank)
    holders = holders_of(schedule, mesh)
    transport = ProcessTransport(summing=tuple(holders.values()))
    stages = virtual_stages(
        schedule, worker, costs=run.costs, tensors=run.tensors, inputs=run.inputs, output=run.output, wait=clock.wait
    )
    stream = _Stream()
    reductions = virtual_reductions(run, worker, rank, holders=holders, transport=transport, stream=stream)
    gatherings = virtual_reductions(
        run, worker, rank, holders=holders, transport=transport, op=Op.UNSHARD, stream=stream
    )
    return Executor(
        schedule,
        worker,
        Equipment(
            stages=stages,
            tensors=run.tensors,
            transport=_Listening(transport, clock),
            device=torch.device("cpu"),
            rank_of_worker=lambda other: mesh.rank(group, other),
            encoder=VirtualEncoder(dict(zip(schedule.fills, run.costs.fills, strict=True)), clock.wait),
            raw_inputs=run.inputs,
            gradients=reductions,
            sharded={block: VirtualShards(one, clock) for block, one in gatherings.items()},
        ),
    )


def holders_of(schedule: Schedule, mesh: Mesh) -> dict[int, tuple[int, ...]]:
    """Block id -> the ranks that sum its gradients or gather it together, where the schedule does so."""
    stages = schedule.placement.stages
    workers: dict[int, set[int]] = {}
    for worker, action in schedule.actions():
        if action.op in (Op.REDUCE_GRAD, Op.UNSHARD):
            workers.setdefault(stages[action.stage].weights, set()).add(worker)
    groups = range(mesh.data_parallel)
    return {
        weights: tuple(sorted(mesh.rank(group, worker) for group in groups for worker in found))
        for weights, found in sorted(workers.items())
    }


@dataclass(slots=True)
class _Stream:
    """The reductions and gathers of a rank run one after the other, in the order in which they are started."""

    free: Seconds = 0.0
    queue: deque["VirtualReduction"] = field(default_factory=deque)
    """Those of which it is not yet known when they end."""

    def settle(self, one: "VirtualReduction") -> None:
        """Find out when this one ends, and all before it."""
        while one.is_pending:
            self.queue.popleft().settle()


@dataclass(slots=True, kw_only=True)
class VirtualReduction:
    """The sum of one block's gradients, or its gathering, as a wait."""

    duration: Seconds
    place: int
    """This rank's among the ranks."""
    ranks: tuple[int, ...]
    transport: Transport
    stream: _Stream
    wait: Wait
    end: Seconds = 0.0
    """When the last one would have ended."""
    is_pending: bool = False
    _starts: torch.Tensor = field(init=False)
    _work: Work | None = None

    def __post_init__(self) -> None:
        self._starts = torch.zeros(len(self.ranks), dtype=torch.float64)

    def reset(self) -> None:
        """There is nothing to forget."""

    def reduce(self) -> None:
        """Tell the other ranks when this one has come to it."""
        self.stream.settle(self)
        self._starts.zero_()
        self._starts[self.place] = perf_counter()
        self._work = self.transport.all_reduce(self._starts, self.ranks) if len(self.ranks) > 1 else None
        self.is_pending = True
        self.stream.queue.append(self)

    def settle(self) -> None:
        """Find out when it ends: its duration after the last of the ranks' starts, and after what was before it."""
        if self._work is not None:
            self._work.wait()
        self.end = self.stream.free = max(float(self._starts.max()), self.stream.free) + self.duration
        self.is_pending = False

    def finish(self) -> None:
        """Wait until it would have ended."""
        self.stream.settle(self)
        self.wait(max(0.0, self.end - perf_counter()))


@dataclass(frozen=True, slots=True)
class VirtualShards:
    """A sharded block whose gathering is a wait, for the device too."""

    gathering: VirtualReduction
    clock: DeviceClock

    def unshard(self) -> None:
        """See `ShardedBlock`."""
        self.gathering.reduce()

    def wait(self) -> None:
        """See `ShardedBlock`."""
        self.gathering.stream.settle(self.gathering)
        self.clock.free = max(self.clock.free, self.gathering.end)
        self.clock.wait(0.0)

    def reshard(self) -> None:
        """See `ShardedBlock`."""

    def open_gradients(self) -> None:
        """See `ShardedBlock`."""


def virtual_reductions(
    run: VirtualRun,
    worker: int,
    rank: int,
    *,
    holders: Mapping[int, tuple[int, ...]],
    transport: Transport,
    wait: Wait = precise_wait,
    op: Op = Op.REDUCE_GRAD,
    stream: _Stream | None = None,
) -> dict[int, VirtualReduction]:
    """Block id -> the rank's reduction of it, in the order in which they are issued; its gathering with UNSHARD."""
    stream = stream or _Stream()
    times = run.costs.reduces if op is Op.REDUCE_GRAD else run.costs.unshards
    found = {}
    for action in run.schedule.orders[worker]:
        if action.op is op:
            weights = run.schedule.placement.stages[action.stage].weights
            found[weights] = VirtualReduction(
                duration=times[action.stage] if times else 0.0,
                place=holders[weights].index(rank),
                ranks=holders[weights],
                transport=transport,
                stream=stream,
                wait=wait,
            )
    return found
