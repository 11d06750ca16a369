"""The operations of each layer with their times: computed for a known device, or measured one by one on this machine.

    computed   the sum of the roofline model's times of a layer's operations; the rest of its time, the host's
               dispatch, is a line of its own
    measured   passes with every operation timed and passes with none take turns. A layer's time is the median of the
               latter; the time outside its operations is a line of its own

On a CPU with one thread times are the thread's own processor time, so that other programs do not count; waits that the
thread itself asks for are added, the least of all passes. On a GPU each operation is waited for, so that short ones
look longer than they are when the host runs ahead.
"""

import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.costs import ModelGraph
from diffusionpipe.costs.devices import DeviceRates, device_rates
from diffusionpipe.costs.mode import EAGER
from diffusionpipe.costs.operations import OUTSIDE, OperationReport, OperationUse
from diffusionpipe.models.graphs.graph import Layer, LayerGraph
from diffusionpipe.profiler.counted import count_layers
from diffusionpipe.profiler.inputs import random_inputs
from diffusionpipe.profiler.layer_run import LayerRun, layer_run, release
from diffusionpipe.profiler.measured import Report, device_name, silent
from diffusionpipe.profiler.operations import Operation, OperationTrace, SpeedLimit
from diffusionpipe.profiler.roofline import layer_seconds, operation_seconds
from diffusionpipe.profiler.substitution import buffers_on, weights_on
from diffusionpipe.runtime.compute.stage import Precision
from diffusionpipe.runtime.machine.heap import disable_malloc_trim
from diffusionpipe.units import Seconds

REPEATS = 5
_SIDE = 1024
"""The rows and columns of the matrices whose product measures the machine's peak of computing."""
_COPIED = 2**26
"""The number of bytes of the copy that measures the machine's bandwidth."""

Timed = tuple[Operation, Seconds]


def computed_operations(
    graph: LayerGraph, model: ModelGraph, *, device: str, precision: str, samples: int, progress: Report = silent
) -> OperationReport:
    """A report of the computed times and the work of every layer's operations on a known device.

    `device`: its name in `diffusionpipe.costs.devices`. `samples`: the batch size. `progress` is called with (layers
    done, all).

    Raises:
        ConfigError: the device is not known.
    """
    rates = device_rates(device)
    counted = 0

    def step() -> None:
        nonlocal counted
        counted += 1
        progress(counted, len(graph.layers))

    counts = count_layers(graph, model, samples, precision=precision, device_type=rates.device_type, step=step)
    uses: list[OperationUse] = []
    for layer in graph.layers:
        count = counts[layer.name]
        forward = layer_seconds(count.forward, rates) or rates.dispatch
        backward = layer_seconds(count.backward, rates)
        if count.has_inputs or count.is_trained:
            backward = max(backward, rates.dispatch)
        for is_backward, operations, whole in ((False, count.forward, forward), (True, count.backward, backward)):
            timed = [(operation, operation_seconds(operation, rates, EAGER)) for operation in operations]
            uses += _uses(layer, timed, whole, _Limits(rates), is_backward=is_backward)
    return OperationReport(
        device=rates.title,
        source="analytic",
        precision=precision,
        samples=samples,
        peak=rates.peak("bfloat16" if precision == "bfloat16" else "float32", is_convolution=False),
        bandwidth=rates.bandwidth,
        uses=tuple(uses),
    )


def measured_operations(
    graph: LayerGraph,
    model: ModelGraph,
    *,
    device: str,
    precision: str,
    samples: int,
    repeats: int = REPEATS,
    progress: Report = silent,
) -> OperationReport:
    """A report of the measured times and the work of every layer's operations on this machine.

    Times are medians of `repeats` passes. `samples`: the batch size. `device`: "cpu" or "cuda". On a CPU this process
    keeps its freed memory from then on, as in `profile_model`. `progress` is called with (layers done, all).
    """
    place = torch.device(device)
    if place.type == "cpu":
        disable_malloc_trim()  # as a run does
    limits = _Measured(place)
    own = Precision(device=place.type, autocast=torch.bfloat16 if precision == "bfloat16" else None)
    uses: list[OperationUse] = []
    with buffers_on(graph, place):
        tensors = random_inputs(graph, samples, place)
        last_reader = {name: number for number, layer in enumerate(graph.layers) for name in layer.reads}
        for number, layer in enumerate(graph.layers):
            with weights_on(graph, layer, place):
                run = layer_run(graph, model, layer, tensors, own.context, own.autocast)
                run.cast()
                written, found = _measure(run, place, repeats)
                uses += [
                    use
                    for is_backward, (timed, whole) in enumerate(found)
                    for use in _uses(layer, timed, whole, limits, is_backward=bool(is_backward))
                ]
                release(run)
            tensors.update(zip(layer.writes, written, strict=True))
            # Also tensors that no layer reads.
            for name in [name for name in tensors if last_reader.get(name, -1) <= number]:
                del tensors[name]
            progress(number + 1, len(graph.layers))
    return OperationReport(
        device=device_name(place),
        source="measured",
        precision=precision,
        samples=samples,
        peak=limits.peak,
        bandwidth=limits.bandwidth,
        uses=tuple(uses),
    )


class _Limits:
    """The peak of computing and the bandwidth of a known device."""

    def __init__(self, rates: DeviceRates) -> None:
        self._rates = rates

    def times(self, operation: Operation) -> tuple[Seconds, Seconds]:
        """(least seconds for an operation's arithmetic, least seconds for moving its bytes) on the device."""
        peak = self._rates.peak(operation.dtype, is_convolution=operation.kind is SpeedLimit.CONVOLUTION)
        return operation.flops / peak, operation.num_bytes / self._rates.bandwidth


class _Measured:
    """The peak of computing and the bandwidth of this machine, by one large product in float32 and one large copy."""

    def __init__(self, device: torch.device) -> None:
        one, other = (torch.randn(_SIDE, _SIDE, device=device) for _ in range(2))
        copied = torch.zeros(_COPIED, dtype=torch.uint8, device=device)
        # A multiplication and an addition for each product.
        self.peak = 2 * _SIDE**3 / _shortest(lambda: one @ other, device)
        self.bandwidth = 2 * _COPIED / _shortest(copied.clone, device)  # read and written

    def times(self, operation: Operation) -> tuple[Seconds, Seconds]:
        """(least seconds for an operation's arithmetic, least seconds for moving its bytes) on this machine."""
        return operation.flops / self.peak, operation.num_bytes / self.bandwidth


def _shortest(work: Callable[[], object], device: torch.device) -> Seconds:
    return min(_timed(work, device)[1].computing for _ in range(3 * REPEATS))


@dataclass(frozen=True, slots=True)
class _Took:
    """The time of some work: the time in which it computed, and the time in which it waited by itself."""

    computing: Seconds
    """Time in which the work computed."""
    waiting: Seconds
    """Time of waits that the work itself asked for, such as sleeps; 0 on a GPU and with several threads."""


def _timed(work: Callable[[], Any], device: torch.device) -> tuple[Any, _Took]:
    """Run some work; returns its result and its time. On a GPU or with several threads all time is computing."""
    own = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    _wait(device)
    start, began, waits = time.perf_counter(), own(), _own_waits()
    result = work()
    _wait(device)
    computing, whole = own() - began, time.perf_counter() - start
    # A thread that other programs displace has not given up its core by itself.
    return result, _Took(computing, max(0.0, whole - computing) if _own_waits() > waits else 0.0)


def _own_waits() -> int:
    """The number of times that this thread has given up its core by itself, as a sleep does."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _typical(took: Sequence[_Took]) -> Seconds:
    """The median of the computing times plus the least waiting time: other programs do not disturb every pass."""
    return median(one.computing for one in took) + min(one.waiting for one in took)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


class _TimedTrace(OperationTrace):  # type: ignore[no-untyped-call]  # torch has no annotations here
    """Notes every operation with its time."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.took: list[_Took] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result, took = _timed(lambda: func(*args, **kwargs), self._device)
        # Operations that only move views around are not noted, so their times are part of the time outside operations.
        if self.note(func, args, kwargs, result):
            self.took.append(took)
        return result


Pass = tuple[list[Timed], Seconds]
"""(operations of a layer's forward or backward with their median times, median time of it without their timing)."""


def _measure(run: LayerRun, device: torch.device, repeats: int) -> tuple[tuple[Tensor, ...], tuple[Pass, Pass]]:
    """Measure a layer; returns its outputs, and the times of its (forward, backward) and of their operations.

    `repeats` passes time each operation, and as many only the whole forward and backward.
    """
    written, *_ = _once(run, device, None)  # what is done once, such as choosing kernels, is done now
    plain: list[tuple[_Took, _Took]] = []
    traced: list[tuple[_TimedTrace, _TimedTrace]] = []
    for _ in range(repeats):
        plain.append(_once(run, device, None)[1:])
        traces = _TimedTrace(device), _TimedTrace(device)
        _once(run, device, traces)
        traced.append(traces)
    forward, backward = (
        (_medians([traces[i] for traces in traced]), _typical([took[i] for took in plain])) for i in (0, 1)
    )
    return written, (forward, backward)


def _once(
    run: LayerRun, device: torch.device, traces: tuple[_TimedTrace, _TimedTrace] | None
) -> tuple[tuple[Tensor, ...], _Took, _Took]:
    """Run a layer once; returns its outputs, the time of its forward and the time of its whole backward.

    `traces`: note the operations of forward and backward with their times; they make the returned times too long.
    """
    outputs, forward = _traced(run.forward, device, traces[0] if traces else None)
    written = tuple(output.detach() for output in outputs)
    starts, gradients = run.gradients_like(outputs)
    del outputs
    if not starts:
        return written, forward, _Took(0.0, 0.0)
    backward = partial(run.backward, starts, gradients)
    return written, forward, _traced(backward, device, traces[1] if traces else None)[1]


def _traced(work: Callable[[], Any], device: torch.device, trace: _TimedTrace | None) -> tuple[Any, _Took]:
    with trace or nullcontext():
        return _timed(work, device)


def _medians(traces: Sequence[_TimedTrace]) -> list[Timed]:
    """Each operation with its median time over the passes.

    If passes ran different operations, the operations of the last pass with their times in it.
    """
    last = traces[-1]
    if len({tuple(operation.name for operation in trace.operations) for trace in traces}) > 1:
        return [(operation, took.computing) for operation, took in zip(last.operations, last.took, strict=True)]
    times = (_typical(took) for took in zip(*(trace.took for trace in traces), strict=True))
    return list(zip(last.operations, times, strict=True))


def _uses(
    layer: Layer, timed: Sequence[Timed], whole: Seconds, limits: _Limits | _Measured, *, is_backward: bool
) -> Iterable[OperationUse]:
    """A layer's use of its time: an entry for each kind of operation, and one for the time outside of all operations.

    Nothing if nothing ran. `whole`: the time of the layer's forward or backward, with the operations `timed`.
    """
    kinds: dict[str, list[Timed]] = defaultdict(list)
    for operation, seconds in timed:
        kinds[operation.name].append((operation, seconds))
    for name, own in kinds.items():
        least = [limits.times(operation) for operation, _ in own]
        yield OperationUse(
            layer=layer.name,
            component=layer.component,
            is_backward=is_backward,
            name=name,
            calls=len(own),
            seconds=sum(seconds for _, seconds in own),
            flops=sum(operation.flops for operation, _ in own),
            num_bytes=sum(operation.num_bytes for operation, _ in own),
            computing=sum(computing for computing, _ in least),
            moving=sum(moving for _, moving in least),
        )
    outside = whole - sum(seconds for _, seconds in timed)
    if outside > 0:
        yield OperationUse(
            layer=layer.name,
            component=layer.component,
            is_backward=is_backward,
            name=OUTSIDE,
            calls=1,
            seconds=outside,
            flops=0.0,
            num_bytes=0.0,
            computing=0.0,
            moving=0.0,
        )
