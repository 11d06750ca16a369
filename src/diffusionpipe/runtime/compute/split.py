"""Backwards in two parts: op I computes the gradients of a stage's inputs, op W, later, the gradients of its weights.

    F   y = x w        by a function of ours, for every linear layer, convolution and embedding with trained weights
    I   dx = dy w      autograd walks the graph as ever; where it meets such a function, x and dy are put aside
    W   dw += x dy     for all that was put aside, without autograd

Qi, Wan, Huang and Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, https://arxiv.org/abs/2401.10241, section 2.
There the split is made in the matrix products of one model; torch.distributed.pipelining makes it for any graph, but
walks that graph in Python for every micro-batch and keeps all of it until W. Here a layer says itself what W needs, I
frees everything else, and nothing is computed twice.

Every other use of a parameter (norms, embeddings added to the hidden states, a weight that is read without its module)
stays as autograd has it: its gradient is complete after I. That is always correct, and cheap for what is small;
`benchmarks/split` has the figures. Frozen weights have no W.

Autocast, activation checkpointing, tied weights and adapters need nothing: casts come from `runtime.compute.casts`, or
else the ones that autocast makes; tensors that I needs are saved with autograd, so that a checkpointed layer is
recomputed once, in I, and its recomputed inputs are put aside; gradients of the same parameter add up wherever they
come from.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from diffusionpipe.runtime.compute.backward import accumulate
from diffusionpipe.runtime.compute.casts import Casts

AddGradient = Callable[[Tensor, Tensor], None]
"""A function that adds to the gradients of a layer's parameters, from its input and the gradient of its output."""


class Deferred:
    """Tensors of one stage and micro-batch that wait for the weight gradients: op I adds them, op W uses them up."""

    def __init__(self) -> None:
        self._entries: deque[tuple[AddGradient, Tensor, Tensor]] = deque()
        self.told: Callable[[Tensor], None] | None = None
        """A function that is called with each tensor that is put aside, to count memory; None: no calls."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, compute: AddGradient, x: Tensor, gradient: Tensor) -> None:
        """Put a layer's input and the gradient of its output aside, for `compute(x, gradient)` in `run`.

        The input is detached: its graph, which op I has walked, would keep what the stage reads until W.
        """
        x = x.detach()
        self._entries.append((compute, x, gradient))
        if self.told is not None:
            self.told(x)
            self.told(gradient)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that are put aside; several may share a storage."""
        for _, x, gradient in self._entries:
            yield x
            yield gradient

    def run(self) -> None:
        """Compute the weight gradients of all layers that were put aside, and add them to the parameters' `.grad`.

        The tensors of each layer are dropped after it.
        """
        entries = self._entries
        with torch.no_grad():
            while entries:
                compute, x, gradient = entries.popleft()
                compute(x, gradient)


Forward = Callable[[Any, Deferred | None, Casts, Tensor], Tensor]
"""A module's forward, (module, deferred, casts, x), that reads copies of weights and puts tensors aside for W."""


def forwards_of(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, Forward]]:
    """(module, forward) for each module that has a forward in `FORWARDS`, which can defer weight gradients.

    Each module comes once.
    """
    for module in dict.fromkeys(modules):
        forward = FORWARDS.get(type(module).forward)
        if forward is not None:
            yield module, forward


def cast_weights(forwards: Iterable[tuple[nn.Module, Forward]]) -> Iterator[nn.Parameter]:
    """The parameters of these modules that are read in autocast's dtype: all but embeddings' weights."""
    for module, forward in forwards:
        if forward is not _embedding:
            yield from module.parameters(recurse=False)


def run_with(
    forwards: Iterable[tuple[nn.Module, Forward]],
    deferred: Deferred | None,
    casts: Casts,
    run: Callable[..., Any],
    *arguments: Any,
) -> Any:
    """Call `run(*arguments)` while the modules use these forwards; returns its result.

    With `deferred`, weight gradients are put aside in it; with None, autograd computes them. Weights are read as their
    copies in `casts`. A forward that an instance already has of its own, a hook of another library, is left alone.
    """
    changed = []
    try:
        for module, forward in forwards:
            if "forward" not in module.__dict__:
                module.__dict__["forward"] = partial(forward, module, deferred, casts)
                changed.append(module)
        return run(*arguments)
    finally:
        for module in changed:
            del module.__dict__["forward"]


def _can_wait(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether op W can compute the gradients: the weight is trained, and no weight is computed from parameters."""
    # W adds to `.grad` of leaves only.
    return weight.requires_grad and weight.is_leaf and (bias is None or bias.is_leaf)


def _cast(x: Tensor) -> Tensor:
    """The tensor in autocast's dtype; the tensor itself if autocast is off or would leave it as it is."""
    kind = x.device.type
    # autocast leaves float64 as it is.
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _copy(bias: Tensor | None, casts: Casts) -> Tensor | None:
    return None if bias is None else casts.of(bias)


def _linear(module: nn.Linear, deferred: Deferred | None, casts: Casts, x: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    if deferred is None or not _can_wait(weight, bias):
        return functional.linear(x, casts.of(weight), _copy(bias, casts))
    y: Tensor = _Linear.apply(deferred, casts, _cast(x), weight, bias)  # type: ignore[no-untyped-call]
    return y


class _Linear(Function):
    """A linear layer for autograd whose backward puts the weight gradient aside: input and output's gradient."""

    @staticmethod
    def forward(
        ctx: Any, deferred: Deferred, casts: Casts, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None
    ) -> Tensor:
        flat, w = x.reshape(-1, x.shape[-1]), _cast(casts.of(weight))  # (N, in)
        # W needs x, and I needs w only where x wants a gradient.
        ctx.save_for_backward(flat, w if ctx.needs_input_grad[2] else None)
        ctx.deferred, ctx.weight, ctx.bias, ctx.shape = deferred, weight, bias, x.shape
        y = functional.linear(flat, w, None if bias is None else _cast(casts.of(bias)))  # (N, out)
        # Not a view for autograd, so that it may be changed in place.
        shaped: Tensor = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], len(w)))
        return shaped

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, (x, w) = gradients[0].contiguous(), ctx.saved_tensors
        # The gradient as it came is put aside, not a view of it: autograd takes over what it alone refers to.
        ctx.deferred.add(partial(_add_linear, ctx.weight, ctx.bias), x, gradient)
        if w is None:
            return None, None, None, None, None
        return None, None, (gradient.reshape(-1, len(w)) @ w).view(ctx.shape), None, None


def _add_linear(weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, gradient: Tensor) -> None:
    gradient = gradient.reshape(-1, len(weight))  # (N, out)
    if weight.grad is not None and weight.grad.dtype is x.dtype:
        weight.grad.addmm_(gradient.t(), x)  # (out, in); one pass less over the gradient than a product and a sum
    else:
        accumulate(weight, gradient.t() @ x)
    if bias is not None and bias.requires_grad:
        accumulate(bias, gradient.sum(0))


def _convolution(module: Any, deferred: Deferred | None, casts: Casts, x: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    # An input without a batch axis has one axis less than the weight.
    is_plain = type(module)._conv_forward in _CONV_FORWARDS and x.ndim == weight.ndim
    # Modules pad with other values before they convolve, and torch.convolution accepts padding in numbers only.
    pads_zeros = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    if deferred is None or not (is_plain and pads_zeros and _can_wait(weight, bias)):
        plain: Tensor = module._conv_forward(x, casts.of(weight), _copy(bias, casts))  # as torch's own forwards do
        return plain
    # False and the zeros: the convolution is not transposed, so its output has no padding.
    how = (module.stride, module.padding, module.dilation, False, (0,) * (x.ndim - 2), module.groups)
    y: Tensor = _Convolution.apply(deferred, casts, how, _cast(x), weight, bias)  # type: ignore[no-untyped-call]
    return y


class _Convolution(Function):
    """A convolution for autograd whose backward puts the weight gradient aside: input and output's gradient."""

    @staticmethod
    def forward(
        ctx: Any, deferred: Deferred, casts: Casts, how: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None
    ) -> Tensor:
        w = _cast(casts.of(weight))
        ctx.save_for_backward(x, w if ctx.needs_input_grad[3] else None)
        ctx.deferred, ctx.how, ctx.weight, ctx.bias = deferred, how, weight, bias
        return torch.convolution(x, w, None if bias is None else _cast(casts.of(bias)), *how)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, w) = gradients, ctx.saved_tensors
        ctx.deferred.add(partial(_add_convolution, ctx.how, ctx.weight, ctx.bias), x, gradient)
        if w is None:
            return None, None, None, None, None, None
        of_input = torch.ops.aten.convolution_backward(gradient, x, w, None, *ctx.how, (True, False, False))[0]
        return None, None, None, of_input, None, None


def _add_convolution(how: Any, weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, gradient: Tensor) -> None:
    # The weight's values are not read, but backends want its dtype to be that of the others.
    like = weight if weight.dtype is x.dtype else torch.empty_like(weight, dtype=x.dtype)
    has_bias = bias is not None and bias.requires_grad
    _, of_weight, of_bias = torch.ops.aten.convolution_backward(
        gradient, x, like, [len(weight)] if has_bias else None, *how, (False, True, has_bias)
    )
    accumulate(weight, of_weight)
    if has_bias:
        assert bias is not None
        accumulate(bias, of_bias)


def _embedding(module: nn.Embedding, deferred: Deferred | None, casts: Casts, ids: Tensor) -> Tensor:
    # With max_norm a forward changes the weight, and sparse gradients are not added as dense ones.
    if deferred is None or not _can_wait(module.weight, None) or module.sparse or module.max_norm is not None:
        return nn.Embedding.forward(module, ids)
    # aten's number for "no padding index".
    padding = -1 if module.padding_idx is None else module.padding_idx
    how = (module.num_embeddings, padding, module.scale_grad_by_freq)
    y: Tensor = _Embedding.apply(deferred, how, ids, module.weight)  # type: ignore[no-untyped-call]
    return y


class _Embedding(Function):
    """An embedding for autograd whose backward puts the weight gradient aside: ids and output's gradient."""

    @staticmethod
    def forward(ctx: Any, deferred: Deferred, how: Any, ids: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.deferred, ctx.how, ctx.weight = deferred, how, weight
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        (gradient,), (ids,) = gradients, ctx.saved_tensors
        ctx.deferred.add(partial(_add_embedding, ctx.how, ctx.weight), ids, gradient)
        return None, None, None, None


def _add_embedding(how: Any, weight: nn.Parameter, ids: Tensor, gradient: Tensor) -> None:
    accumulate(weight, torch.ops.aten.embedding_dense_backward(gradient, ids, *how))


_CONV_FORWARDS = frozenset({nn.Conv1d._conv_forward, nn.Conv2d._conv_forward, nn.Conv3d._conv_forward})

FORWARDS: Mapping[Callable[..., Any], Forward] = MappingProxyType(
    {
        nn.Linear.forward: _linear,
        nn.Conv1d.forward: _convolution,
        nn.Conv2d.forward: _convolution,
        nn.Conv3d.forward: _convolution,
        nn.Embedding.forward: _embedding,
    }
)
"""torch's forward of a class of modules -> our forward in its place. Subclasses that keep torch's are found too."""
