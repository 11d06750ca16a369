"""A profile measured on a device, layer by layer.

    C   the copies of weights that autocast reads, once in an iteration
    F   the forward, under autocast where training uses it
    B   the whole backward: gradients of inputs and parameters, added to existing `.grad` as micro-batches do
    I   the gradient of the inputs alone, from `torch.autograd.grad` with the inputs as its only targets
    W   B - I: the weights' part, at least `MIN_SHARE` of B where anything is trained
    P   the forward without gradients, of layers that training probes (self-conditioning)

So F + I + W is the time of training on a micro-batch, whether or not a schedule splits the backward. The layers run in
the order of the graph on random inputs, each on the outputs of the layers before it. As many at a time as `GROUP_BYTES`
allow are measured in passes (`profiler/passes.py`); weights are random where the graph has none, and only one group's
are there at a time. Each figure is a median after a warm-up.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from math import inf
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from diffusionpipe.costs import LayerProfile, ModelGraph, Profile
from diffusionpipe.errors import ConfigError
from diffusionpipe.models.graphs.graph import Layer, LayerGraph, own_parameters
from diffusionpipe.profiler.clock import Clock, CudaPeak
from diffusionpipe.profiler.counted_memory import Gauge, MemoryRun, run_for_memory
from diffusionpipe.profiler.inputs import check_memory, random_inputs
from diffusionpipe.profiler.layer_run import LayerRun, layer_run, release, weight_keys
from diffusionpipe.profiler.memory import KeptBytes, LiveBytes
from diffusionpipe.profiler.passes import Agree, LayerTimes, alone, least_host, time_passes
from diffusionpipe.profiler.substitution import buffers_on, weights_on
from diffusionpipe.profiler.sweeps import MOST_SWEEPS, SizeColumn, sweep
from diffusionpipe.profiler.waking import time_waking
from diffusionpipe.runtime.compute.stage import Precision
from diffusionpipe.runtime.machine.error_file import is_shortage
from diffusionpipe.runtime.machine.heap import disable_malloc_trim
from diffusionpipe.units import Bytes, Seconds

logger = logging.getLogger(__name__)

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
TYPICAL: Seconds = 0.02
"""The least time of all forwards at the batch size at which extra times after waits are measured."""
GROUP_BYTES: Bytes = 2**30
"""About the bytes of weights, gradients and activations of the layers that are measured together."""

Report = Callable[[int, int], None]
"""A function that is called with (work done, all work) to report progress; most count samples times layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """The model, device and repetitions of a measurement; `agree` keeps ranks in step that measure at the same time."""

    graph: LayerGraph
    model: ModelGraph
    device: torch.device
    precision: Precision
    repeats: int
    agree: Agree


def profile_model(
    graph: LayerGraph,
    model: ModelGraph,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    device: torch.device | str = "cpu",
    precision: str = "float32",
    repeats: int = 5,
    time_budget: Seconds = 120.0,
    progress: Report | None = None,
    agree: Agree = alone,
) -> Profile:
    """Measure every layer on a device; returns the profile with the times and bytes at each batch size.

    On a CPU this process keeps its freed memory from then on (`runtime/machine/heap.py`), as training in it will.

    Args:
        graph: the model; parameters may be on the meta device, their dtype is the one that is measured.
        model: its description, for the same precision.
        batch_sizes: samples, in any order. A size is left out, with a warning, when the budget would not last for it or
            the device's memory does not; the smallest one is always measured.
        device: where to measure.
        precision: "float32", "bfloat16" (autocast) or "float64".
        repeats: the least number of repetitions of each measurement. On a CPU, if it is more than one, sizes are
            measured again while their times change; all sweeps together are at most this number.
        time_budget: seconds after which no further size is begun.
        progress: called after each layer.
        agree: joins ranks that measure the same at the same time, see `profiler/together.py`.

    Raises:
        ConfigError: no batch size, or not even the smallest fits into the device's memory.
    """
    sizes = tuple(sorted(set(batch_sizes)))
    if not sizes or sizes[0] < 1:
        raise ConfigError(f"batch sizes must be positive, e.g. 1,2,4,8; got {', '.join(map(str, batch_sizes)) or '-'}")
    place = torch.device(device)
    setting = _Setting(
        graph=graph,
        model=model,
        device=place,
        precision=Precision(device=place.type, autocast=torch.bfloat16 if precision == "bfloat16" else None),
        repeats=repeats,
        agree=agree,
    )
    if place.type == "cpu":
        disable_malloc_trim()
    with buffers_on(graph, place):
        columns = _steady_columns(setting, sizes, time_budget, progress or silent)
    return Profile(
        graph=model,
        batch_sizes=tuple(columns),
        layers=tuple(_layer_profile(layer.name, list(columns.values())) for layer in graph.layers),
        device=device_name(place),
        device_type=place.type,
        precision=precision,
        source="measured",
        versions=package_versions(),
        waking=next((column.waking for column in columns.values() if column.waking), ()),
    )


def silent(done: int, total: int) -> None:
    """Do nothing with a report of progress, (done, total)."""


def _steady_columns(
    setting: _Setting, sizes: Sequence[int], budget: Seconds, progress: Report
) -> Mapping[int, SizeColumn]:
    """Measure all sizes and, on a CPU with repeats, sizes that are not steady again (`profiler/sweeps.py`).

    Returns batch size -> its times and bytes; sizes for which time or memory did not suffice are left out.
    """
    sweeps = min(setting.repeats, MOST_SWEEPS) if setting.device.type == "cpu" else 1
    end = time.perf_counter() + budget
    first = _columns(setting, sizes, budget, lambda done, total: progress(done, min(sweeps, 2) * total))

    def again(size: int) -> SizeColumn:
        return _column(setting, size, lambda _: None, waking_from=0.0 if first[size].waking else inf)

    columns = sweep(first, again, partial(_agree, setting), end, sweeps)
    progress(1, 1)
    return columns


def _columns(setting: _Setting, sizes: Sequence[int], budget: Seconds, progress: Report) -> dict[int, SizeColumn]:
    columns: dict[int, SizeColumn] = {}
    began = time.perf_counter()
    last: Seconds = 0.0
    num_layers = len(setting.graph.layers)
    for index, size in enumerate(sizes):
        start = time.perf_counter()
        expected = last * size / sizes[index - 1] if index else 0.0  # in proportion to the samples of the size before
        if index and setting.agree(start - began + expected) > budget:
            _warn_left_out(sizes[index:], f"{size} samples would take about {expected:.0f} s more than the time budget")
            break
        done, total = sum(sizes[:index]) * num_layers, sum(sizes) * num_layers
        try:
            columns[size] = _column(
                setting,
                size,
                # Defaults, as the loop has moved by the time that the callback is called.
                lambda n, d=done, t=total, s=size: progress(d + n * s, t),  # type: ignore[misc]
                waking_from=_waking_from(columns, is_last=index == len(sizes) - 1),
            )
        except (RuntimeError, MemoryError) as error:
            if not (isinstance(error, torch.cuda.OutOfMemoryError) or is_shortage(error)):
                raise
            torch.cuda.empty_cache()
            _tell_full(setting, error)
            if not columns:
                raise ConfigError(
                    f"not even {size} sample(s) of one layer fit into the memory of {device_name(setting.device)}; "
                    "use a smaller batch size, a lower resolution or --analytic"
                ) from error
            _warn_left_out(sizes[index:], "they do not fit in the device's memory")
            break
        last = time.perf_counter() - start
    return columns


def _warn_left_out(sizes: Sequence[int], reason: str) -> None:
    logger.warning("batch sizes %s are not profiled: %s", ", ".join(map(str, sizes)), reason)


class _FullElsewhereError(torch.cuda.OutOfMemoryError):
    """The error on a rank that measures along when another rank's device has no memory left."""


def _tell_full(setting: _Setting, error: RuntimeError | MemoryError) -> None:
    """Tell the ranks that measure along to give up too, unless one of them has told this rank.

    The message is an infinite time.
    """
    if not isinstance(error, _FullElsewhereError):
        setting.agree(inf)


def _agree(setting: _Setting, value: float) -> float:
    largest = setting.agree(value)
    if largest == inf:
        raise _FullElsewhereError
    return largest


def _waking_from(columns: Mapping[int, SizeColumn], *, is_last: bool) -> Seconds:
    """The least time of forwards from which they are also measured after waits; infinite if a size has done it."""
    if any(column.waking for column in columns.values()):
        return inf
    return 0.0 if is_last else TYPICAL


def _column(setting: _Setting, batch: int, progress: Callable[[int], None], *, waking_from: Seconds) -> SizeColumn:
    graph, model, began = setting.graph, setting.model, time.perf_counter()
    if setting.device.type == "cpu":
        check_memory(model, batch)
    tensors = random_inputs(graph, batch, setting.device)
    last_reader = {name: index for index, layer in enumerate(graph.layers) for name in layer.reads}
    ledger = KeptBytes(model)
    times: dict[str, LayerTimes] = {}
    workspace: dict[str, Bytes] = {}
    drawing: dict[str, Bytes] = {}
    kept: dict[str, Bytes] = {}
    copies: dict[str, Bytes] = {}
    waking: tuple[tuple[Seconds, Seconds], ...] = ()
    clock = Clock.of(setting.device)
    stop = 0
    while stop < len(graph.layers):
        with ExitStack() as weights:
            group, stop = _group(setting, stop, weights, tensors, ledger)
            workspace |= {run.layer.name: memory.workspace for run, memory in group}
            drawing |= {run.layer.name: memory.drawing for run, memory in group}
            kept |= {run.layer.name: memory.put_aside.own for run, memory in group}
            runs = [run for run, _ in group]
            copies |= {run.layer.name: _copied_bytes(run) for run in runs}
            agree = partial(_agree, setting)
            found = time_passes(runs, clock, setting.repeats, agree, probed=model.probed_layers)
            times |= found
            forward = agree(sum(one.forward for one in found.values()))
            if setting.device.type == "cpu" and not waking and forward >= waking_from:
                waking = time_waking(runs, clock, forward, agree)
        for name in [name for name in tensors if last_reader.get(name, -1) < stop]:  # tensors that no layer reads too
            del tensors[name]
        progress(stop)
    # The last meeting: here a rank also learns that another one ran out of memory after its own last layer.
    _agree(setting, 0.0)
    return SizeColumn(
        times=times,
        activation=ledger.totals(),
        workspace=workspace,
        drawing=drawing,
        kept=kept,
        kept_reads=ledger.put_aside,
        copies=copies,
        waking=waking,
        took=time.perf_counter() - began,
    )


def _group(
    setting: _Setting, start: int, weights: ExitStack, tensors: dict[str, Tensor], ledger: KeptBytes
) -> tuple[list[tuple[LayerRun, MemoryRun]], int]:
    """Run the layers from `start` on once, up to `GROUP_BYTES`; returns (run, memory) of each, and the next index.

    Their weights and gradients stay until `weights` is closed. Their outputs are added to `tensors`, and the bytes that
    they keep to `ledger`.
    """
    group: list[tuple[LayerRun, MemoryRun]] = []
    held: Bytes = 0
    stop = start
    for layer in setting.graph.layers[start:]:
        weights.enter_context(weights_on(setting.graph, layer, setting.device))
        run, written, memory, kept = _run_once(setting, layer, tensors, ledger)
        weights.callback(release, run)
        tensors.update(written)
        group.append((run, memory))
        stop += 1
        held += kept
        if held >= GROUP_BYTES:
            break
    return group, stop


def _run_once(
    setting: _Setting, layer: Layer, tensors: Mapping[str, Tensor], ledger: KeptBytes
) -> tuple[LayerRun, dict[str, Tensor], MemoryRun, Bytes]:
    """Run a layer once; returns its run, its outputs by name, its memory, and the bytes that measuring it will hold."""
    precision = setting.precision
    run = layer_run(setting.graph, setting.model, layer, tensors, precision.context, precision.autocast)
    run.cast()
    gauge: Gauge = CudaPeak(setting.device) if setting.device.type == "cuda" else LiveBytes()
    memory = run_for_memory(run, gauge)
    written = dict(zip(layer.writes, memory.written, strict=True))
    ledger.add(layer, memory.kept, run.reads, written, weight_keys(run), memory.put_aside.reads)
    parameters = own_parameters(layer, run.component)
    # A trained parameter comes with its gradient.
    num_bytes = sum(p.nbytes * (2 if p.requires_grad else 1) for p in parameters) + _copied_bytes(run)
    tensors_bytes = sum(tensor.nbytes for tensor in written.values())
    return run, written, memory, num_bytes + tensors_bytes + sum(memory.kept.storages.values())


def _copied_bytes(run: LayerRun) -> Bytes:
    return sum(copy.nbytes for copy in run.casts.copies)


def _layer_profile(name: str, columns: Sequence[SizeColumn]) -> LayerProfile:
    times = [column.times[name] for column in columns]
    return LayerProfile(
        name=name,
        forward=tuple(t.forward for t in times),
        input_grad=tuple(t.input_grad for t in times),
        weight_grad=tuple(t.weight_grad for t in times),
        forward_only=tuple(t.forward_only for t in times if t.forward_only is not None),
        activation=tuple(column.activation[name] for column in columns),
        workspace=tuple(column.workspace[name] for column in columns),
        drawing=tuple(column.drawing[name] for column in columns),
        kept=tuple(column.kept[name] for column in columns),
        kept_reads=columns[0].kept_reads[name],
        forward_spread=tuple(t.forward_spread for t in times),
        backward_spread=tuple(t.backward_spread for t in times),
        cast=mean(t.cast for t in times),
        copies=columns[0].copies[name],
        host=least_host([one.host for one in times]),
    )


def device_name(device: torch.device) -> str:
    """The device's name in profiles and clusters, e.g. "NVIDIA H200" or "AMD EPYC 7B13, 1 thread"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else os.uname().machine


def package_versions() -> tuple[tuple[str, str], ...]:
    """(package, version) of each installed package on which the times of a profile depend."""
    versions = [(name, version(name)) for name in ("diffusionpipe", "torch", "diffusers", "transformers")]
    cuda = torch.version.cuda
    return (*versions, ("cuda", cuda)) if cuda else tuple(versions)
