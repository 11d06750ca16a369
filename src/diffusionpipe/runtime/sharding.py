"""Parameters of a block in parts: each is owned by one rank of a group, and the others hold it only for a while.

                    owner                             all others
    at rest         weight, gradient, optimizer       nothing: the weight's storage is empty
    UNSHARD         broadcasts the weight             allocate it and receive
    F, B            read it                           read it
    RESHARD                                           empty the storage
    REDUCE_GRAD     gets the sum of the gradients     send theirs and drop it

A weight's `Parameter` and its storage stay the same objects all the time, so what autograd saved of it in the forward
is there again for the backward, once the storage has been filled anew. That a storage can be emptied behind the tensors
that lie in it is how torch's FSDP frees its parameters too.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diffusionpipe.runtime.transport import Transport, Work
from diffusionpipe.units import Bytes

ALIGNMENT: Bytes = 64
"""Parameters start at multiples of it, so that kernels find them aligned."""

MAX_REDUCTIONS = 1
"""Blocks whose reduction may be under way when the next one's has been started; what they send is held so long. One is
no delay: a block's compute waits for its gathering, which stands behind the last reduction but one on their stream."""


class Reductions:
    """What a rank's reductions hold until they are over. Mutable."""

    def __init__(self) -> None:
        self._pending: deque[tuple[list[Work], Callable[[], None]]] = deque()

    def add(self, works: list[Work], release: Callable[[], None]) -> None:
        """Note a reduction under way; `release` drops what it reads. Waits for the older ones."""
        self._pending.append((works, release))
        self._wait(MAX_REDUCTIONS)

    def finish(self) -> None:
        """Wait for all of them."""
        self._wait(0)

    def _wait(self, left: int) -> None:
        while len(self._pending) > left:
            works, release = self._pending.popleft()
            for work in works:
                work.wait()
            release()


class ShardedBlock:
    """One block's parameters on one rank of the group that shares them. Mutable: whole or in parts."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        owner_of: Mapping[str, int],
        rank: int,
        ranks: tuple[int, ...],
        transport: Transport,
        reductions: Reductions,
    ) -> None:
        """Parameters of others are emptied at once. `owner_of`: name -> the rank that owns it, one of `ranks`."""
        self._ranks, self._transport, self._reductions = ranks, transport, reductions
        self._works: list[Work] = []
        self._parts = [
            _Part.of(members, owner=owner, is_own=owner == rank)
            for (owner, _), members in _grouped(parameters, owner_of).items()
        ]
        self._own = [part for part in self._parts if part.is_own]
        self._others = [part for part in self._parts if not part.is_own]

    def unshard(self) -> None:
        """Start gathering."""
        for part in self._others:
            part.weights.untyped_storage().resize_(part.num_bytes)
        self._works = [self._transport.broadcast(part.weights, part.owner, self._ranks) for part in self._parts]

    def wait(self) -> None:
        """Wait until everything is gathered."""
        if self._works:
            for work in self._works:
                work.wait()
            self._works = []

    def reshard(self) -> None:
        """Empty what others own."""
        for part in self._others:
            part.weights.untyped_storage().resize_(0)

    def reset(self) -> None:
        """Forget the gradients of the last step."""
        for part in self._own:
            if part.gradients is not None:
                part.gradients.zero_()

    def open_gradients(self) -> None:
        """Give every trained parameter a gradient to add to, part by part in one piece of memory."""
        for part in self._parts:
            if part.gradients is None:
                part.allocate_gradients()

    def reduce(self) -> None:
        """Start summing the gradients at their owners; those of parameters of others are gone after it."""
        parts = [part for part in self._parts if part.trained]
        works, sent = [], []
        for part in parts:
            assert part.gradients is not None, "reduced before the first backward"
            works.append(self._transport.reduce(part.gradients, part.owner, self._ranks))
            if not part.is_own:
                sent.append(part.gradients)
                part.forget_gradients()
        self._reductions.add(works, sent.clear)

    def finish(self) -> None:
        """Wait until the sums are there."""
        self._reductions.finish()


@dataclass(slots=True)
class _Part:
    """The parameters of one dtype that one rank owns of a block."""

    owner: int
    is_own: bool
    weights: Tensor
    """All of them in one piece of memory."""
    num_bytes: Bytes
    trained: tuple[nn.Parameter, ...]
    places: tuple[int, ...]
    """Where each trained one starts in `weights`, and its gradient in `gradients`."""
    gradients: Tensor | None = None

    @staticmethod
    def of(members: Sequence[nn.Parameter], *, owner: int, is_own: bool) -> "_Part":
        """Moves the parameters into one piece of memory; the trained ones stand first."""
        ordered = sorted(members, key=lambda parameter: not parameter.requires_grad)
        places, size = [], 0
        for parameter in ordered:
            places.append(size)
            size += _aligned(parameter)
        first = ordered[0]
        weights = torch.zeros(size, dtype=first.dtype, device=first.device)
        for parameter, place in zip(ordered, places, strict=True):
            view = weights[place : place + parameter.numel()].view(parameter.shape)
            if is_own:
                view.copy_(parameter.detach())
            parameter.data = view
        trained = tuple(parameter for parameter in ordered if parameter.requires_grad)
        if not is_own:
            weights.untyped_storage().resize_(0)
        return _Part(
            owner=owner,
            is_own=is_own,
            weights=weights,
            num_bytes=size * first.element_size(),
            trained=trained,
            places=tuple(places[: len(trained)]),
        )

    def allocate_gradients(self) -> None:
        """Gradients of zero for the trained parameters."""
        if not self.trained:
            return
        size = self.places[-1] + _aligned(self.trained[-1])
        self.gradients = self.weights.new_zeros(size)
        for parameter, place in zip(self.trained, self.places, strict=True):
            parameter.grad = self.gradients[place : place + parameter.numel()].view(parameter.shape)

    def forget_gradients(self) -> None:
        """Drop them."""
        self.gradients = None
        for parameter in self.trained:
            parameter.grad = None


def _aligned(parameter: Tensor) -> int:
    """Elements that the parameter takes, up to the place where the next one may start."""
    unit = max(1, ALIGNMENT // parameter.element_size())
    return -(-parameter.numel() // unit) * unit


def _grouped(
    parameters: Mapping[str, nn.Parameter], owner_of: Mapping[str, int]
) -> dict[tuple[int, torch.dtype], list[nn.Parameter]]:
    """(owner, dtype) -> parameters, in the same order on every rank."""
    groups: dict[tuple[int, torch.dtype], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        groups.setdefault((owner_of[name], parameter.dtype), []).append(parameter)
    return groups
