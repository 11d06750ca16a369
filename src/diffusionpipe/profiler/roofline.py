"""Times of counted operations on a device that need not be there.

    operation   max(FLOPs / (peak x efficiency), bytes / (bandwidth x efficiency)) + what a kernel takes besides
    layer       the sum over its operations; where the host runs ahead of the device, no less than the host takes to
                dispatch them, elsewhere that time on top

Roofline model: Williams, Waterman, Patterson, 2009, https://doi.org/10.1145/1498765.1498785.
"""

from collections.abc import Sequence

from diffusionpipe.costs.devices import DeviceRates
from diffusionpipe.profiler.operations import Kind, Operation
from diffusionpipe.units import Seconds


def layer_seconds(operations: Sequence[Operation], rates: DeviceRates) -> Seconds:
    """How long the operations take one after the other; 0 for none."""
    kernels = sum(operation_seconds(operation, rates) for operation in operations)
    dispatch = len(operations) * rates.dispatch
    return max(kernels, dispatch) if rates.is_asynchronous else kernels + dispatch


def operation_seconds(operation: Operation, rates: DeviceRates) -> Seconds:
    """How long one kernel takes."""
    is_convolution = operation.kind is Kind.CONVOLUTION
    share = rates.efficiency.convolution_memory if is_convolution else rates.efficiency.memory
    moving = operation.num_bytes / (rates.bandwidth * share)
    return max(_computing(operation, rates), moving) + rates.kernel


def _computing(operation: Operation, rates: DeviceRates) -> Seconds:
    if operation.kind is Kind.MEMORY:
        return 0.0
    peak = rates.peak(operation.dtype, is_convolution=operation.kind is Kind.CONVOLUTION)
    share: float = getattr(rates.efficiency, operation.kind.value)
    return operation.flops / (peak * share)
