"""Runs a model under any layout, as threads or as processes, and compares with the plain full batch in one process."""

import copy
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from kit.descriptions import described
from kit.tiny_models import raw_inputs
from torch import Tensor

from diffusionpipe.costs import ModelGraph
from diffusionpipe.ir import Plan, PlanPhase
from diffusionpipe.models.graphs.graph import LayerGraph, canonical_names
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.runtime.comm.places import holders_of
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.comm.transport import ProcessTransport, Transport
from diffusionpipe.runtime.engine.worker import Worker, build_worker
from diffusionpipe.runtime.job.process_group import Job

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Step:
    """What one step leaves: the mean loss and the gradients by canonical name."""

    loss: float
    gradients: dict[str, Tensor]


def reference_step(graph: LayerGraph, inputs: Mapping[str, Tensor]) -> Step:
    """Full batch, one process, layers in order; loss = sum / samples."""
    batch = len(next(iter(inputs.values())))
    loss = run_layers(graph.layers, graph.components, inputs, targets=["loss"])["loss"].sum() / batch
    trained = {name: p for p, name in canonical_names(graph.components).items() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=False)
    return Step(float(loss.detach()), dict(zip(trained, gradients, strict=True)))


def run_step(worker: Worker, inputs: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """One step of one rank on its rows of the global batch: its part of the loss, its gradients."""
    feed_rows(worker, inputs)
    worker.reset_gradients()
    outputs = worker.train.run()
    loss = sum(float(output.value.double().sum()) for output in outputs) / worker.plan.batch
    return loss, {name: p.grad.clone() for name, p in worker.parameters.items() if p.grad is not None}


def feed_rows(worker: Worker, inputs: Mapping[str, Tensor], phase: PlanPhase = PlanPhase.TRAIN) -> None:
    if worker.encoded is not None:
        offset = worker.place.group * (worker.plan.batch // worker.plan.mesh.data_parallel)
        rows = slice(offset + worker.encoded.start, offset + worker.encoded.stop)
        worker.feed(worker.executors[phase], {name: value[rows] for name, value in inputs.items()})


def steps_in_process(
    job: Job, build: Callable[[], LayerGraph], layouts: Iterable[Layout], batch: int
) -> list[tuple[float, dict[str, Tensor]]]:
    """One rank's step of each layout, over torch.distributed."""
    graph = build()
    model = described(graph)
    inputs = raw_inputs(graph, batch)
    steps = []
    for layout in layouts:
        plan = build_plan(model, layout)
        transport = ProcessTransport(job.device, summing=tuple(holders_of(plan).values()))
        own = copy_of(graph)
        worker = build_worker(own, model, plan, job.membership.rank, transport, device=CPU)
        run_step(worker, inputs)
        steps.append(run_step(worker, inputs))
    return steps


def copy_of(graph: LayerGraph) -> LayerGraph:
    """The same layers over modules of its own."""
    return replace(graph, components=copy.deepcopy(dict(graph.components)))


_COPIES: dict[int, tuple[LayerGraph, list[LayerGraph]]] = {}


def copies_of(graph: LayerGraph, count: int) -> list[LayerGraph]:
    """Copies that later steps of the same graph use again, because copying modules takes longer than a step.

    A step leaves nothing behind but gradients, which the next one forgets; only sharding takes weights away.
    """
    copies = _COPIES.setdefault(id(graph), (graph, []))[1]
    copies += [copy_of(graph) for _ in range(count - len(copies))]
    return copies[:count]


def step_in_threads(
    graph: LayerGraph, model: ModelGraph, layout: Layout, inputs: Mapping[str, Tensor], *, again: bool | None = None
) -> Step:
    """The same step over the ranks of a layout; checks that replicas agree bit for bit.

    `again`: it is the second one, which must not see what the first one left behind. A third of all layouts are
    asked for it, drawn by their text, so that each kind of layout is among them.
    """
    if again is None:
        again = zlib.crc32(repr(layout).encode()) % 3 == 0
    return planned_step(graph, model, build_plan(model, layout), inputs, again=again)


def planned_step(
    graph: LayerGraph, model: ModelGraph, plan: Plan, inputs: Mapping[str, Tensor], *, again: bool = False
) -> Step:
    """One step, or a second one, of a plan's ranks in threads."""
    copies = None if plan.mesh.parts > 1 else copies_of(graph, plan.mesh.num_ranks)

    def main(rank: int, transport: Transport) -> tuple[float, dict[str, Tensor]]:
        own = copies[rank] if copies else copy_of(graph)
        worker = build_worker(own, model, plan, rank, transport, device=CPU)
        if again:
            run_step(worker, inputs)
        return run_step(worker, inputs)

    return merge(run_threads(plan.mesh.num_ranks, main))


def merge(results: Iterable[tuple[float, dict[str, Tensor]]]) -> Step:
    loss, gradients = 0.0, {}
    for part, own in results:
        loss += part
        for name, gradient in own.items():
            assert torch.equal(gradients.setdefault(name, gradient), gradient), f"replicas differ in {name}"
    return Step(loss, gradients)


def assert_same_step(found: Step, expected: Step) -> None:
    """Each gradient within 1e-12 of the norm of all, and 1e-10 of its own where that is not negligible."""
    assert abs(found.loss - expected.loss) <= 1e-12 * abs(expected.loss)
    assert found.gradients.keys() == expected.gradients.keys()
    total = torch.stack([g.norm() for g in expected.gradients.values()]).norm()
    for name, gradient in expected.gradients.items():
        error = (found.gradients[name] - gradient).norm()
        assert error <= 1e-12 * total, (name, float(error), float(total))
        if gradient.norm() > 1e-6 * total:
            assert error <= 1e-10 * gradient.norm(), (name, float(error), float(gradient.norm()))


def rows_of(worker, inputs):
    offset = worker.place.group * (worker.plan.batch // worker.plan.mesh.data_parallel)
    return {name: v[offset + worker.encoded.start : offset + worker.encoded.stop] for name, v in inputs.items()}


def steps_ahead(graph, model, plan, batches):
    """The steps of all batches but the last, which is only encoded."""

    def main(rank, transport):
        worker = build_worker(copy_of(graph), model, plan, rank, transport, device=CPU)
        if worker.encoded is not None:
            worker.feed(worker.prologue, rows_of(worker, batches[0]))
        worker.prologue.run()
        found = []
        for following in batches[1:]:
            if worker.encoded is not None:
                worker.feed(worker.train, rows_of(worker, following))
            worker.reset_gradients()
            outputs = worker.train.run()
            loss = sum(float(output.value.double().sum()) for output in outputs) / plan.batch
            found.append((loss, {name: p.grad.clone() for name, p in worker.parameters.items()}))
        return found

    ranks = run_threads(plan.mesh.num_ranks, main)
    return [merge(results) for results in zip(*ranks, strict=True)]
