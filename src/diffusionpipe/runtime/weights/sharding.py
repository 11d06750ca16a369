"""Parameters of a block in parts: each is owned by one rank of a group, and the others hold it only for a while.

                    owner                             all others
    at rest         weight, gradient, optimizer       nothing: the weight's storage is empty
    UNSHARD         broadcasts the weight             allocate it and receive
    F, B            read it                           read it
    RESHARD                                           empty the storage
    REDUCE_GRAD     gets the sum of the gradients     send theirs and drop it

A weight's `Parameter` and its storage stay the same objects all the time, so what autograd saved of it in the forward
is there again for the backward, once the storage has been filled again. That a storage can be emptied under the tensors
that lie in it is how torch's FSDP frees its parameters too.

Under autocast the weights of linear layers and convolutions are cast by their owner, and the narrow copies travel: half
the bytes, one cast instead of one on every rank in every forward, and no copy is left for the backward. The gradients
have the bits that they have without. On a GPU both run beside the compute, on a stream of their own.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from diffusionpipe.runtime.comm.transport import Pending, Transport
from diffusionpipe.units import Bytes

ALIGNMENT: Bytes = 64
"""Parameters and their copies start at multiples of it, so that kernels find them aligned."""

MAX_REDUCTIONS = 1
"""The most blocks whose reduction may be under way when the next one's has been started; until then the tensors that
they send are held. One causes no delay: a block's compute waits for its gathering, which follows the last reduction but
one on their stream."""


class Reductions:
    """The reductions of one rank that are under way, with the tensors that they send, and the stream of its gathers."""

    def __init__(self) -> None:
        self._pending: deque[tuple[list[Pending], Callable[[], None]]] = deque()
        self._gathers: Any = None

    def gathers(self, backend: Any) -> Any:
        """The one stream on which all blocks of this rank are gathered, made at the first call.

        `backend`: torch's module of the device, such as `torch.cuda`.
        """
        if self._gathers is None:
            self._gathers = backend.Stream()
        return self._gathers

    def add(self, works: list[Pending], release: Callable[[], None]) -> None:
        """Note a reduction under way, and wait for the ones before it; `release` is called when it is over."""
        self._pending.append((works, release))
        self._wait(MAX_REDUCTIONS)

    def finish(self) -> None:
        """Wait for all reductions under way."""
        self._wait(0)

    def _wait(self, left: int) -> None:
        while len(self._pending) > left:
            works, release = self._pending.popleft()
            for work in works:
                work.wait()
            release()


class ShardedBlock:
    """One block's parameters in parts: each stays with its owner, and is gathered on all ranks while it is read.

    Mutable: whole or in parts.
    """

    stays = False

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        owner_of: Mapping[str, int],
        rank: int,
        ranks: tuple[int, ...],
        transport: Transport,
        reductions: Reductions,
        narrow: Collection[nn.Parameter] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        """`owner_of`: name of a parameter -> the rank that owns it, one of `ranks`; others' parameters are emptied.

        Parameters in `narrow` are gathered as copies of `dtype`, which must be read in their place (see `copies`).
        """
        self._ranks, self._transport, self._reductions = ranks, transport, reductions
        self._backend = torch.get_device_module(next(iter(parameters.values())).device if parameters else "cpu")
        self._stream = reductions.gathers(self._backend)
        self._works: list[Pending] = []
        self._parts: list[_Part] = []
        self.owned = {name: parameter for name, parameter in parameters.items() if owner_of[name] == rank}
        """The parameters that this rank owns, by name."""
        self.copies: dict[nn.Parameter, Tensor] = {}
        """Parameter in `narrow` -> its copy, which is gathered and read in its place and passes its gradient on."""
        for (owner, _, is_narrow), members in _grouped(parameters, owner_of, narrow).items():
            part = _Part(members, owner=owner, is_own=owner == rank, dtype=dtype if is_narrow else None)
            self._parts.append(part)
            self.copies |= part.copies

    def prepare(self) -> None:
        """Start gathering the parameters on the stream of gathers: after the compute so far, beside the one that comes.

        The gathered parameters are allocated there too. Its memory, given back by `release`, is not used again before
        all that has been computed with it: the next gathering waits for that.
        """
        # Memory that `release` gave back may still be read by compute that was issued before.
        self._stream.wait_stream(self._backend.current_stream())
        with self._backend.stream(self._stream):
            for part in self._parts:
                part.fill()
            self._works = [self._transport.broadcast(part.gathered, part.owner, self._ranks) for part in self._parts]

    def present(self) -> None:
        """Wait until all parameters are gathered."""
        if self._works:
            for work in self._works:
                work.wait()
            self._works = []

    def release(self) -> None:
        """Give back the memory of parameters that other ranks own, and of all narrow copies."""
        for part in self._parts:
            part.empty()

    def reset(self) -> None:
        """Forget the gradients of the last step."""
        for part in self._parts:
            if part.gradients is not None:
                part.gradients.zero_()

    def open(self) -> None:
        """Give every trained parameter a gradient to add to, part by part in one piece of memory."""
        for part in self._parts:
            part.open_gradients()

    def added(self, *, is_whole: bool) -> None:
        """Nothing to do: the gradients lie in memory of their own from the start, and are not watched."""

    def reduce(self) -> None:
        """Start summing the gradients at their owners; gradients of other ranks' parameters are gone after it."""
        works, sent = [], []
        for part in self._parts:
            if part.trained:
                assert part.gradients is not None, "reduced before the first backward"
                works.append(self._transport.reduce(part.gradients, part.owner, self._ranks))
                # The owner's gradients become the sum and stay for the update.
                if not part.is_own:
                    sent.append(part.gradients)
                    part.forget_gradients()
        self._reductions.add(works, sent.clear)

    def finish(self) -> None:
        """Wait until all gradients of this rank's reductions are summed."""
        self._reductions.finish()


class _Part:
    """The parameters of one dtype that one rank owns of a block, in one piece of memory."""

    def __init__(self, members: Sequence[nn.Parameter], *, owner: int, is_own: bool, dtype: torch.dtype | None) -> None:
        """Moves the parameters into one piece of memory, the trained ones first.

        `dtype`: of the copies that travel; None: the parameters themselves do.
        """
        self.owner, self.is_own = owner, is_own
        # Trained parameters come first, so their gradients are one piece from 0 on.
        ordered = sorted(members, key=lambda parameter: not parameter.requires_grad)
        places = list(accumulate((_aligned(parameter) for parameter in ordered), initial=0))
        like = ordered[0]
        self._weights = torch.zeros(places[-1], dtype=like.dtype, device=like.device)
        for parameter, place in zip(ordered, places, strict=False):
            view = self._weights[place : place + parameter.numel()].view(parameter.shape)
            if is_own:
                view.copy_(parameter.detach())
            parameter.data = view
        # Only the memory goes: views and shapes stay, and `fill` gives the storage its bytes again.
        if not is_own:
            self._weights.untyped_storage().resize_(0)
        self.trained = [
            (parameter, place) for parameter, place in zip(ordered, places, strict=False) if parameter.requires_grad
        ]
        self.gradients: Tensor | None = None
        self.gathered = self._weights if dtype is None else torch.empty_like(self._weights, dtype=dtype)
        """The tensor that travels: the parameters themselves or their copies. Its storage is empty while the block is
        in parts."""
        self._num_bytes = places[-1] * self.gathered.element_size()
        self._is_kept = is_own and dtype is None
        self.copies: dict[nn.Parameter, Tensor] = {}
        if dtype is not None:
            self.copies = {
                parameter: _copy_of(parameter, self.gathered, place)
                for parameter, place in zip(ordered, places, strict=False)
            }
            self.empty()

    def fill(self) -> None:
        """Give `gathered` its memory again; the owner writes its parameters or their copies into it."""
        if not self._is_kept:
            self.gathered.untyped_storage().resize_(self._num_bytes)
            if self.is_own:
                self.gathered.copy_(self._weights)

    def empty(self) -> None:
        """Give back the memory of `gathered`, unless it is the memory in which the owner keeps its parameters."""
        if not self._is_kept:
            self.gathered.untyped_storage().resize_(0)

    def open_gradients(self) -> None:
        """Give the trained parameters gradients of zeros in one piece of memory, if they have none yet."""
        if self.gradients is not None or not self.trained:
            return
        # Where the last trained parameter ends, the gradients end.
        last, place = self.trained[-1]
        self.gradients = self._weights.new_zeros(place + _aligned(last))
        for parameter, place in self.trained:
            parameter.grad = self.gradients[place : place + parameter.numel()].view(parameter.shape)

    def forget_gradients(self) -> None:
        """Drop the gradients of these parameters."""
        self.gradients = None
        for parameter, _ in self.trained:
            parameter.grad = None


def _copy_of(parameter: nn.Parameter, gathered: Tensor, place: int) -> Tensor:
    """A view of the tensor `gathered`, from element `place` on, that is read as the parameter's copy.

    It shares the storage alone and not the version, so that autograd does not take a new gathering for a change.
    """
    strides = torch.empty(parameter.shape, device="meta").stride()
    copy = gathered.new_empty(0)
    copy.set_(gathered.untyped_storage(), place, parameter.shape, strides)
    if not parameter.requires_grad:
        return copy
    with torch.enable_grad():
        found: Tensor = _ReadInstead.apply(parameter, copy)  # type: ignore[no-untyped-call]
        return found


class _ReadInstead(torch.autograd.Function):
    """A function of autograd: a parameter and its copy give the copy, whose gradient becomes the parameter's.

    It saves nothing, so every backward may go through it.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return copy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype), None


def narrow_modules(modules: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """The linear and convolution modules whose weights may be gathered as narrow copies.

    Only their own forward reads their weights, which are float32 and shared with no other module of `modules`.
    """
    known = list(dict.fromkeys(modules))
    # nn.MultiheadAttention reads the weights of its projections without calling them.
    fused = {part for module in known if isinstance(module, nn.MultiheadAttention) for part in module.modules()}
    found = [module for module in known if type(module).forward in _FORWARDS and module not in fused]
    found = [module for module in found if all(p.dtype is torch.float32 for p in module.parameters(recurse=False))]
    # A module that is left out may share a weight with one that was found, which then has to be left out too.
    while True:
        outside = {p for module in known if module not in found for p in module.parameters(recurse=False)}
        kept = [module for module in found if outside.isdisjoint(module.parameters(recurse=False))]
        if len(kept) == len(found):
            return tuple(found)
        found = kept


def read_copies(modules: Iterable[nn.Module], copies: Mapping[nn.Parameter, Tensor]) -> None:
    """Let the forwards of these modules read `copies` in place of their weights from now on; `copies`: by parameter."""
    for module in modules:
        bias = getattr(module, "bias", None)
        forward = _FORWARDS[type(module).forward]
        weight = cast(nn.Parameter, module.weight)
        module.__dict__["forward"] = partial(forward, module, copies[weight], None if bias is None else copies[bias])


def _linear(module: nn.Linear, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return nn.functional.linear(x, weight, bias)


def _convolution(module: Any, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    y: Tensor = module._conv_forward(x, weight, bias)
    return y


_FORWARDS: Mapping[Callable[..., Any], Callable[..., Tensor]] = MappingProxyType(
    {
        nn.Linear.forward: _linear,
        nn.Conv1d.forward: _convolution,
        nn.Conv2d.forward: _convolution,
        nn.Conv3d.forward: _convolution,
    }
)


def _aligned(parameter: Tensor) -> int:
    """The number of elements that the parameter takes, up to the index where the next one may start."""
    unit = ALIGNMENT // 2  # also where copies are two bytes wide
    return -(-parameter.numel() // unit) * unit


def _grouped(
    parameters: Mapping[str, nn.Parameter], owner_of: Mapping[str, int], narrow: Collection[nn.Parameter]
) -> dict[tuple[int, torch.dtype, bool], list[nn.Parameter]]:
    """(owner, dtype, whether its copy is gathered) -> its parameters, in the same order on every rank."""
    narrow = set(narrow)
    groups: dict[tuple[int, torch.dtype, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        groups.setdefault((owner_of[name], parameter.dtype, parameter in narrow), []).append(parameter)
    return groups
