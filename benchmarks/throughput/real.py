"""Real compute: a DiT on two ranks, ours beside one process, DDP and torch.distributed.pipelining."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter, process_time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from benchmarks.throughput.chains import SCHEDULES, our_schedule, torch_schedule
from benchmarks.throughput.dit import LOSS_LAYER, Backbone, backbone, batch_of
from benchmarks.throughput.ranks import run_ranks
from benchmarks.throughput.ratios import Ratio, interleaved, median_ratio
from diffusionpipe.ir import Range
from diffusionpipe.models.objectives.objective import Objective
from diffusionpipe.runtime.comm.transport import ProcessTransport
from diffusionpipe.runtime.compute.stage import LayerStage
from diffusionpipe.runtime.engine.equipment import Equipment
from diffusionpipe.runtime.engine.executor import Executor

NUM_RANKS, NUM_MICROBATCHES, BATCH = 2, 4, 32
TOLERANCE = 1e-5
"""Of gradients in float32: norm of the difference over the norm of all gradients."""

Step = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the DiT is."""

    num_layers: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RealCompute:
    """Gradients of one batch: samples per second by system, and ours over torch's by schedule."""

    num_parameters: int
    samples_per_second: Mapping[str, float]
    cpu_seconds: Mapping[str, float]
    """CPU time of one iteration, all threads of all ranks together: what a busy machine disturbs least."""
    ours_over_torch: Mapping[str, Ratio]
    """Throughput, so above 1 ours is faster."""
    gradient_error: float
    """The largest over systems."""


@dataclass(slots=True)
class _Report:
    """One rank's."""

    num_parameters: int
    spans: dict[str, list[tuple[float, float]]]
    """Start and end of every iteration, on the clock that all processes of a machine share."""
    cpu_seconds: dict[str, list[float]]
    errors: dict[str, float]
    with_gradient: dict[str, set[str]]


def measure(num_rounds: int, size: Size) -> RealCompute:
    """Medians over interleaved rounds.

    Raises RuntimeError where gradients differ from those of one process.
    """
    reports: list[_Report] = run_ranks(NUM_RANKS, _rank, num_rounds, size)
    error = _check_gradients(reports)
    seconds = {
        name: [
            max(report.spans[name][i][1] for report in reports) - min(report.spans[name][i][0] for report in reports)
            for i in range(num_rounds)
        ]
        for name in reports[0].spans
    }
    return RealCompute(
        num_parameters=reports[0].num_parameters,
        samples_per_second={name: BATCH / median(values) for name, values in seconds.items()},
        cpu_seconds={
            name: median(sum(report.cpu_seconds[name][i] for report in reports) for i in range(num_rounds))
            for name in seconds
        },
        ours_over_torch={name: median_ratio(seconds[f"torch {name}"], seconds[f"ours {name}"]) for name in SCHEDULES},
        gradient_error=error,
    )


def _check_gradients(reports: list[_Report]) -> float:
    for name in reports[0].errors:
        count = len(set().union(*(report.with_gradient[name] for report in reports)))
        error = max(report.errors[name] for report in reports)
        if error > TOLERANCE or count != len(reports[0].with_gradient["one process"]):
            raise RuntimeError(f"{name}: gradients of {count} parameters, off by {error:.1e} from one process's")
    return max(error for report in reports for error in report.errors.values())


def _rank(rank: int, num_rounds: int, size: Size) -> _Report:
    model = backbone(size.num_layers, size.width)
    batch = batch_of(BATCH)
    copy = _copied(model)
    steps = {"one process": _whole_step(model, batch), "DDP": _ddp_step(copy, batch, rank)}
    transport = ProcessTransport(torch.device("cpu"))
    for name in SCHEDULES:
        steps[f"torch {name}"] = _torch_step(model, batch, rank, name)
        steps[f"ours {name}"] = _our_step(model, batch, rank, name, transport)
    report = _Report(
        num_parameters=sum(p.numel() for p in model.transformer.parameters()),
        spans={name: [] for name in steps},
        cpu_seconds={name: [] for name in steps},
        errors={},
        with_gradient={},
    )
    _warm_up(report, steps, {name: (copy if name == "DDP" else model).transformer for name in steps})
    if rank > 0:
        steps["one process"] = lambda: None
    modules = (model.transformer, copy.transformer)
    for order in interleaved(list(steps), num_rounds):
        for name in order:
            for module in modules:
                module.zero_grad()
            dist.barrier()
            start, busy = perf_counter(), process_time()
            steps[name]()
            report.spans[name].append((start, perf_counter()))
            report.cpu_seconds[name].append(process_time() - busy)
    return report


def _warm_up(report: _Report, steps: Mapping[str, Step], modules: Mapping[str, nn.Module]) -> None:
    """Run everything once and compare the gradients with those of one process, which comes first."""
    reference: dict[str, Tensor] = {}
    for name, step in steps.items():
        modules[name].zero_grad()
        step()
        gradients = {key: p.grad for key, p in modules[name].named_parameters() if p.grad is not None}
        reference = reference or {key: gradient.clone() for key, gradient in gradients.items()}
        total = torch.stack([gradient.norm() for gradient in reference.values()]).norm()
        report.errors[name] = max(float((g - reference[key]).norm() / total) for key, g in gradients.items())
        report.with_gradient[name] = set(gradients)


def _copied(model: Backbone) -> Backbone:
    """The same with parameters of its own: DDP puts hooks on those it wraps."""
    components = {**model.graph.components, "transformer": deepcopy(model.transformer)}
    return replace(model, graph=replace(model.graph, components=components))


class _StageModule(nn.Module):
    """A stage as torch's runtimes want it: positional and named tensors in, one tensor or a tuple of them out."""

    def __init__(self, stage: LayerStage, transformer: nn.Module, positional: tuple[str, ...]) -> None:
        super().__init__()
        self.stage = stage
        self.transformer = transformer
        self.positional = positional

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor | tuple[Tensor, ...]:
        outputs = tuple(self.stage({**dict(zip(self.positional, inputs, strict=True)), **named}).values())
        return outputs[0] if len(outputs) == 1 else outputs


def _whole(model: Backbone) -> _StageModule:
    stage = model.stage(model.model.backbone_layers, ("loss",))
    return _StageModule(stage, model.transformer, ())


def _whole_step(model: Backbone, batch: Mapping[str, Tensor]) -> Step:
    module = _whole(model)
    return lambda: (module(**batch).sum() / BATCH).backward()


def _ddp_step(model: Backbone, batch: Mapping[str, Tensor], rank: int) -> Step:
    """DDP takes the mean over ranks, so each rank's loss is the mean over its own samples."""
    share = BATCH // NUM_RANKS
    own = {name: value[rank * share : (rank + 1) * share] for name, value in batch.items()}
    module = DistributedDataParallel(_whole(model))
    return lambda: module(**own).mean().backward()


def _torch_step(model: Backbone, batch: Mapping[str, Tensor], rank: int, name: str) -> Step:
    """torch takes the last layer, the loss, as a function beside the stages."""
    blocks = model.blocks(NUM_RANKS)
    (edge,) = model.edges(blocks)
    is_last = rank == NUM_RANKS - 1
    layers = model.stage(
        tuple(layer for layer in blocks[rank] if layer != LOSS_LAYER), ("prediction",) if is_last else edge.tensors
    )
    positional = edge.tensors if is_last else ("noisy",)
    module = _StageModule(layers, model.transformer, positional)
    stage = PipelineStage(module, rank, NUM_RANKS, torch.device("cpu"))
    objective = model.graph.components["objective"]
    assert isinstance(objective, Objective)
    runner = torch_schedule(name, stage, NUM_MICROBATCHES, partial(_torch_loss, objective))
    named = {key: batch[key] for key in layers.reads if key not in positional}
    inputs = () if is_last else (batch["noisy"],)
    target = {"target": batch["target"]} if is_last else {}
    return lambda: runner.step(*inputs, **named, **target, return_outputs=False)


def _torch_loss(objective: Objective, prediction: Tensor, target: Tensor) -> Tensor:
    return objective.loss(prediction, target, torch.ones(len(target))).sum() / BATCH


def _our_step(model: Backbone, batch: Mapping[str, Tensor], rank: int, name: str, transport: ProcessTransport) -> Step:
    blocks = model.blocks(NUM_RANKS)
    edges = model.edges(blocks)
    stage = model.stage(blocks[rank], edges[0].tensors if rank < NUM_RANKS - 1 else ("loss",))
    executor = Executor(
        our_schedule(name, NUM_RANKS, NUM_MICROBATCHES, BATCH // NUM_MICROBATCHES, edges),
        rank,
        Equipment(
            stages={rank: stage},
            tensors={spec.name: spec for spec in model.model.tensors},
            transport=transport,
            device=torch.device("cpu"),
            loss_scale=1.0 / BATCH,
        ),
    )
    for key in stage.reads:
        if key in executor.store:
            executor.store.write(key, Range(0, BATCH), batch[key])
    return executor.run
