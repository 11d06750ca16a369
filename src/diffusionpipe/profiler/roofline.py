"""Computed times of counted operations on a device, which this machine may lack.

    operation   max(FLOPs / (peak x efficiency) + ramp, bytes / (bandwidth x efficiency)) + what a kernel takes besides
    layer       the sum over its operations; where the host runs ahead of the device, no less than the host takes to
                dispatch them, elsewhere that time on top

Roofline model: Williams, Waterman, Patterson, 2009, https://doi.org/10.1145/1498765.1498785.

The mode of the kernels changes bytes and numbers of kernels:

    not channels last   convolutions' tensors are read and written again, `DeviceRates.relayouts` times
    plain attention     four or five kernels move the scores between them
    compiled            pointwise operations and norms move a part of their bytes in a part of the kernels
    fused norms         norms and casts move half of their bytes

>>> from diffusionpipe.costs.devices import device_rates
>>> product = Operation(name="mm", kind=SpeedLimit.MATMUL, dtype="bfloat16", flops=312e9 * 0.6, num_bytes=1e6)
>>> round(operation_seconds(product, device_rates("a100-80")) * 1e6)  # 1000 of computing, 35 ramp, 3 kernel
1038
"""

from collections.abc import Sequence
from dataclasses import replace

from diffusionpipe.costs.devices import DeviceRates
from diffusionpipe.costs.mode import EAGER, Mode
from diffusionpipe.profiler.operations import Operation, SpeedLimit
from diffusionpipe.units import Seconds

FUSED = 0.8
"""The part of the bytes and kernels of pointwise operations and norms that is left when they are compiled.

It was fitted to a framework that compiles parts of its model (`benchmarks/anchors`).
"""
_NORMS = ("group_norm", "layer_norm", "rms_norm", "softmax")
_SCORE_BYTES = {SpeedLimit.ATTENTION: 16, SpeedLimit.ATTENTION_BACKWARD: 30}
"""Bytes that plain attention moves for each score under autocast. Forward: the product writes 2, softmax in float32
reads 2 and writes 4, the cast reads 4 and writes 2, the second product reads 2. The backward is counted in the same
way."""
_SCORE_KERNELS = {SpeedLimit.ATTENTION: 5, SpeedLimit.ATTENTION_BACKWARD: 7}
_RECOMPUTED = 0.8
"""The operations of plain attention's backward divided by the counted ones of fused attention: four products of five.

Fused attention computes its scores again in the backward.
"""


def layer_seconds(operations: Sequence[Operation], rates: DeviceRates, mode: Mode = EAGER) -> Seconds:
    """The seconds that the operations take one after the other, with their dispatch by the host; 0 for none."""
    kernels = sum(operation_seconds(operation, rates, mode) for operation in operations)
    dispatch = len(operations) * rates.dispatch * (FUSED if mode.is_compiled else 1.0)
    return max(kernels, dispatch) if rates.is_asynchronous else kernels + dispatch


def operation_seconds(operation: Operation, rates: DeviceRates, mode: Mode = EAGER) -> Seconds:
    """The seconds that the device takes for one operation, which is one kernel for most, without its dispatch."""
    match operation.kind:
        case SpeedLimit.MEMORY:
            return _moving(operation, rates, mode)
        case SpeedLimit.CONVOLUTION:
            passes = 0 if mode.is_channels_last else rates.relayouts
            copying = passes * operation.num_bytes / (rates.bandwidth * rates.efficiency.memory)
            return _product(operation, rates, mode) + copying
        case SpeedLimit.MATMUL:
            return _product(operation, rates, mode)
        case _:
            return _attention(operation, rates, mode)


def _moving(operation: Operation, rates: DeviceRates, mode: Mode) -> Seconds:
    """The seconds that the device takes for a pointwise operation, a copy or a norm."""
    is_norm = any(name in operation.name for name in _NORMS)
    share = rates.efficiency.norm if is_norm else rates.efficiency.memory
    kernel, part = rates.kernel, 1.0
    if mode.is_compiled:
        share, kernel, part = rates.efficiency.memory, rates.kernel * FUSED, FUSED
    elif mode.has_fused_norms and (is_norm or operation.name == "_to_copy"):
        share, part = rates.efficiency.memory, 0.5
    return part * operation.num_bytes / (rates.bandwidth * share) + kernel


def _product(operation: Operation, rates: DeviceRates, mode: Mode) -> Seconds:
    """The seconds that the device takes for a matrix product or a convolution."""
    is_convolution = operation.kind is SpeedLimit.CONVOLUTION
    efficiency = rates.efficiency
    share = efficiency.matmul
    if is_convolution:
        share = efficiency.convolution_channels_last if mode.is_channels_last else efficiency.convolution
    computing = operation.flops / (rates.peak(operation.dtype, is_convolution=is_convolution) * share)
    moving = operation.num_bytes / (
        rates.bandwidth * (efficiency.convolution_memory if is_convolution else efficiency.memory)
    )
    return max(computing + min(computing, rates.ramp), moving) + rates.kernel


def _attention(operation: Operation, rates: DeviceRates, mode: Mode) -> Seconds:
    """The seconds that the device takes for attention, in one kernel or in several that move the scores."""
    is_backward = operation.kind is SpeedLimit.ATTENTION_BACKWARD
    if mode.has_flash_attention:
        share = rates.efficiency.attention_backward if is_backward else rates.efficiency.attention
        computing = operation.flops / (rates.peak(operation.dtype, is_convolution=False) * share)
        moving = operation.num_bytes / (rates.bandwidth * rates.efficiency.memory)
        return max(computing + min(computing, rates.ramp), moving) + rates.kernel
    flops = operation.flops * (_RECOMPUTED if is_backward else 1.0)
    product = _product(replace(operation, kind=SpeedLimit.MATMUL, flops=flops), rates, mode)
    scores = _SCORE_BYTES[operation.kind] * operation.scores / (rates.bandwidth * rates.efficiency.memory)
    return product + scores + (_SCORE_KERNELS[operation.kind] - 1) * rates.kernel
