"""What a rank really holds for its backwards in one iteration: the figure that `timing.memory` predicts."""

from torch import Tensor

from diffusionpipe.ir import Range
from diffusionpipe.models.cut.glue import tables_of
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.profiler.memory import HeldBytes
from diffusionpipe.runtime.comm.transport import Pending, Transport
from diffusionpipe.runtime.engine.worker import Worker
from diffusionpipe.units import Bytes


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
