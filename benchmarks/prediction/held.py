"""What a rank really holds for its backwards in one iteration: the figure that `timing.memory` predicts."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from diffusionpipe.ir import Range
from diffusionpipe.models.cut.glue import tables_of
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.runtime.comm.transport import Pending, Transport
from diffusionpipe.runtime.engine.worker import Worker
from diffusionpipe.runtime.machine.buffers import storage_of
from diffusionpipe.units import Bytes


class HeldBytes(saved_tensors_hooks):
    """Counts, while entered, the bytes that a rank holds for its backwards, each storage once, and their peak.

    These are tensors that autograd saves until nothing refers to them any more, and others that are noted (messages).
    Storages in `without` (weights, buffers of raw inputs and frozen outputs) do not count.
    """

    def __init__(self, without: Iterable[Tensor]) -> None:
        self.live: Bytes = 0
        self.peak: Bytes = 0
        self._without = {storage_of(tensor) for tensor in without}
        self._known: dict[int, weakref.ref[Any]] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.note(tensor)
        return tensor.detach()  # an operation that saves its own output must not hold itself

    def note(self, tensor: Tensor) -> None:
        """Count the tensor's storage for as long as it lives."""
        key, storage = storage_of(tensor), tensor.untyped_storage()
        if key in self._without or key in self._known:
            return
        num_bytes = storage.nbytes()

        def forget(_: object) -> None:
            self.live -= num_bytes
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, forget)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)


class NotingTransport:
    """Another transport that notes what it sends and receives while it has a counter. Mutable: the counter changes."""

    def __init__(self, transport: Transport) -> None:
        self.counter: HeldBytes | None = None
        self._transport = transport

    def send(self, tensor: Tensor, destination: int) -> Pending:
        """See `Transport`."""
        self._note(tensor)
        return self._transport.send(tensor, destination)

    def recv(self, buffer: Tensor, source: int) -> Pending:
        """See `Transport`."""
        self._note(buffer)
        return self._transport.recv(buffer, source)

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        """See `Transport`."""
        return self._transport.all_reduce(tensor, ranks)

    def broadcast(self, tensor: Tensor, source: int, ranks: tuple[int, ...]) -> Pending:
        """See `Transport`."""
        return self._transport.broadcast(tensor, source, ranks)

    def reduce(self, tensor: Tensor, destination: int, ranks: tuple[int, ...]) -> Pending:
        """See `Transport`."""
        return self._transport.reduce(tensor, destination, ranks)

    def _note(self, tensor: Tensor) -> None:
        if self.counter is not None:
            self.counter.note(tensor)


def count_held(worker: Worker, graph: LayerGraph, transport: NotingTransport) -> Bytes:
    """The most that the worker holds in activations and messages during one training iteration, which this runs.

    Weights, their copies, tables, and the rows of raw inputs and frozen outputs do not count; a storage counts once.
    `transport` is the worker's. A first iteration should be over: from then on receive buffers come from the pool.
    """
    stores = (worker.train.store, worker.train.first_store)
    rows = [store.view(name, Range(0, 0)) for store in stores for name in store]
    weights = [t for component in graph.components.values() for t in (*component.parameters(), *component.buffers())]
    worker.train.prepare()
    held = HeldBytes([*rows, *weights, *worker.casts.copies, *tables_of(graph.layers)])
    with held:
        transport.counter = held
        for deferred in worker.train.deferred:  # of a recomputed layer autograd saves nothing that could be seen
            deferred.told = held.note
        try:
            worker.train.run()
        finally:
            transport.counter = None
            for deferred in worker.train.deferred:
                deferred.told = None
    return held.peak
