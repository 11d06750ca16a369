"""Gradients of a worker: reset, and summed over everyone who holds the same weights."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from diffusionpipe.runtime.comm.transport import Pending, Transport
from diffusionpipe.runtime.machine.buffers import gradient_dtype, num_in_memory_of
from diffusionpipe.runtime.weights.squares import sum_of_squares
from diffusionpipe.units import Bytes

# The default of torch's DistributedDataParallel.
BUCKET_BYTES: Bytes = 25 * 2**20


class Reducible(Protocol):
    """The gradients of one block on one rank, which are summed over the ranks that hold the block."""

    def reset(self) -> None:
        """Forget the gradients of the last step."""
        ...

    def open(self) -> None:
        """Make room for gradients, before a backward."""
        ...

    def added(self, *, is_whole: bool) -> None:
        """Note that a backward has added to the gradients; more will be added, so each gets memory of its own.

        `is_whole`: whether it has added all gradients of a micro-batch (op B), or op W adds the others later.
        """
        ...

    def reduce(self) -> None:
        """Start to sum the gradients over the ranks that hold the block."""
        ...

    def finish(self) -> None:
        """Wait until the gradients are summed."""
        ...


class BlockGradients:
    """The gradients of one block's parameters, summed over all holders of the block at every step.

    If others hold the block too, the gradients live in a few flat buckets (each parameter's `.grad` is a view), so that
    a sum needs no copy. The sum starts with `reduce` and runs beside the next compute.

    Else autograd makes them in a step's first backward. Where a parameter is reshaped it may make a view: of the
    gradient of an activation, which is still to be sent or is put aside for W, or of another parameter's gradient. The
    next backward would add to both.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: tuple[int, ...], transport: Transport) -> None:
        """`ranks`: all holders of the block, over replicas and data parallelism."""
        self._parameters = tuple(parameters)
        self._ranks = ranks
        self._transport = transport
        self._buckets: list[Tensor] = []
        self._works: list[Pending] = []
        self._shared: list[nn.Parameter] = []
        """The parameters whose gradients may still share their memory with other tensors."""
        self.is_watched = False
        """Whether to compute `part` in each step; the caller sets it."""
        self.part: Tensor | None = None
        """The sum of squares of a part of the step's gradients, (): of the first micro-batch's where nobody else holds
        the block, else of the rank's own before they are summed over the holders. None: not watched."""
        # A block of one rank alone needs no buckets; autograd makes its gradients.
        if len(ranks) > 1:
            for bucket in split_by_size(self._parameters, BUCKET_BYTES):
                self._buckets.append(_flatten_gradients(bucket))

    def reset(self) -> None:
        """Forget the gradients of the last step."""
        self.part = None
        if self._buckets:
            for bucket in self._buckets:
                bucket.zero_()
        else:
            for parameter in self._parameters:
                parameter.grad = None
            self._shared = list(self._parameters)

    def open(self) -> None:
        """Nothing to do: there is room from the start, or autograd makes it."""

    def added(self, *, is_whole: bool) -> None:
        """Give each gradient that autograd has made since the reset memory of its own.

        If the block is watched and no other rank holds it, note the squares of the first micro-batch's gradients.
        """
        if self._shared:
            self._shared = [parameter for parameter in self._shared if not _is_separate(parameter)]
        # Squares of a sum over several micro-batches would say nothing of a single one, hence the first alone.
        if is_whole and self.is_watched and self.part is None and not self._buckets:
            self.part = self.squares()

    def squares(self) -> Tensor:
        """The sum of squares of all present gradients, float64, shape ()."""
        found = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        return sum_of_squares(found, self._parameters[0].device if self._parameters else torch.device("cpu"))

    def reduce(self) -> None:
        """Start to sum the gradients over the ranks that hold the block; nothing where this rank alone holds it."""
        if self.is_watched and self._buckets:
            self.part = self.squares()
        self._works = [self._transport.all_reduce(bucket, self._ranks) for bucket in self._buckets]

    def finish(self) -> None:
        """Wait until the gradients are summed over the ranks that hold the block."""
        for work in self._works:
            work.wait()
        self._works = []


def _is_separate(parameter: nn.Parameter) -> bool:
    """Whether the parameter has a gradient; one that shares its memory is first copied into memory of its own."""
    if parameter.grad is None:
        return False
    if num_in_memory_of(parameter.grad) > 1:
        # Other tensors lie in the same memory, and the next backward adds in place.
        parameter.grad = parameter.grad.clone()
    return True


def split_by_size(parameters: Sequence[nn.Parameter], limit: Bytes) -> list[list[nn.Parameter]]:
    """The parameters cut into runs, each of one dtype (also of gradients) and of at most `limit` bytes of gradients.

    A parameter that is larger has a run of its own.
    """
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        dtype = gradient_dtype(parameter)
        num_bytes = parameter.numel() * dtype.itemsize
        last = buckets[-1][0] if buckets else parameter
        is_alike = (last.dtype, gradient_dtype(last)) == (parameter.dtype, dtype)
        if not buckets or size + num_bytes > limit or not is_alike:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += num_bytes
    return buckets


def _flatten_gradients(parameters: Sequence[nn.Parameter]) -> Tensor:
    first = parameters[0]
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=gradient_dtype(first), device=first.device)
    start = 0
    for parameter in parameters:
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return flat
