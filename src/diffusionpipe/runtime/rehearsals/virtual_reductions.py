"""Reductions and gathers as waits, for rehearsals: they end for all their ranks at the same moment."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

from diffusionpipe.costs import Costs
from diffusionpipe.ir import Mesh, Op, Schedule
from diffusionpipe.runtime.comm.transport import Pending, Transport
from diffusionpipe.runtime.rehearsals.virtual import Wait, precise_wait
from diffusionpipe.units import Seconds


def meeting_ranks(schedule: Schedule, mesh: Mesh) -> dict[int, tuple[int, ...]]:
    """Block id -> the ranks that sum its gradients or gather its weights together; only blocks with such actions."""
    stages = schedule.placement.stages
    workers: dict[int, set[int]] = {}
    for worker, action in schedule.actions():
        if action.op in (Op.REDUCE_GRAD, Op.UNSHARD):
            workers.setdefault(stages[action.stage].weights, set()).add(worker)
    groups = range(mesh.data_parallel)
    # Sorted, because all ranks make process groups in the same order.
    return {
        weights: tuple(sorted(mesh.rank(group, worker) for group in groups for worker in found))
        for weights, found in sorted(workers.items())
    }


@dataclass(slots=True)
class ReductionStream:
    """The queue of a rank's reductions and gathers, which run one after the other in the order of their starts."""

    free: Seconds = 0.0
    """The time at which the last one whose end is found ends, by the host's clock."""
    queue: deque["VirtualReduction"] = field(default_factory=deque)
    """Reductions and gathers that have started and whose end is not found yet."""

    def settle(self, one: "VirtualReduction") -> None:
        """Find the end of this reduction and of all before it in the queue; it waits for the other ranks' starts."""
        while one.is_pending:
            self.queue.popleft().settle()


@dataclass(slots=True, kw_only=True)
class VirtualReduction:
    """The sum of a block's gradients, or the gathering of its weights, as a wait that ends on all ranks at once."""

    duration: Seconds
    place: int
    """The index of this rank in `ranks`."""
    ranks: tuple[int, ...]
    transport: Transport
    stream: ReductionStream
    wait: Wait
    end: Seconds = 0.0
    """The time at which the last use has ended or will end, by the host's clock."""
    is_pending: bool = False
    """Whether it has started and its end is not found yet."""
    _starts: torch.Tensor = field(init=False)
    _work: Pending | None = None

    def __post_init__(self) -> None:
        self._starts = torch.zeros(len(self.ranks), dtype=torch.float64)

    def open(self) -> None:
        """Nothing to do: there are no gradients."""

    def added(self, *, is_whole: bool) -> None:
        """Nothing to do: there are no gradients."""

    def reset(self) -> None:
        """Nothing to do: there are no gradients."""

    def reduce(self) -> None:
        """Start the virtual reduction: send the time of this rank's start to the others, and join the queue."""
        # `_starts` is written again below, so the sum of the last use has to be over.
        self.stream.settle(self)
        self._starts.zero_()
        # Each rank fills its own place only, so the sum has the starts of all.
        self._starts[self.place] = perf_counter()
        self._work = self.transport.all_reduce(self._starts, self.ranks) if len(self.ranks) > 1 else None
        self.is_pending = True
        self.stream.queue.append(self)

    def settle(self) -> None:
        """Find the end: `duration` after the last rank's start and after the end of the one before it in the queue."""
        if self._work is not None:
            self._work.wait()
        # `_starts` is summed over the ranks, so all of them see the same latest start.
        self.end = self.stream.free = max(float(self._starts.max()), self.stream.free) + self.duration
        self.is_pending = False

    def finish(self) -> None:
        """Block until the virtual reduction has ended."""
        self.stream.settle(self)
        self.wait(max(0.0, self.end - perf_counter()))


@dataclass(frozen=True, kw_only=True)
class VirtualCollectives:
    """Makes a rank's virtual reductions and gathers, which share one queue."""

    schedule: Schedule
    costs: Costs
    worker: int
    rank: int
    holders: Mapping[int, tuple[int, ...]]
    """The ranks that hold each block, as `meeting_ranks` gives them."""
    transport: Transport
    wait: Wait = precise_wait
    stream: ReductionStream = field(default_factory=ReductionStream)

    def reductions(self) -> dict[int, VirtualReduction]:
        """Block id -> the virtual reduction of its gradients, in the order in which they are issued."""
        return self._collectives(Op.REDUCE_GRAD, self.costs.reduces)

    def gatherings(self) -> dict[int, VirtualReduction]:
        """Block id -> the virtual gathering of its weights, in the order in which they are issued."""
        return self._collectives(Op.UNSHARD, self.costs.unshards)

    def _collectives(self, op: Op, times: Sequence[Seconds]) -> dict[int, VirtualReduction]:
        found = {}
        for action in self.schedule.orders[self.worker]:
            if action.op is op:
                weights = self.schedule.placement.stages[action.stage].weights
                ranks = self.holders[weights]
                found[weights] = VirtualReduction(
                    duration=times[action.stage] if times else 0.0,
                    place=ranks.index(self.rank),
                    ranks=ranks,
                    transport=self.transport,
                    stream=self.stream,
                    wait=self.wait,
                )
        return found
