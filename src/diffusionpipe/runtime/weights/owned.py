"""Parameters of a block that all ranks of a group hold, and each of which one rank updates.

                    owner                             all others
    REDUCE_GRAD     gets the sum of the gradients     send theirs
    update          steps the parameter               do nothing: they hold no state of the optimizer
    UNSHARD         broadcasts the new parameter      receive it in place of the old one

As in ZeRO's first stage (Rajbhandari et al., SC 2020, https://arxiv.org/abs/1910.02054), with parameters that are not
sliced. The two transfers move together what a sum over all ranks moves. UNSHARD comes at the start of an iteration, so
parameters travel beside the encoders and the first forwards.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor, nn

from diffusionpipe.runtime.comm.transport import Pending, Transport
from diffusionpipe.runtime.machine.buffers import gradient_dtype
from diffusionpipe.runtime.weights.bringing import Brought
from diffusionpipe.runtime.weights.gradients import BUCKET_BYTES, Reducible, split_by_size

ALIGNMENT = 16
"""Parameters start at multiples of this many numbers, so that kernels find them aligned."""


class Divided(Brought, Reducible, Protocol):
    """A block of which each rank that shares it updates a part of the parameters."""

    @property
    def stays(self) -> bool:
        """Whether this rank holds all weights between two steps, as they were when they last came from their owners."""
        ...

    @property
    def owned(self) -> Mapping[str, nn.Parameter]:
        """The parameters that this rank updates, by name."""
        ...


class OwnedBlock:
    """One block's trained parameters on one rank of the group that shares them: all hold them, one rank updates each.

    Parameters of one owner and their gradients lie together in buckets, so that neither transfer needs a copy. Mutable:
    transfers may be under way.
    """

    stays = True

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        owner_of: Mapping[str, int],
        rank: int,
        ranks: tuple[int, ...],
        transport: Transport,
    ) -> None:
        """`owner_of`: name of a trained parameter -> the rank that updates it, one of `ranks`."""
        self._ranks, self._transport = ranks, transport
        self._gathers: list[Pending] = []
        self._sums: list[Pending] = []
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self.owned = {name: parameter for name, parameter in trained.items() if owner_of[name] == rank}
        """The parameters that this rank updates, by name."""
        # Every rank walks through the same names, so buckets and their transfers have the same order everywhere.
        by_owner: dict[int, list[nn.Parameter]] = {}
        for name, parameter in trained.items():
            by_owner.setdefault(owner_of[name], []).append(parameter)
        self._buckets = [
            (owner, *_together(bucket))
            for owner, members in by_owner.items()
            for bucket in split_by_size(members, BUCKET_BYTES)
        ]
        """(owner, memory of its parameters, memory of their gradients) of each bucket, in one order on all ranks."""

    def prepare(self) -> None:
        """Start to bring the trained parameters from their owners."""
        self._gathers = [self._transport.broadcast(weights, owner, self._ranks) for owner, weights, _ in self._buckets]

    def present(self) -> None:
        """Wait until the parameters have come from their owners."""
        for work in self._gathers:
            work.wait()
        self._gathers = []

    def release(self) -> None:
        """Nothing to drop: the parameters stay."""

    def open(self) -> None:
        """Nothing to do: there is room for the gradients all the time."""

    def reset(self) -> None:
        """Forget the gradients of the last step."""
        for _, _, gradients in self._buckets:
            gradients.zero_()

    def added(self, *, is_whole: bool) -> None:
        """Nothing to do: the gradients lie in memory of their own from the start, and are not watched."""

    def reduce(self) -> None:
        """Start to sum each gradient at its owner; on other ranks its values are undefined then."""
        self._sums = [self._transport.reduce(gradients, owner, self._ranks) for owner, _, gradients in self._buckets]

    def finish(self) -> None:
        """Wait until the gradients are summed."""
        for work in self._sums:
            work.wait()
        self._sums = []


def _together(parameters: Sequence[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """Move parameters of one dtype into one piece of memory, and make room for their gradients in another.

    Returns (piece with the parameters, piece with the gradients).
    """
    places = list(accumulate((-(-p.numel() // ALIGNMENT) * ALIGNMENT for p in parameters), initial=0))
    like = parameters[0]
    weights = torch.zeros(places[-1], dtype=like.dtype, device=like.device)
    gradients = torch.zeros_like(weights, dtype=gradient_dtype(like))
    # Not strict: `places` ends with the length of all.
    for parameter, place in zip(parameters, places, strict=False):
        own = slice(place, place + parameter.numel())
        parameter.data = weights[own].view(parameter.shape).copy_(parameter.detach())
        parameter.grad = gradients[own].view(parameter.shape)
    return weights, gradients
