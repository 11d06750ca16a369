"""The backward of one stage and micro-batch."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

from diffusionpipe.runtime.machine.buffers import gradient_dtype


def run_backward(outputs: Iterable[GradientEdge], gradients: Iterable[Tensor]) -> None:
    """Run autograd's backward from `outputs` with their `gradients`: it adds to the leaves' `.grad`, frees the graph.

    Does what `torch.autograd.backward` does for given gradients, without its checks and its log in Python, which take
    as long as all other work of the executor for a micro-batch. The engine checks shapes, dtypes and devices once more
    itself. Megatron-LM calls it in the same way (core/pipeline_parallel/schedules.py: custom_backward).
    """
    # Neither keep the graph nor make a graph of gradients, and no inputs: gradients go to all leaves.
    Variable._execution_engine.run_backward(
        tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add a gradient to the parameter's `.grad` as autograd does: in its memory layout and its `gradient_dtype`."""
    if parameter.grad is None:
        # As autograd does: a gradient of the right dtype and layout becomes `.grad` without a copy.
        own = gradient
        if _differs(parameter, gradient):
            own = torch.empty_like(parameter, dtype=gradient_dtype(parameter)).copy_(gradient)
        parameter.grad = own
    else:
        parameter.grad.add_(gradient)


def _differs(parameter: Tensor, gradient: Tensor) -> bool:
    return gradient_dtype(parameter) is not gradient.dtype or parameter.stride() != gradient.stride()
