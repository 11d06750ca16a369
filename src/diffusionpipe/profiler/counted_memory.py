"""The memory that one layer keeps for its backward, and its temporary memory, from one run on real or fake tensors."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from diffusionpipe.profiler.layer_run import LayerRun, weight_keys
from diffusionpipe.profiler.memory import LiveBytes, SavedStorages
from diffusionpipe.runtime.machine.buffers import storage_of
from diffusionpipe.units import Bytes

BeforeBackward = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
"""A function that is called with the outputs from which a backward starts, and their gradients."""


class Gauge(Protocol):
    """The methods of a counter of the bytes of tensors that live, now and at their peak."""

    @property
    def live(self) -> Bytes:
        """The bytes of tensors that live now."""
        ...

    @property
    def peak(self) -> Bytes:
        """The most bytes of tensors at once since the last restart."""
        ...

    def restart_peak(self) -> None:
        """Set the peak to the bytes that live now; from then on it is counted again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PutAside:
    """The bytes that a layer's op I keeps for its op W, and which of the layer's inputs; weights do not count."""

    own: Bytes = 0
    """Bytes of gradients, and of inputs of its modules that the layer has made itself."""
    reads: tuple[int, ...] = ()
    """The positions, among the tensors that the layer reads, of the tensors that stay too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRun:
    """The result of a layer's run for its memory: outputs, kept storages, and bytes at the peaks of its passes."""

    written: tuple[Tensor, ...]
    """The outputs of the layer, detached."""
    kept: SavedStorages
    """The storages of the tensors that the layer keeps for its backward."""
    forward: Bytes
    """Bytes of the forward at its peak, less the bytes at its end."""
    backward: Bytes
    """Bytes of the backward at its peak, less the bytes at its start; the gradients of the outputs are included."""
    drawing: Bytes
    """Bytes, at its peak, of a forward that keeps nothing for a backward; its outputs are included."""
    put_aside: PutAside
    """The tensors that the layer's I keeps for its W."""

    @property
    def workspace(self) -> Bytes:
        """The larger one of the bytes of forward and backward at their peaks."""
        return max(self.forward, self.backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWatch:
    """Contexts around a layer's forward and backward, and functions that are called between them."""

    forward: AbstractContextManager[object]
    """The context of the forward."""
    backward: AbstractContextManager[object]
    """The context of the backward."""
    before_backward: BeforeBackward
    """Called before the backward."""
    known: Callable[[Sequence[Tensor]], "KnownRun | None"]
    """(outputs) -> the bytes of an equal run, so that the rest of this run is left out; None: no such run is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRun:
    """The bytes of an earlier run of an equal layer; the fields are as in `MemoryRun`."""

    backward: Bytes
    drawing: Bytes
    put_aside: PutAside


def run_for_memory(run: LayerRun, gauge: Gauge, watch: MemoryWatch | None = None) -> MemoryRun:
    """Run a layer forward and backward; returns its outputs, the storages that it keeps, and its bytes at the peaks.

    `gauge`: counts bytes. `watch`: contexts and functions around the passes; None: none. If its `known` returns an
    equal run, only the forward runs.
    """
    watch = watch or MemoryWatch(
        forward=nullcontext(), backward=nullcontext(), before_backward=_nothing, known=lambda _: None
    )
    kept = SavedStorages()
    # A GPU's allocator counts always; live bytes are counted only inside.
    with gauge if isinstance(gauge, LiveBytes) else nullcontext():
        gauge.restart_peak()
        with kept, watch.forward:
            outputs = run.forward()
        forward = gauge.peak - gauge.live
        written = tuple(tensor.detach() for tensor in outputs)
        known = watch.known(outputs)
        if known is None:
            backward = _backward_workspace(run, outputs, gauge, watch)
            known = KnownRun(backward=backward, drawing=_drawing(run, gauge), put_aside=_put_aside(run))
    return MemoryRun(
        written=written,
        kept=kept,
        forward=forward,
        backward=known.backward,
        drawing=known.drawing,
        put_aside=known.put_aside,
    )


def _put_aside(run: LayerRun) -> PutAside:
    if run.is_frozen or not run.trained or not run.forwards:
        return PutAside()
    position_of = {storage_of(run.reads[name]): position for position, name in enumerate(run.layer.reads)}
    weights, own, reads = weight_keys(run), dict[int, Bytes](), set[int]()
    deferred = run.put_aside()
    for tensor in deferred.tensors():
        key = storage_of(tensor)
        if key in position_of:
            reads.add(position_of[key])
        elif key not in weights:
            own[key] = tensor.untyped_storage().nbytes()
    return PutAside(own=sum(own.values()), reads=tuple(sorted(reads)))


def _drawing(run: LayerRun, gauge: Gauge) -> Bytes:
    gauge.restart_peak()
    before = gauge.live
    run.forward(keeps=False)
    return gauge.peak - before


def _nothing(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    pass


def _backward_workspace(run: LayerRun, outputs: Sequence[Tensor], gauge: Gauge, watch: MemoryWatch) -> Bytes:
    starts, gradients = run.gradients_like(outputs)
    if run.is_frozen or not starts:
        return 0
    watch.before_backward(starts, gradients)
    gauge.restart_peak()
    before = gauge.live
    with watch.backward:
        run.backward(starts, gradients)
    return gauge.peak - before
