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

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time, sleep

import torch
import torch.distributed as dist

from diffusionpipe.costs import Backbone, Costs, TensorSpec
from diffusionpipe.ir import Mesh, Schedule, Span
from diffusionpipe.runtime.comm.transport import Pending, ProcessTransport, Transport
from diffusionpipe.runtime.engine.equipment import Equipment
from diffusionpipe.runtime.engine.executor import Executor
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.runtime.rehearsals.virtual import ONE_BACKBONE, VirtualEncoder, precise_wait, virtual_stages
from diffusionpipe.runtime.rehearsals.virtual_reductions import VirtualCollectives, VirtualReduction, meeting_ranks
from diffusionpipe.units import Bytes, Seconds

PAUSE: Seconds = 0.01
"""The pause between two timed messages: in a rehearsal, too, the ranks sleep most of the time."""


BLOCKED: Seconds = 1e-4
"""A wait for a message that takes longer has blocked; a message that is there already takes microseconds."""


@dataclass(slots=True)
class DeviceClock:
    """The clock of a rank's virtual device: the time at which it will have done all work that it was given.

        device   | F0 |     | F1 | B0 |        its queue: an action begins when the one before is over and its
        host     | F0 late|    F1 late |B0     messages are there, however late the host is

    Hosts run ahead of devices; here they share a few cores and wake up late instead. So what a host was late by is
    taken from its next wait, as far as nothing arrived in between. Messages are still sent when the host comes to it.
    """

    free: Seconds = 0.0
    """The time at which the device is free again, by the host's clock."""

    def begin(self) -> None:
        """Set the clock to this moment, at which the device is idle."""
        self.free = perf_counter()

    def wait(self, duration: Seconds) -> None:
        """Give the device `duration` seconds of compute, and block until it is done with all."""
        self.free += duration
        precise_wait(max(0.0, self.free - perf_counter()))


@dataclass(frozen=True, slots=True)
class _Arrival:
    """The receive of a message whose wait also sets the clock of the virtual device."""

    work: Pending
    clock: DeviceClock

    def wait(self) -> None:
        """Block until the message is there; a device that had to wait for it begins its next action now."""
        start = perf_counter()
        self.work.wait()
        end = perf_counter()
        if end - start > BLOCKED:
            self.clock.free = max(self.clock.free, end)


@dataclass(frozen=True, slots=True)
class _Listening:
    """A transport whose receives set the clock of the virtual device when a message comes late."""

    transport: Transport
    clock: DeviceClock

    def send(self, tensor: torch.Tensor, destination: int) -> Pending:
        """Start sending a contiguous tensor to a rank; see `Transport`."""
        return self.transport.send(tensor, destination)

    def recv(self, buffer: torch.Tensor, source: int) -> Pending:
        """Start receiving from a rank into a contiguous buffer; see `Transport`."""
        return _Arrival(self.transport.recv(buffer, source), self.clock)

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        """Start summing a contiguous tensor over `ranks`, in place; see `Transport`."""
        return self.transport.all_reduce(tensor, ranks)

    def reduce(self, tensor: torch.Tensor, destination: int, ranks: tuple[int, ...]) -> Pending:
        """Start summing a contiguous tensor over `ranks` into the destination's; see `Transport`."""
        return self.transport.reduce(tensor, destination, ranks)

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: tuple[int, ...]) -> Pending:
        """Start copying the source's contiguous tensor to all `ranks`; see `Transport`."""
        return self.transport.broadcast(tensor, source, ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualRun:
    """A schedule to rehearse, with the costs that set its waits, the tensors of its messages, and its mesh."""

    schedule: Schedule
    """The schedule of the rehearsal, with explicit messages."""
    costs: Costs
    """Costs whose times are the lengths of the waits."""
    tensors: Mapping[str, TensorSpec]
    """The tensors of the schedule's edges, `inputs` and the losses, by name, with the types and shapes in which they
    travel."""
    mesh: Mesh
    """The mesh of the ranks that rehearse."""
    inputs: tuple[str, ...] = ()
    """The names of the model's raw inputs."""
    backbones: tuple[Backbone, ...] = ONE_BACKBONE
    """The backbones of the model, with the names of their losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIteration:
    """The measured start, end, spans and processor time of one rehearsed iteration on one rank, in seconds."""

    start: Seconds
    """The start of the iteration, on the clock that all processes of a machine share."""
    end: Seconds
    """The end of the iteration, on the same clock."""
    spans: tuple[Span, ...]
    """The start and end of each action, from `start` on; `worker` is the rank."""
    cpu: Seconds
    """The processor time of all threads of the rank in the iteration."""


def rehearse(
    job: Job, runs: Mapping[str, VirtualRun], order: Sequence[str]
) -> Generator[int, None, dict[str, list[RankIteration]]]:
    """Run one iteration for each name of `order`; returns name -> this rank's measured iterations.

    Every rank calls this with the same arguments. One iteration of every run comes before, unmeasured: it opens the
    connections. Yields how many iterations have been measured: 0 before the first, then after each.

    Raises:
        ScheduleError: a schedule holds ops that the executor cannot run.
    """
    rank = job.membership.rank
    clock = DeviceClock()
    executors = {name: virtual_executor_of(run, rank, clock) for name, run in runs.items()}
    for executor in executors.values():
        # All ranks begin at the same moment, as after an update.
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
        spans, _ = executors[name].recording.spans()
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
    """(bytes, median seconds) for each size, of messages between ranks 0 and 1, 2 and 3, ...; [] on odd ranks.

    [] also on a last rank without a partner. Half a round trip, with pauses between; so a message wakes a sleeping
    rank, as in an iteration. Every rank calls this.
    """
    rank, partner = job.membership.rank, job.membership.rank ^ 1
    transport = ProcessTransport(torch.device("cpu"))
    if partner >= job.membership.world_size:
        return []
    found = []
    for size in sizes:
        buffer = torch.zeros(size, dtype=torch.uint8)
        times = []
        # One more than asked for: the first round trip opens the connection and is left out below.
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


def virtual_equipment(run: VirtualRun, rank: int, clock: DeviceClock) -> Equipment:
    """The equipment with which the rank rehearses a run: stages that wait, and real messages.

    Every rank calls this: it makes process groups.
    """
    schedule, mesh = run.schedule, run.mesh
    group, worker = mesh.place(rank)
    holders = meeting_ranks(schedule, mesh)
    transport = ProcessTransport(torch.device("cpu"), summing=tuple(holders.values()))
    stages = virtual_stages(
        schedule,
        worker,
        costs=run.costs,
        tensors=run.tensors,
        inputs=run.inputs,
        backbones=run.backbones,
        wait=clock.wait,
    )
    collectives = VirtualCollectives(
        schedule=schedule, costs=run.costs, worker=worker, rank=rank, holders=holders, transport=transport
    )
    return Equipment(
        stages=stages,
        tensors=run.tensors,
        transport=_Listening(transport, clock),
        device=torch.device("cpu"),
        rank_of_worker=lambda other: mesh.rank(group, other),
        encoder=VirtualEncoder(dict(zip(schedule.fills, run.costs.fills, strict=True)), clock.wait),
        raw_inputs=run.inputs,
        gradients=collectives.reductions(),
        brought={block: VirtualShards(one, clock) for block, one in collectives.gatherings().items()},
    )


def virtual_executor_of(run: VirtualRun, rank: int, clock: DeviceClock) -> Executor:
    """The executor that rehearses the rank's side of a run. Every rank calls this: it makes process groups."""
    return Executor(run.schedule, run.mesh.place(rank)[1], virtual_equipment(run, rank, clock))


@dataclass(frozen=True, slots=True)
class VirtualShards:
    """A sharded block in a rehearsal: gathering its weights is a wait, also of the virtual device."""

    gathering: VirtualReduction
    """The wait in place of the gathering."""
    clock: DeviceClock

    def prepare(self) -> None:
        """Start the wait that takes the place of gathering the block's parameters."""
        self.gathering.reduce()

    def present(self) -> None:
        """Block until the wait in place of the gathering is over."""
        self.gathering.stream.settle(self.gathering)
        # The virtual device cannot compute before the weights are gathered.
        self.clock.free = max(self.clock.free, self.gathering.end)
        # Blocks until the device has come to this moment.
        self.clock.wait(0.0)

    def release(self) -> None:
        """Do nothing: there are no parameters to drop."""
