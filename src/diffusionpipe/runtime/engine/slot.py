"""The tensors that a worker holds of one micro-batch during an iteration."""

from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import GradientEdge

from diffusionpipe.ir import Range
from diffusionpipe.runtime.compute.split import Deferred


@dataclass(slots=True)
class Output:
    """A tensor that no other stage reads, a loss or a prediction, with its micro-batch and its rows of the batch."""

    name: str
    microbatch: int
    rows: Range
    """The rows of the output's samples in the batch."""
    value: Tensor


@dataclass(slots=True)
class Slot:
    """The tensors of one (stage, micro-batch). Empty between iterations; its dictionaries are never replaced."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Memory for received inputs, from the receive to the forward."""
    leaves: dict[str, Tensor] = field(default_factory=dict)
    """Inputs of the forward whose gradients the backward computes."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Outputs of the forward that another stage has still to read."""
    num_reads: int = 0
    """The number of reads of `outputs` that are still to come."""
    graph: dict[str, GradientEdge] = field(default_factory=dict)
    """Name of an output -> the edge of autograd's graph at which the backward begins."""
    arrived: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """Received gradients by (tensor, stage that read it)."""
    input_gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of the inputs that a producer has still to read."""
    num_gradient_reads: int = 0
    """The number of reads of `input_gradients` that are still to come."""
    deferred: Deferred = field(default_factory=Deferred)
    """The tensors that the weight gradients need, between I and W."""


def count_read(slot: Slot, is_gradient: bool) -> None:
    """Count a read of the slot's outputs (input gradients if `is_gradient`); they are dropped after the last read."""
    if is_gradient:
        slot.num_gradient_reads -= 1
        if not slot.num_gradient_reads:
            slot.input_gradients.clear()
    else:
        slot.num_reads -= 1
        if not slot.num_reads:
            slot.outputs.clear()
