"""A profile for a device that this machine lacks: operations and bytes, counted on fake tensors, over its rates.

Every operation's work is affine in the batch size, so two counts give all sizes; where torch chooses other operations
for another size, that size is counted by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from diffusionpipe.costs import LayerProfile, ModelGraph, Profile
from diffusionpipe.costs.devices import DeviceRates, device_rates
from diffusionpipe.costs.mode import EAGER, Mode
from diffusionpipe.errors import ConfigError
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.profiler.counted import LayerCount, count_layers
from diffusionpipe.profiler.layer_run import split_backward
from diffusionpipe.profiler.measured import BATCH_SIZES, Report, package_versions
from diffusionpipe.profiler.operations import Operation
from diffusionpipe.profiler.roofline import layer_seconds
from diffusionpipe.units import Seconds

_COUNTED = (2, 4)
"""The batch sizes that are counted; not 1, because torch treats dimensions of size 1 in other ways."""

Counts = dict[str, LayerCount]
_Clock = Callable[[Sequence[Operation]], Seconds]


def analytic_profile(
    graph: LayerGraph,
    model: ModelGraph,
    *,
    device: str,
    precision: str = "float32",
    batch_sizes: Sequence[int] = BATCH_SIZES,
    mode: Mode = EAGER,
    progress: Report | None = None,
) -> Profile:
    """A profile with the computed times and memory of every layer on a device, with the kernels of a mode.

    `device`: a name in `diffusionpipe.costs.devices`. I and W are as in a measured profile: W is the whole backward
    less I. A forward without gradients runs the same operations, so the profile has no times of its own for it.
    `progress` is called with (layers counted, all).

    Raises:
        ConfigError: the device is not known, or there is no batch size.
    """
    (profile,) = analytic_profiles(
        graph, model, devices=(device,), precision=precision, batch_sizes=batch_sizes, mode=mode, progress=progress
    )
    return profile


def analytic_profiles(
    graph: LayerGraph,
    model: ModelGraph,
    *,
    devices: Sequence[str],
    precision: str = "float32",
    batch_sizes: Sequence[int] = BATCH_SIZES,
    mode: Mode = EAGER,
    progress: Report | None = None,
) -> tuple[Profile, ...]:
    """The `analytic_profile` for each of these devices, in their order; the work is counted once.

    The devices must be of one type.

    Raises:
        ConfigError: a device is not known, or there is no batch size.
    """
    found = [device_rates(device) for device in devices]
    (device_type,) = {rates.device_type for rates in found}  # counted work depends on the type: casts differ
    sizes = tuple(sorted(set(batch_sizes)))
    if not sizes or sizes[0] < 1:
        raise ConfigError(f"batch sizes must be positive, e.g. 1,2,4,8; got {', '.join(map(str, batch_sizes)) or '-'}")

    columns = counts_at(sizes, graph, model, precision=precision, device_type=device_type, progress=progress)
    return tuple(
        Profile(
            graph=model,
            batch_sizes=sizes,
            layers=_layer_profiles(graph, columns, rates, mode),
            device=rates.title,
            device_type=device_type,
            precision=precision,
            source="analytic",
            mode=mode,
            versions=package_versions(),
        )
        for rates in found
    )


def counts_at(
    sizes: Sequence[int],
    graph: LayerGraph,
    model: ModelGraph,
    *,
    precision: str,
    device_type: str,
    progress: Report | None = None,
) -> list[Counts]:
    """For each of these batch sizes, in order: layer -> its operations and bytes.

    `progress` is called with (layers counted, all).
    """
    counted = 0

    def step() -> None:
        nonlocal counted
        counted += 1
        if progress is not None:
            # Where all sizes are counted by themselves, more layers are counted than were foreseen.
            progress(counted, max(counted, len(graph.layers) * min(len(sizes), len(_COUNTED))))

    def count(batch: int) -> Counts:
        return count_layers(graph, model, batch, precision=precision, device_type=device_type, step=step)

    return _all_sizes(count, sizes)


def with_kept(profile: Profile, graph: LayerGraph) -> Profile:
    """The profile with the bytes that layers keep from op I to op W added, counted at the profile's batch sizes.

    It is for profiles of older versions, which lack these bytes. `graph` is the model that was profiled.
    """
    columns = counts_at(
        profile.batch_sizes, graph, profile.graph, precision=profile.precision, device_type=profile.device_type
    )
    layers = tuple(
        replace(
            layer,
            kept=tuple(column[layer.name].kept for column in columns),
            kept_reads=columns[0][layer.name].kept_reads,
        )
        for layer in profile.layers
    )
    return replace(profile, layers=layers)


def _layer_profiles(
    graph: LayerGraph, columns: Sequence[Counts], rates: DeviceRates, mode: Mode
) -> tuple[LayerProfile, ...]:
    seconds = partial(layer_seconds, rates=rates, mode=mode)
    return tuple(
        _layer_profile(layer.name, [column[layer.name] for column in columns], seconds, rates.dispatch)
        for layer in graph.layers
    )


def _all_sizes(count: Callable[[int], Counts], sizes: Sequence[int]) -> list[Counts]:
    if len(sizes) <= len(_COUNTED):
        return [count(size) for size in sizes]
    low, high = (count(size) for size in _COUNTED)
    # torch chooses other operations for another size: no line leads from one to the other.
    if any(_names(low[name]) != _names(high[name]) for name in low):
        return [count(size) for size in sizes]
    return [{name: _between(low[name], high[name], size) for name in low} for size in sizes]


def _names(count: LayerCount) -> list[tuple[str, str]]:
    return [(op.name, op.dtype) for op in (*count.forward, *count.input_grad, *count.backward)]


def _between(low: LayerCount, high: LayerCount, batch: int) -> LayerCount:
    """A layer's count for `batch` samples, on the straight line through its counts at the two `_COUNTED` sizes."""
    share = (batch - _COUNTED[0]) / (_COUNTED[1] - _COUNTED[0])

    def at(one: float, other: float) -> float:
        return max(0.0, one + share * (other - one))  # the line may fall below 0 for small batches

    def operations(one: Sequence[Operation], other: Sequence[Operation]) -> tuple[Operation, ...]:
        return tuple(
            replace(a, flops=at(a.flops, b.flops), num_bytes=at(a.num_bytes, b.num_bytes))
            for a, b in zip(one, other, strict=True)
        )

    return LayerCount(
        has_inputs=low.has_inputs,
        is_trained=low.is_trained,
        forward=operations(low.forward, high.forward),
        input_grad=operations(low.input_grad, high.input_grad),
        backward=operations(low.backward, high.backward),
        activation=round(at(low.activation, high.activation)),
        workspace=round(at(low.workspace, high.workspace)),
        drawing=round(at(low.drawing, high.drawing)),
        kept=round(at(low.kept, high.kept)),
        kept_reads=low.kept_reads,
        cast=low.cast,
        copies=low.copies,
    )


def _layer_profile(name: str, counts: Sequence[LayerCount], seconds: _Clock, dispatch: Seconds) -> LayerProfile:
    backward = [_backward(count, seconds, dispatch) for count in counts]
    return LayerProfile(
        name=name,
        # A layer that only passes views on still costs the host one call.
        forward=tuple(seconds(count.forward) or dispatch for count in counts),
        input_grad=tuple(input_grad for input_grad, _ in backward),
        weight_grad=tuple(weight_grad for _, weight_grad in backward),
        activation=tuple(count.activation for count in counts),
        workspace=tuple(count.workspace for count in counts),
        drawing=tuple(count.drawing for count in counts),
        kept=tuple(count.kept for count in counts),
        kept_reads=counts[0].kept_reads,
        cast=seconds(counts[0].cast),
        copies=counts[0].copies,
    )


def _backward(count: LayerCount, seconds: _Clock, dispatch: Seconds) -> tuple[Seconds, Seconds]:
    """(seconds of I, seconds of W) of a layer; one that only passes views on still costs the host one `dispatch`."""
    whole = seconds(count.backward)
    if count.has_inputs or count.is_trained:
        whole = max(whole, dispatch)
    # Where nothing is computed, I and W share the call.
    input_grad = seconds(count.input_grad) or dispatch / 2
    return split_backward(whole, input_grad, has_inputs=count.has_inputs, is_trained=count.is_trained)
