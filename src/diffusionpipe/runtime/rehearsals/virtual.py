"""Virtual stages: waits of known length instead of compute.

Everything else is real, processes, transport, messages of full size and executor, so a plan for any number of devices
can be rehearsed on a laptop and its measured timeline compared with the simulated one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.costs import Backbone, Costs, TensorSpec
from diffusionpipe.ir import Fill, Schedule
from diffusionpipe.runtime.comm.transport import Transport
from diffusionpipe.runtime.compute.split import Deferred
from diffusionpipe.runtime.compute.store import RowStore
from diffusionpipe.runtime.engine.equipment import Equipment
from diffusionpipe.runtime.engine.executor import Executor
from diffusionpipe.units import Seconds

ONE_BACKBONE = (Backbone(),)

Wait = Callable[[Seconds], None]

_SPIN: Seconds = 0.0002
"""How long before its end a wait stops sleeping: a sleep ends late by about this much."""


def precise_wait(duration: Seconds) -> None:
    """Block for `duration` seconds without using a core, but for a short spin at the end: exact to microseconds.

    The spin is short because a laptop has fewer cores than the rehearsal has ranks.
    """
    end = perf_counter() + duration
    if duration > _SPIN:
        sleep(duration - _SPIN)
    while perf_counter() < end:
        pass


class VirtualCompute:
    """A stage's compute as waits: a call waits `forward` seconds and returns zeros, their backward waits `backward`.

    Where the backward is split, op I waits `input_grad` seconds and op W `weight_grad`.
    """

    def __init__(
        self,
        *,
        forward: Seconds,
        backward: Seconds,
        input_grad: Seconds = 0.0,
        weight_grad: Seconds = 0.0,
        writes: Sequence[TensorSpec],
        wait: Wait = precise_wait,
    ) -> None:
        self.forward = forward
        self.backward = backward
        self.input_grad = input_grad
        self.weight_grad = weight_grad
        self.writes = tuple(writes)
        self.wait = wait
        # With this input outputs have a graph, even where no tensor that is read needs a gradient.
        self._weight = torch.zeros((), requires_grad=True)

    def __call__(self, *inputs: Tensor, deferred: Deferred | None = None) -> tuple[Tensor, ...]:
        """Zeros for the tensors of `writes`, with as many rows as the inputs, after `forward` seconds."""
        outputs: tuple[Tensor, ...] = _WaitFunction.apply(self, deferred, self._weight, *inputs)  # type: ignore[no-untyped-call]
        return outputs

    def wait_for_weights(self, x: Tensor, gradient: Tensor) -> None:
        """Wait `weight_grad` seconds in place of computing the weight gradients; the tensors are not read."""
        self.wait(self.weight_grad)


class _WaitFunction(torch.autograd.Function):
    """The waits of a `VirtualCompute` for autograd: outputs and gradients of inputs are zeros."""

    @staticmethod
    def forward(
        ctx: Any, compute: VirtualCompute, deferred: Deferred | None, weight: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.compute, ctx.deferred, ctx.weight = compute, deferred, weight
        ctx.shapes = [(value.shape, value.dtype) if value.requires_grad else None for value in inputs]
        device = inputs[0].device
        outputs = tuple(
            torch.zeros((len(inputs[0]), *spec.shape), dtype=getattr(torch, spec.dtype), device=device)
            for spec in compute.writes
        )
        fixed = [value for value, spec in zip(outputs, compute.writes, strict=True) if not spec.needs_gradient]
        ctx.mark_non_differentiable(*fixed)
        # Gradients of outputs that nothing reads stay None; autograd would else fill memory with zeros for them.
        ctx.set_materialize_grads(False)
        compute.wait(compute.forward)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        device = next(gradient.device for gradient in gradients if gradient is not None)
        if ctx.deferred is None:
            ctx.compute.wait(ctx.compute.backward)
        else:
            ctx.compute.wait(ctx.compute.input_grad)
            ctx.deferred.add(ctx.compute.wait_for_weights, ctx.weight, ctx.weight)  # no tensor is needed
        of_inputs = (None if s is None else torch.zeros(s[0], dtype=s[1], device=device) for s in ctx.shapes)
        return (None, None, None, *of_inputs)


@dataclass(frozen=True, slots=True)
class VirtualStage:
    """A stage whose forward and backward are waits, and whose outputs are zeros; see `StageModule`."""

    reads: tuple[str, ...]
    """The names of the tensors that a forward needs."""
    compute: VirtualCompute

    def __call__(self, tensors: dict[str, Tensor], deferred: Deferred | None = None) -> dict[str, Tensor]:
        """The outputs of the stage for a micro-batch, by name; see `StageModule`."""
        values = self.compute(*(tensors[name] for name in self.reads), deferred=deferred)
        return {spec.name: value for spec, value in zip(self.compute.writes, values, strict=True)}


@dataclass(frozen=True, slots=True)
class VirtualEncoder:
    """Frozen work in a rehearsal: it waits as long as each fill takes, and writes nothing."""

    duration_of_fill: Mapping[Fill, Seconds]
    wait: Wait

    def run(self, fill: Fill, store: RowStore) -> None:
        """Wait as long as the fill takes; the store stays as it is. See `FillRunner`."""
        self.wait(self.duration_of_fill[fill])


def virtual_stages(
    schedule: Schedule,
    worker: int,
    *,
    costs: Costs,
    tensors: Mapping[str, TensorSpec],
    inputs: Sequence[str],
    backbones: Sequence[Backbone] = ONE_BACKBONE,
    wait: Wait = precise_wait,
) -> dict[int, VirtualStage]:
    """Stage id -> virtual stage of each trained stage of the worker, which waits as long as `costs` say.

    Stages read and write what the schedule's edges say. One that reads from no other reads `inputs`; one from which no
    other reads writes its backbone's loss.
    """
    placement = schedule.placement
    losses = {backbone.name: backbone.loss for backbone in backbones}
    edges = [edge for pipeline in placement.pipelines for edge in pipeline.edges]
    stages = {}
    for index, stage in enumerate(placement.stages):
        if stage.worker != worker or placement.is_frozen(index):
            continue
        reads = dict.fromkeys(name for edge in edges if edge.consumer == index for name in edge.tensors)
        writes = dict.fromkeys(name for edge in edges if edge.producer == index for name in edge.tensors)
        compute = VirtualCompute(
            forward=costs.stages[index].forward,
            backward=costs.stages[index].backward,
            input_grad=costs.stages[index].input_grad,
            weight_grad=costs.stages[index].weight_grad,
            writes=[tensors[name] for name in writes or (losses[placement.pipeline_of(index).model],)],
            wait=wait,
        )
        stages[index] = VirtualStage(tuple(reads or inputs), compute)
    return stages


def virtual_executor(
    schedule: Schedule,
    worker: int,
    *,
    costs: Costs,
    tensors: Mapping[str, TensorSpec],
    transport: Transport,
    inputs: Sequence[str] = (),
    wait: Wait = precise_wait,
) -> Executor:
    """An executor that rehearses one worker's side of a schedule with explicit messages; compute is waits.

    `costs`: the lengths of the waits. `tensors` must hold every tensor that the schedule's edges name, `inputs` and the
    losses.

    Raises:
        ScheduleError: the order holds ops that the executor cannot run.
    """
    return Executor(
        schedule,
        worker,
        Equipment(
            stages=virtual_stages(schedule, worker, costs=costs, tensors=tensors, inputs=inputs, wait=wait),
            tensors=tensors,
            transport=transport,
            device=torch.device("cpu"),
            encoder=VirtualEncoder(dict(zip(schedule.fills, costs.fills, strict=True)), wait)
            if schedule.fills
            else None,
            raw_inputs=tuple(inputs),
        ),
    )
