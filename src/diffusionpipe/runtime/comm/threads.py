"""Ranks as threads of one process: the library's transport where no processes were started, and the tests'."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from diffusionpipe.errors import PeerError

# The failure of a rank wakes no other; ranks that wait look for it at this interval.
_POLL_SECONDS = 0.05
_Result = TypeVar("_Result")


@dataclass(slots=True)
class _Done:
    """A send that is over at once, because its channel has a copy of the tensor."""

    def wait(self) -> None:
        return None


class _Channel:
    """The queue of messages from one rank to another: the n-th receive posted gets the n-th message sent."""

    def __init__(self) -> None:
        self.arrived = threading.Condition()
        self.messages: dict[int, Tensor] = {}
        self.num_sent = 0
        self.num_posted = 0


@dataclass(slots=True)
class _Receive:
    """A receive that has begun; `wait` copies the message into the buffer as soon as it has been sent."""

    channel: _Channel
    turn: int
    """The number of the receive among all receives of the channel, from 0."""
    buffer: Tensor
    hub: "Hub"

    def wait(self) -> None:
        with self.channel.arrived:
            while self.turn not in self.channel.messages:
                self.hub.raise_if_aborted()
                self.channel.arrived.wait(_POLL_SECONDS)
            message = self.channel.messages.pop(self.turn)
        assert message.shape == self.buffer.shape, (message.shape, self.buffer.shape)
        assert message.dtype == self.buffer.dtype, (message.dtype, self.buffer.dtype)
        self.buffer.copy_(message)


@dataclass(slots=True)
class _Sum:
    """A collective under way: the last rank to arrive adds up in rank order, so that all get the same bits."""

    tensors: dict[int, Tensor] = field(default_factory=dict)
    """The tensors of the ranks that have arrived, by rank."""
    done: threading.Event = field(default_factory=threading.Event)
    """It is set when the result is in the tensors."""


@dataclass(slots=True)
class _SumWork:
    """One rank's part in a collective; `wait` blocks until the result is there."""

    sum: _Sum
    hub: "Hub"

    def wait(self) -> None:
        while not self.sum.done.wait(_POLL_SECONDS):
            self.hub.raise_if_aborted()


class Hub:
    """The state that ranks in threads share: channels of messages, sums under way, and the first rank's error."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._lock = threading.Lock()
        self._channels: dict[tuple[int, int], _Channel] = {}
        self._sums: dict[tuple[tuple[int, ...], int], _Sum] = {}
        self._failure: tuple[int, BaseException] | None = None

    def channel(self, source: int, destination: int) -> _Channel:
        """The queue of messages from one rank to another, made at the first call."""
        with self._lock:
            return self._channels.setdefault((source, destination), _Channel())

    def add(self, ranks: tuple[int, ...], turn: int, rank: int, tensor: Tensor, combine: "_Combine") -> _Sum:
        """Enter `rank`'s tensor into the `turn`-th collective over `ranks`; returns an object that can be awaited.

        The last rank to arrive calls `combine` with the tensors of all.
        """
        with self._lock:
            entry = self._sums.setdefault((ranks, turn), _Sum())
            entry.tensors[rank] = tensor
            if len(entry.tensors) == len(ranks):
                # All are there; the number of the turn has been counted, so the entry is never asked for again.
                del self._sums[ranks, turn]
                combine({r: entry.tensors[r] for r in ranks})
                entry.done.set()
            return entry

    def abort(self, rank: int, error: BaseException) -> None:
        """Note the error of the first rank that fails; ranks that wait for a message or a sum raise a PeerError."""
        with self._lock:
            self._failure = self._failure or (rank, error)

    def raise_if_aborted(self) -> None:
        """Raise PeerError if a rank has failed."""
        if self._failure is not None:
            rank, error = self._failure
            raise PeerError(f"rank {rank} failed: {error}") from error


class ThreadTransport:
    """Sends, receives and sums of one rank among threads of a process; see `Transport`."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank
        self._turns: dict[tuple[int, ...], int] = {}

    def send(self, tensor: Tensor, destination: int) -> _Done:
        """Start sending a contiguous tensor to a rank; see `Transport`."""
        channel = self._hub.channel(self._rank, destination)
        with channel.arrived:
            # A copy, because the sender may change its tensor before the receiver reads it.
            channel.messages[channel.num_sent] = tensor.detach().clone()
            channel.num_sent += 1
            channel.arrived.notify_all()
        return _Done()

    def recv(self, buffer: Tensor, source: int) -> _Receive:
        """Start receiving from a rank into a contiguous buffer; see `Transport`."""
        channel = self._hub.channel(source, self._rank)
        with channel.arrived:
            channel.num_posted += 1
            return _Receive(channel, channel.num_posted - 1, buffer, self._hub)

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> _SumWork:
        """Start summing a contiguous tensor over `ranks`, in place; see `Transport`."""
        return self._collective(tensor, ranks, _sum_everywhere)

    def reduce(self, tensor: Tensor, destination: int, ranks: tuple[int, ...]) -> _SumWork:
        """Start summing a contiguous tensor over `ranks` into the destination's; see `Transport`."""
        return self._collective(tensor, ranks, partial(_sum_at, destination))

    def broadcast(self, tensor: Tensor, source: int, ranks: tuple[int, ...]) -> _SumWork:
        """Start copying the source's contiguous tensor to all `ranks`; see `Transport`."""
        return self._collective(tensor, ranks, partial(_copy_from, source))

    def _collective(self, tensor: Tensor, ranks: tuple[int, ...], combine: "_Combine") -> _SumWork:
        turn = self._turns.get(ranks, 0)
        self._turns[ranks] = turn + 1
        return _SumWork(self._hub.add(ranks, turn, self._rank, tensor, combine), self._hub)


_Combine = Callable[[Mapping[int, Tensor]], None]
"""A function that computes a collective in place: rank -> its tensor, in the order of the ranks."""


@torch.no_grad()
def _sum_everywhere(tensors: Mapping[int, Tensor]) -> None:
    total = torch.stack(list(tensors.values())).sum(dim=0)
    for tensor in tensors.values():
        tensor.copy_(total)


@torch.no_grad()
def _sum_at(destination: int, tensors: Mapping[int, Tensor]) -> None:
    total = torch.stack(list(tensors.values())).sum(dim=0)
    for rank, tensor in tensors.items():
        if rank == destination:
            tensor.copy_(total)
        else:
            # The result is undefined on other ranks. NaN shows a program that reads it all the same.
            tensor.fill_(float("nan"))


@torch.no_grad()
def _copy_from(source: int, tensors: Mapping[int, Tensor]) -> None:
    for rank, tensor in tensors.items():
        if rank != source:
            tensor.copy_(tensors[source])


class ThreadRanks:
    """Ranks that are threads of this process; `run` calls one function on all of them, again and again.

    Each rank keeps its transport from one call to the next. After an error, or an interrupt, they are of no use any
    more: messages that some have sent are never received.
    """

    def __init__(self, num_ranks: int) -> None:
        self._hub = Hub(num_ranks)
        self._transports = tuple(ThreadTransport(self._hub, rank) for rank in range(num_ranks))

    def run(self, main: Callable[[int, ThreadTransport], _Result]) -> list[_Result]:
        """Call `main(rank, transport)` on each rank in a thread; returns the results in the order of ranks.

        Raises:
            Exception: the error of the rank that failed first; ranks that only waited for it are not reported.
            PeerError: a call before this one has failed.
        """
        self._hub.raise_if_aborted()
        results: dict[int, _Result] = {}
        errors: dict[int, BaseException] = {}

        def run(rank: int) -> None:
            try:
                results[rank] = main(rank, self._transports[rank])
            except BaseException as error:
                errors[rank] = error
                self._hub.abort(rank, error)

        threads = [
            threading.Thread(target=run, args=(rank,), name=f"rank{rank}") for rank in range(len(self._transports))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        # An interrupt reaches this thread alone; the ranks must hear of it.
        except BaseException as error:
            self._hub.abort(-1, error)
            raise
        # A PeerError only follows from the error of another rank.
        first = next((e for e in errors.values() if not isinstance(e, PeerError)), next(iter(errors.values()), None))
        if first is not None:
            raise first
        return [results[rank] for rank in range(len(self._transports))]


def run_threads(num_ranks: int, main: Callable[[int, ThreadTransport], _Result]) -> list[_Result]:
    """Call `main(rank, transport)` on each of `num_ranks` ranks in threads; returns the results in the order of ranks.

    Raises:
        Exception: the error of the rank that failed first; ranks that only waited for it are not reported.
    """
    return ThreadRanks(num_ranks).run(main)
