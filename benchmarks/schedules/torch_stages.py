"""torch's schedules over stages that wait: whole backwards, and backwards split into I and W."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from diffusionpipe.runtime.rehearsals.virtual import Wait
from diffusionpipe.schedules.building.shapes import linear, loop, wave
from diffusionpipe.units import Seconds

WIDTH = 16
"""Numbers that a sample sends from stage to stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFamily:
    """What torch has of a family."""

    make: Callable[..., Any]
    """The schedule's class: (stages, or the only one; micro-batches) -> schedule."""
    workers: Callable[[int], tuple[int, ...]]
    """Number of ranks -> the rank of every stage."""


FAMILIES: Mapping[str, TorchFamily] = MappingProxyType(
    {
        "gpipe": TorchFamily(make=ScheduleGPipe, workers=linear),
        "1f1b": TorchFamily(make=Schedule1F1B, workers=linear),
        "interleaved": TorchFamily(make=ScheduleInterleaved1F1B, workers=lambda p: loop(p, 2)),
        "looped-bfs": TorchFamily(make=ScheduleLoopedBFS, workers=lambda p: loop(p, 2)),
        "interleaved-zb": TorchFamily(make=ScheduleInterleavedZeroBubble, workers=lambda p: loop(p, 2)),
        "zb-v": TorchFamily(make=ScheduleZBVZeroBubble, workers=lambda p: wave(p, 2)),
        "dualpipe-v": TorchFamily(make=ScheduleDualPipeV, workers=lambda p: wave(p, 2)),
    }
)
"""Our names of the families that torch has."""


class WaitingModule(nn.Module):
    """A stage of torch's that waits F when called, I for the gradient of its input and W for that of its parameter.

    input ----------------> _Compute -> output        torch takes `_Compute`, where both ways meet, twice where it
    parameter -> _Weight --^                          splits a backward: for I, and for W on the way to `_Weight`
    """

    def __init__(self, seconds: Seconds, wait: Wait) -> None:
        """F = I = W = `seconds`."""
        super().__init__()
        self.seconds = seconds
        self.wait = wait
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        weight = _Weight.apply(self.weight, self)  # type: ignore[no-untyped-call]
        output: Tensor = _Compute.apply(hidden, weight, self)  # type: ignore[no-untyped-call]
        return output

    def pause(self) -> None:
        """One of the three."""
        self.wait(self.seconds)


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, module: WaitingModule) -> Tensor:
        ctx.module = module
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.module.pause()
        return gradients[0], None


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, module: WaitingModule) -> Tensor:
        ctx.module, ctx.is_done = module, False
        module.pause()
        return torch.zeros_like(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        if not ctx.is_done:
            ctx.is_done = True
            ctx.module.pause()
        return torch.zeros_like(gradients[0]), torch.zeros(()), None


def torch_step(
    name: str, rank: int, num_ranks: int, num_microbatches: int, *, part: Seconds, wait: Wait
) -> Callable[[], object]:
    """One iteration of torch's schedule on this rank; `part` is F = I = W of a rank's part of the model."""
    family = FAMILIES[name]
    workers = family.workers(num_ranks)
    seconds = part * num_ranks / len(workers)
    own = [stage for stage, worker in enumerate(workers) if worker == rank]
    stages = [PipelineStage(WaitingModule(seconds, wait), stage, len(workers), torch.device("cpu")) for stage in own]
    runner = family.make(
        stages[0] if len(workers) == num_ranks else stages,
        num_microbatches,
        loss_fn=lambda output, target: output.sum(),
        scale_grads=False,
    )
    inputs = (torch.zeros(num_microbatches, WIDTH),) if own[0] == 0 else ()
    target = {"target": torch.zeros(num_microbatches)} if own[-1] == len(workers) - 1 else {}
    return lambda: runner.step(*inputs, **target, return_outputs=False)
