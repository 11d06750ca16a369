"""Steps whose micro-batches have several sizes, in any layout, and the same samples in one process."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from kit.layouts import CPU, Step, merge
from kit.tiny_models import raw_inputs
from torch import Tensor

from diffusionpipe.costs import ModelGraph
from diffusionpipe.ir import Plan
from diffusionpipe.models.graphs.graph import LayerGraph, canonical_names
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.comm.transport import Transport
from diffusionpipe.runtime.compute.runs import joined_runs
from diffusionpipe.runtime.engine.executor import Executor
from diffusionpipe.runtime.engine.worker import Worker, build_worker

Samples = Sequence[Mapping[str, Tensor]]
"""The raw inputs of each sample of a global batch, with a batch dimension of one."""


def samples_of(graph: LayerGraph, sizes: Sequence[int], seed: int = 0) -> list[dict[str, Tensor]]:
    """A sample of the size of each number."""
    return [raw_inputs(graph.of_sizes[size], 1, seed=1000 * seed + row) for row, size in enumerate(sizes)]


def own_copy(graph: LayerGraph) -> LayerGraph:
    """The same layers of every size over modules of its own."""
    components = copy.deepcopy(dict(graph.components))
    return replace(
        graph, components=components, others=tuple(replace(other, components=components) for other in graph.others)
    )


def one_process(graph: LayerGraph, sizes: Sequence[int], samples: Samples) -> Step:
    """One sample after the other through the layers of its size."""
    trained = {name: p for p, name in canonical_names(graph.components).items() if p.requires_grad}
    total, loss = {name: torch.zeros_like(p) for name, p in trained.items()}, 0.0
    for size, inputs in zip(sizes, samples, strict=True):
        own = run_layers(graph.of_sizes[size].layers, graph.components, inputs, targets=["loss"])["loss"].sum()
        own = own / len(sizes)
        loss += float(own.detach())
        for name, gradient in zip(trained, torch.autograd.grad(own, list(trained.values())), strict=True):
            total[name] += gradient
    return Step(loss, total)


def feed(worker: Worker, executor: Executor, sizes: Sequence[int], samples: Samples) -> None:
    """The rows of a rank, each a run of its own."""
    count = worker.plan.batch // worker.plan.mesh.data_parallel
    first = worker.place.group * count
    rows = range(worker.encoded.start, worker.encoded.stop) if worker.encoded is not None else ()
    worker.feed(executor, joined_runs(sizes[first : first + count], [samples[first + row] for row in rows]))


def mixed_steps(
    graph: LayerGraph, models: Sequence[ModelGraph], plan: Plan, steps: Sequence[tuple[Sequence[int], Samples]]
) -> list[Step]:
    """The steps of a plan, each with the sizes of its samples and the samples."""

    def main(rank: int, transport: Transport) -> list[tuple[float, dict[str, Tensor]]]:
        worker = build_worker(own_copy(graph), models[0], plan, rank, transport, device=CPU, others=models[1:])
        batches = list(steps)
        if worker.prologue is not None:
            feed(worker, worker.prologue, *batches[0])
            worker.prologue.run()
            batches = [*batches[1:], batches[0]]
        found = []
        before = worker.train.store.num_bytes
        for batch in batches:
            feed(worker, worker.train, *batch)
            worker.reset_gradients()
            outputs = worker.train.run()
            loss = sum(float(output.value.double().sum()) for output in outputs) / plan.batch
            found.append((loss, {name: p.grad.clone() for name, p in worker.parameters.items() if p.grad is not None}))
        assert worker.train.store.num_bytes == before, "rows have their places once"
        return found

    ranks = run_threads(plan.mesh.num_ranks, main)
    return [merge(results) for results in zip(*ranks, strict=True)]
