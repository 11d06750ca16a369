"""Gradients of a worker: reset, and summed over everyone who holds the same weights."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from diffusionpipe.runtime.transport import Transport, Work
from diffusionpipe.units import Bytes

BUCKET_BYTES: Bytes = 25 * 2**20


class Reducible(Protocol):
    """The gradients of one block on one rank."""

    def reset(self) -> None:
        """Forget the gradients of the last step."""
        ...

    def reduce(self) -> None:
        """Start summing."""
        ...

    def finish(self) -> None:
        """Wait until the sums are there."""
        ...


class BlockGradients:
    """The gradients of one block's parameters.

    If others hold the block too, the gradients live in a few flat buckets (each parameter's `.grad` is a view), so
    that a sum needs no copy. The sum starts with `reduce` and runs beside whatever is computed next.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: tuple[int, ...], transport: Transport) -> None:
        """`ranks`: all holders of the block, over replicas and data parallelism."""
        self._parameters = tuple(parameters)
        self._ranks = ranks
        self._transport = transport
        self._buckets: list[Tensor] = []
        self._works: list[Work] = []
        if len(ranks) > 1:
            for bucket in _split(self._parameters, BUCKET_BYTES):
                self._buckets.append(_flatten_gradients(bucket))

    def reset(self) -> None:
        """Forget the gradients of the last step."""
        if self._buckets:
            for bucket in self._buckets:
                bucket.zero_()
        else:
            for parameter in self._parameters:
                parameter.grad = None

    def reduce(self) -> None:
        """Start summing over the holders."""
        self._works = [self._transport.all_reduce(bucket, self._ranks) for bucket in self._buckets]

    def finish(self) -> None:
        """Wait until the sums are there."""
        for work in self._works:
            work.wait()
        self._works = []


def _split(parameters: Sequence[nn.Parameter], limit: Bytes) -> list[list[nn.Parameter]]:
    """Neighbouring parameters of one dtype in buckets of about `limit` bytes."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        num_bytes = parameter.numel() * parameter.element_size()
        if not buckets or size + num_bytes > limit or buckets[-1][0].dtype is not parameter.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += num_bytes
    return buckets


def _flatten_gradients(parameters: Sequence[nn.Parameter]) -> Tensor:
    first = parameters[0]
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
    start = 0
    for parameter in parameters:
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return flat
