"""States of an optimizer, and weights, that are kept in another form between updates: on the host, in bfloat16.

    between updates   exp_avg and exp_avg_sq of all parameters on the host
    update            bucket 0: its states come to the device, it is stepped, they go back; bucket 1: ...

Parameters are stepped a bucket at a time, so no more than a bucket's states are on the device at once. The others have
no gradient meanwhile, and an optimizer leaves a parameter without a gradient as it is. Each parameter gets
the same bits as from a step of all at once, as long as a step looks at one parameter at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from diffusionpipe.holding.rest import Rest
from diffusionpipe.holding.state import BUCKET
from diffusionpipe.trainer.optim.rounding import NarrowParameter


class Resting:
    """Keeps the states of an optimizer in another form between its updates: in host memory, or in bfloat16."""

    def __init__(
        self,
        rest: Rest,
        shared: frozenset[str] = frozenset(),
        narrow: Mapping[nn.Parameter, NarrowParameter] = MappingProxyType({}),
    ) -> None:
        """Starts without states, which will be kept in the form `rest` between updates.

        `shared`: names of entries whose memory all parameters share; these stay where they are. `narrow`: stand-in of
        a parameter in bfloat16 -> the object that widens it before its step and rounds it after.
        """
        self._rest = rest
        self._narrow = dict(narrow)
        self._shared = shared
        self._kept: dict[tuple[nn.Parameter, str], Tensor] = {}
        self._wide: dict[str, torch.dtype] = {}

    def step(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        """Steps the parameters that have gradients, a bucket at a time; `number`: the number of the update."""
        stepped = [p for group in optimizer.param_groups for p in group["params"] if self._has_gradient(p)]
        gradients = [parameter.grad for parameter in stepped]
        try:
            # Without gradients the step of a bucket leaves all others alone.
            for parameter in stepped:
                parameter.grad = None
            for bucket in _buckets(stepped):
                for index in bucket:
                    parameter = stepped[index]
                    parameter.grad = gradients[index]
                    if parameter in self._narrow:
                        self._narrow[parameter].widen()
                    self._bring(parameter, optimizer.state.get(parameter, {}))
                optimizer.step()
                for index in bucket:
                    parameter = stepped[index]
                    self.put(parameter, optimizer.state.get(parameter, {}))
                    if parameter in self._narrow:
                        self._narrow[parameter].narrow(number)
                    parameter.grad = None
        finally:
            for parameter, gradient in zip(stepped, gradients, strict=True):  # a step leaves gradients as they were
                parameter.grad = gradient
        if self._rest.is_hosted and stepped and stepped[0].is_cuda:
            torch.cuda.current_stream().synchronize()  # a checkpoint may read what is in host memory

    @torch.no_grad()
    def put(self, parameter: nn.Parameter, state: dict[str, object]) -> None:
        """Replaces the tensors in a parameter's state by copies in the form in which they are kept between updates."""
        for key, value in self._own(state):
            dtype = value.dtype
            if self._rest.dtype is not None and dtype.is_floating_point:
                dtype = getattr(torch, self._rest.dtype)
            device = torch.device("cpu") if self._rest.is_hosted else value.device
            if (dtype, device) == (value.dtype, value.device):
                continue
            self._wide.setdefault(key, value.dtype)
            kept = self._kept.get((parameter, key))
            # The same memory at each update: page-locked memory is dear to allocate.
            if kept is None or kept.shape != value.shape:
                kept = torch.empty_like(
                    value, dtype=dtype, device=device, pin_memory=value.is_cuda and device.type == "cpu"
                )
                self._kept[parameter, key] = kept
            state[key] = kept.copy_(value, non_blocking=True)

    @torch.no_grad()
    def _bring(self, parameter: nn.Parameter, state: dict[str, object]) -> None:
        """Bring a parameter's states to its device, as wide as the optimizer made them."""
        for key, value in self._own(state):
            wide = self._wide.get(key, parameter.dtype) if value.dtype.is_floating_point else value.dtype
            state[key] = value.to(device=parameter.device, dtype=wide, non_blocking=True)

    def _has_gradient(self, parameter: nn.Parameter) -> bool:
        owner = self._narrow[parameter].parameter if parameter in self._narrow else parameter
        return owner.grad is not None

    def _own(self, state: dict[str, object]) -> Iterator[tuple[str, Tensor]]:
        """The name and tensor of each entry of a state that is kept in another form; numbers and tables are not."""
        if self._rest.is_plain:
            return
        for key, value in list(state.items()):
            if isinstance(value, Tensor) and value.ndim and self._rest.takes(key) and key not in self._shared:
                yield key, value


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[int]]:
    """The buckets of a list of parameters: indices of neighbours that have at most about `BUCKET` bytes together."""
    bucket, size = list[int](), 0
    for number, parameter in enumerate(parameters):
        if bucket and size + parameter.nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(number)
        size += parameter.nbytes
    if bucket:
        yield bucket
