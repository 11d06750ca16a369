"""The memory that one layer keeps and needs besides, from one run of it; on real and on fake tensors alike."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from diffusionpipe.profiler.layer_run import LayerRun, weight_keys
from diffusionpipe.profiler.memory import LiveBytes, SavedStorages, storage_key
from diffusionpipe.units import Bytes

BeforeBackward = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
"""Called with the outputs that a backward starts from and their gradients."""


class Gauge(Protocol):
    """Counts live bytes."""

    @property
    def live(self) -> Bytes:
        """Bytes that live now."""
        ...

    @property
    def peak(self) -> Bytes:
        """The most since the last restart."""
        ...

    def restart_peak(self) -> None:
        """Let the peak start from what lives now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PutAside:
    """The tensors that a layer's I leaves for its W, each storage once; weights do not count."""

    own: Bytes = 0
    """Gradients, and inputs of its modules that the layer has made itself."""
    reads: tuple[int, ...] = ()
    """Which of the tensors that the layer reads stay too, by their position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRun:
    """The result of one run."""

    written: tuple[Tensor, ...]
    """The outputs of the layer, detached."""
    kept: SavedStorages
    forward: Bytes
    """Bytes of the forward at its peak beyond those left at its end."""
    backward: Bytes
    """Bytes of the backward at its peak beyond those at its start, the gradients of the outputs included."""
    drawing: Bytes
    """Bytes of a forward that keeps nothing at its peak, its outputs included."""
    put_aside: PutAside

    @property
    def workspace(self) -> Bytes:
        """The larger one of the peaks of forward and backward, in bytes."""
        return max(self.forward, self.backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWatch:
    """Contexts and functions that watch the run."""

    forward: AbstractContextManager[object]
    backward: AbstractContextManager[object]
    before_backward: BeforeBackward
    known: Callable[[Sequence[Tensor]], "KnownRun | None"]
    """(outputs) -> the peaks of an equal run, if there was one: the rest of this run is then left out. Else None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRun:
    """Peaks of runs that are alike."""

    backward: Bytes
    drawing: Bytes
    put_aside: PutAside


def run_for_memory(run: LayerRun, gauge: Gauge, watch: MemoryWatch | None = None) -> MemoryRun:
    """Forward and backward of the layer, with its kept storages and its workspace."""
    watch = watch or MemoryWatch(
        forward=nullcontext(), backward=nullcontext(), before_backward=_nothing, known=lambda _: None
    )
    kept = SavedStorages()
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
    position_of = {storage_key(run.reads[name]): position for position, name in enumerate(run.layer.reads)}
    weights, own, reads = weight_keys(run), dict[int, Bytes](), set[int]()
    deferred = run.put_aside()
    for tensor in deferred.tensors():
        key = storage_key(tensor)
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
