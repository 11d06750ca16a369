"""How tensors travel between ranks.

Three implementations of one protocol: `ProcessTransport` (torch.distributed: gloo on CPUs, NCCL on GPUs),
`ThreadTransport` (ranks are threads of one process), and any that a test makes.
"""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """A send, receive or collective that has begun; `wait` blocks until it is done."""

    def wait(self) -> object:
        """Block the host (CPU) or the current stream (GPU) until it is done."""
        ...


class Transport(Protocol):
    """Point-to-point messages and sums between ranks; nothing here blocks but `Pending.wait`."""

    def send(self, tensor: Tensor, destination: int) -> Pending:
        """Start sending a contiguous tensor, which must not change until the work is done."""
        ...

    def recv(self, buffer: Tensor, source: int) -> Pending:
        """Start receiving into a contiguous buffer. Messages of one (source, destination) arrive in order."""
        ...

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        """Start summing a contiguous tensor over `ranks`, in place, with the same bits on all of them."""
        ...

    def reduce(self, tensor: Tensor, destination: int, ranks: tuple[int, ...]) -> Pending:
        """Start summing a contiguous tensor over `ranks` into the tensor of the rank `destination`.

        The tensors of the other ranks mean nothing afterwards.
        """
        ...

    def broadcast(self, tensor: Tensor, source: int, ranks: tuple[int, ...]) -> Pending:
        """Start copying the contiguous tensor of the rank `source` into the tensors of all `ranks`.

        All of them start their sums and broadcasts in the same order.
        """
        ...


class ProcessTransport:
    """Messages and sums between the processes of a job, by torch.distributed: gloo or NCCL; see `Transport`.

    On GPUs messages towards higher and towards lower ranks use process groups of their own, because torch's NCCL
    backend gives all messages of a group one communicator and one stream, on which crossing transfers wait for each
    other. On CPUs the job's own group carries both: gloo matches sends and receives by itself, and every group has a
    thread that wakes up a hundred times a second, on a core that could compute. Messages go to the groups' backends
    directly: on the way through a group and torch's dispatcher they take twice as long. Every rank must construct it
    with the same `summing` (process groups are created collectively).
    """

    def __init__(self, device: torch.device, *, summing: Sequence[tuple[int, ...]] = ()) -> None:
        """`device`: where all tensors are. `summing`: the sets of ranks that will sum tensors."""
        self._rank, self._device = dist.get_rank(), device
        self._own: list[dist.ProcessGroup] = []
        if dist.get_backend() == dist.Backend.GLOO:
            up = down = _job_group()
        else:
            world = range(dist.get_world_size())
            up, down = self._new_group(world), self._new_group(world)
        # torch's stubs of a backend know neither `send` nor `recv`.
        self._up: Any = up._get_backend(device)
        self._down: Any = down._get_backend(device)
        # Sorted, because every rank has to create all groups in the same order, also those without it.
        self._sums = {ranks: self._new_group(ranks) for ranks in sorted(set(summing)) if len(ranks) > 1}

    def _new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(list(ranks))
        if self._rank in ranks:
            self._own.append(group)
        return group

    def close(self) -> None:
        """Destroy the process groups that this transport has made, with their threads and connections.

        No method may be called after it, and no transfer or sum may be under way.
        """
        for group in self._own:
            dist.destroy_process_group(group)
        del self._up, self._down, self._sums, self._own

    def warm_up(self, channels: Collection[tuple[int, int]]) -> None:
        """Open the connections of these (source, destination) channels and of all sums, before the first step.

        NCCL makes a communicator at its first use and both ends must be there; every rank calls this with the same
        channels, and all walk through them in the same order.
        """
        token = torch.zeros(1, device=self._device)
        for source, destination in sorted(channels):
            if source == self._rank:
                self.send(token, destination).wait()
            elif destination == self._rank:
                self.recv(token, source).wait()
        for ranks in self._sums:
            if self._rank in ranks:
                self.all_reduce(token, ranks).wait()

    # Both ends choose by the direction of the message, so they choose the same group.
    def send(self, tensor: Tensor, destination: int) -> Pending:
        """Start sending a contiguous tensor to a rank; see `Transport`."""
        backend = self._up if destination > self._rank else self._down
        work: Pending = backend.send([tensor], destination, 0)
        return work

    def recv(self, buffer: Tensor, source: int) -> Pending:
        """Start receiving from a rank into a contiguous buffer; see `Transport`."""
        backend = self._up if source < self._rank else self._down
        work: Pending = backend.recv([buffer], source, 0)
        return work

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        """Start summing a contiguous tensor over `ranks`, in place; see `Transport`."""
        work: Pending = dist.all_reduce(tensor, group=self._sums[ranks], async_op=True)
        return work

    def reduce(self, tensor: Tensor, destination: int, ranks: tuple[int, ...]) -> Pending:
        """Start summing a contiguous tensor over `ranks` into the destination's; see `Transport`."""
        work: Pending = dist.reduce(tensor, destination, group=self._sums[ranks], async_op=True)
        return work

    def broadcast(self, tensor: Tensor, source: int, ranks: tuple[int, ...]) -> Pending:
        """Start copying the source's contiguous tensor to all `ranks`; see `Transport`."""
        work: Pending = dist.broadcast(tensor, source, group=self._sums[ranks], async_op=True)
        return work


def _job_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "torch.distributed has not been initialised"
    return group
