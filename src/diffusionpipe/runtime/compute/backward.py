"""The backward of one stage and micro-batch."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge


def run_backward(outputs: Iterable[GradientEdge], gradients: Iterable[Tensor]) -> None:
    """Add the gradients of everything upstream to the leaves' `.grad`; frees the graph.

    Does what `torch.autograd.backward` does for given gradients, without its checks and its log in Python, which take
    as long as all other work of the executor for a micro-batch. The engine checks shapes, dtypes and devices once more
    itself. Megatron-LM calls it in the same way (core/pipeline_parallel/schedules.py: custom_backward).
    """
    Variable._execution_engine.run_backward(
        tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add a gradient to a parameter's, as autograd does it: `.grad` has the parameter's dtype and layout."""
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter).copy_(gradient) if _differs(parameter, gradient) else gradient
    else:
        parameter.grad.add_(gradient)


def _differs(parameter: Tensor, gradient: Tensor) -> bool:
    return parameter.dtype is not gradient.dtype or parameter.stride() != gradient.stride()
