"""Finds races between a GPU's streams in code that runs on the CPU.

On a GPU the host only issues kernels. Those of one stream run in order; those of different streams run in any order
that events allow. Here every operation of torch is a kernel on the stream that is current. The checker keeps for each
stream a vector clock: how many kernels of each stream are surely over when its next kernel begins.

    compute  F0 ........ event e        e.record(compute): e knows compute's clock
    up                   wait e, send   e.wait(up): up's clock is at least e's

It reports two kernels that touch the same bytes, one of which writes, if neither is surely over when the other begins.
Memory that is freed goes to the next allocation on the stream on which it was allocated, as in torch's caching
allocator: a kernel of another stream that may not be over by then is reported too.

Page-locked memory of the host is marked (`page_locked`). What touches it alone is no kernel: the host does it at once,
behind what it has waited for. So a report names a number that the host reads before its copy has arrived, and a buffer
that it fills again while a copy may still read it.

    copy      copy to the host's memory, event e
    host      e.synchronize(), read                e.synchronize(): the host knows what e knows

Messages and sums run as NCCL runs them: on one stream for each direction, and one for each group. Their works keep no
reference to tensors. Vector clocks are those of torch.cuda._sanitizer; this checker compares byte ranges instead of
pointers, and adds the allocator and the transport.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffusionpipe.runtime.comm.threads import ThreadTransport

_HERE = threading.local()
"""The checker of the rank that runs in this thread."""


@dataclass(eq=False)
class Stream:
    """A queue of kernels on the device of this thread's rank. Mutable: its clock."""

    name: str = "a stream"
    clock: dict["Stream", int] = field(default_factory=dict)

    def knows(self, other: Mapping["Stream", int]) -> None:
        """Its next kernel begins behind those."""
        for stream, number in other.items():
            self.clock[stream] = max(self.clock.get(stream, 0), number)

    def wait_stream(self, other: "Stream") -> None:
        self.knows(other.clock)

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def record_event(self) -> "Event":
        event = Event()
        event.record(self)
        return event


class Event:
    """A point in the work of a stream."""

    def __init__(self) -> None:
        self.clock: dict[Stream, int] = {}

    def record(self, stream: Stream) -> None:
        self.clock = dict(stream.clock)

    def wait(self, stream: Stream) -> None:
        stream.knows(self.clock)

    def synchronize(self) -> None:
        """The host waits, and whatever it issues later comes behind."""
        _HERE.streams.host.knows(self.clock)


@dataclass(slots=True)
class _Access:
    """What a kernel did to bytes of one storage."""

    start: int
    stop: int
    is_write: bool
    stream: Stream
    number: int
    kernel: str


class Streams(TorchDispatchMode):
    """Watches one rank. `races` are the reports."""

    def __init__(self) -> None:
        super().__init__()
        self.compute, self.host = Stream("compute"), Stream("host")
        self.current = self.compute
        self.transfers: dict[object, Stream] = {}
        self.races: list[str] = []
        self.num_kernels = 0
        self._accesses: dict[int, list[_Access]] = {}
        self._homes: dict[int, Stream] = {}
        """Storage -> the stream on which it was allocated."""
        self._freed: dict[Stream, list[_Access]] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._is_paused = False

    def __enter__(self) -> "Streams":
        _HERE.streams = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _HERE.streams = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What the CPU does in the place of a network is no kernel."""
        self._is_paused, before = True, self._is_paused
        try:
            yield
        finally:
            self._is_paused = before

    def page_locked(self, tensor: Tensor) -> Tensor:
        """A copy in the host's memory, made at once."""
        with self.paused():
            copy = tensor.clone()
        self.keep_on_host(copy)
        return copy

    def keep_on_host(self, tensor: Tensor) -> None:
        """Note that a tensor lies in the host's memory."""
        self._homes[self._watch(tensor.untyped_storage(), self.host)] = self.host

    def _is_hosts(self, tensor: Tensor) -> bool:
        return self._homes.get(tensor.untyped_storage()._cdata) is self.host

    def transfer(self, key: object) -> Stream:
        """The stream of a direction or of a group."""
        return self.transfers.setdefault(key, Stream(str(key)))

    def kernel(self, name: str, stream: Stream, reads: list[Tensor], writes: list[Tensor]) -> None:
        """A kernel goes to a stream."""
        self.num_kernels += 1
        stream.knows(self.host.clock)
        number = stream.clock[stream] = stream.clock.get(stream, 0) + 1
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                storage = self._watch(tensor.untyped_storage(), self.compute)
                start = tensor.storage_offset() * tensor.element_size()
                last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                if tensor.numel():
                    stop = start + (last + 1) * tensor.element_size()
                    self._access(storage, _Access(start, stop, is_write, stream, number, name))

    def _access(self, storage: int, new: _Access) -> None:
        kept = []
        for old in self._accesses.setdefault(storage, []):
            overlaps = old.start < new.stop and new.start < old.stop
            if overlaps and (old.is_write or new.is_write) and not _is_over(old, new.stream):
                self.races.append(f"{_words(new)} races with {_words(old)}")
            covers = new.start <= old.start and old.stop <= new.stop
            if not (covers and (new.is_write or (old.stream is new.stream and not old.is_write))):
                kept.append(old)
        kept.append(new)
        self._accesses[storage] = kept

    def _watch(self, storage: torch.UntypedStorage, home: Stream) -> int:
        """The storage's key; if it is a new one, it has been allocated on `home`."""
        key = storage._cdata
        if key not in self._watched:
            self._watched[key] = weakref.ref(storage, lambda _: self.free(key))
            self.allocate(key, home)
        return key

    def allocate(self, storage: int, stream: Stream) -> None:
        """Memory comes from what was freed on the stream before."""
        self._homes[storage] = stream
        stream.knows(self.host.clock)  # what uses the memory comes behind what the host has waited for
        for old in self._freed.pop(stream, []):
            if not _is_over(old, stream):
                self.races.append(f"memory is used again on {stream.name} while it may still be {_words(old)}")

    def free(self, storage: int, *, is_gone: bool = True) -> None:
        """Memory may be used again on its stream; the host's is not before the copies that its allocator knows of."""
        if is_gone:
            self._watched.pop(storage, None)
        home = self._homes.pop(storage, self.compute)
        if home is self.host:
            self._accesses.pop(storage, None)
            return
        self._freed.setdefault(home, []).extend(a for a in self._accesses.pop(storage, []) if a.stream is not home)

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """A storage is emptied or filled in its place."""
        self._watch(storage, self.current)
        if size == 0:
            self.free(storage._cdata, is_gone=False)
        else:
            self.allocate(storage._cdata, self.current)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_paused:
            return result
        given = [(v, a.alias_info) for v, a in zip(args, func._schema.arguments, strict=False)]
        named = {a.name: a for a in func._schema.arguments}
        given += [(v, named[k].alias_info) for k, v in (kwargs or {}).items()]
        writes = [t for v, info in given if info is not None and info.is_write for t in _tensors(v)]
        if not writes and any(r.alias_info is not None for r in func._schema.returns):
            return result  # a view
        reads = [t for v, _ in given for t in _tensors(v) if not any(t is w for w in writes)]
        written = {t.untyped_storage()._cdata for t in (*writes, *reads)}
        fresh = [t for t in _tensors(result) if t.untyped_storage()._cdata not in written]
        allocates = "empty" in str(func)  # and nothing else
        by_host = not allocates and bool(reads or writes) and all(map(self._is_hosts, (*reads, *writes)))
        stream = self.host if by_host else self.current
        for tensor in fresh:
            self._watch(tensor.untyped_storage(), stream)
        if not allocates:
            self.kernel(str(func), stream, reads, [*writes, *fresh])
        return result


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def _is_over(access: _Access, stream: Stream) -> bool:
    """Whether the stream's next kernel begins behind it."""
    return stream.clock.get(access.stream, 0) >= access.number


def _words(access: _Access) -> str:
    return f"{'written' if access.is_write else 'read'} by {access.kernel} on {access.stream.name}"


@dataclass(slots=True)
class Work:
    """A transfer: on a GPU waiting for it blocks the current stream."""

    streams: Streams
    event: Event
    inner: Any

    def wait(self) -> None:
        with self.streams.paused():
            self.inner.wait()
        self.event.wait(self.streams.current)


class StreamTransport:
    """The transport of threads, on streams as NCCL's."""

    def __init__(self, inner: ThreadTransport, rank: int, streams: Streams) -> None:
        self._inner, self._rank, self._streams = inner, rank, streams

    def _start(self, key: object, kernel: str, start: Callable[[], Any], *, reads: Any = (), writes: Any = ()) -> Work:
        streams, event = self._streams, Event()
        stream = streams.transfer(key)
        stream.wait_stream(streams.current)
        streams.kernel(kernel, stream, list(reads), list(writes))
        event.record(stream)
        with streams.paused():
            return Work(streams, event, start())

    def send(self, tensor: Tensor, destination: int) -> Work:
        key = "up" if destination > self._rank else "down"
        return self._start(key, f"send to {destination}", lambda: self._inner.send(tensor, destination), reads=[tensor])

    def recv(self, buffer: Tensor, source: int) -> Work:
        key = "up" if source < self._rank else "down"
        return self._start(key, f"receive from {source}", lambda: self._inner.recv(buffer, source), writes=[buffer])

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Work:
        return self._start(ranks, "sum", lambda: self._inner.all_reduce(tensor, ranks), writes=[tensor])

    def reduce(self, tensor: Tensor, destination: int, ranks: tuple[int, ...]) -> Work:
        is_own = destination == self._rank
        return self._start(
            ranks,
            f"sum at {destination}",
            lambda: self._inner.reduce(tensor, destination, ranks),
            **{"writes" if is_own else "reads": [tensor]},
        )

    def broadcast(self, tensor: Tensor, source: int, ranks: tuple[int, ...]) -> Work:
        is_own = source == self._rank
        return self._start(
            ranks,
            f"broadcast from {source}",
            lambda: self._inner.broadcast(tensor, source, ranks),
            **{"reads" if is_own else "writes": [tensor]},
        )


@contextmanager
def _on_stream(stream: Stream) -> Iterator[None]:
    streams = _HERE.streams
    if streams is None:  # before or after what is watched
        yield
        return
    streams.current, before = stream, streams.current
    try:
        yield
    finally:
        streams.current = before


_BEFORE = Stream("before")
"""What is current while nothing is watched."""


def page_locked(tensor: Tensor) -> Tensor:
    """A copy in page-locked memory of the host, for what is watched in this thread."""
    found: Tensor = _HERE.streams.page_locked(tensor)
    return found


@contextmanager
def without_order() -> Iterator[None]:
    """What this thread's current stream waits for in the block does not count."""
    stream = _current_stream()
    clock = dict(stream.clock)
    try:
        yield
    finally:
        stream.clock = clock


def _current_stream() -> Stream:
    streams = getattr(_HERE, "streams", None)
    return _BEFORE if streams is None else streams.current


BACKEND = SimpleNamespace(Stream=Stream, Event=Event, stream=_on_stream, current_stream=_current_stream)
"""In the place of torch.cuda."""


@contextmanager
def devices_with_streams() -> Iterator[None]:
    """The CPU is a device with streams for whatever asks torch for its module."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        streams = getattr(_HERE, "streams", None)
        if streams is not None and not streams._is_paused:
            streams.resized(storage, size)
        return resize(storage, size)

    with (
        mock.patch.object(torch, "get_device_module", side_effect=lambda device=None: BACKEND),
        mock.patch.object(torch.UntypedStorage, "resize_", resized),
    ):
        yield
