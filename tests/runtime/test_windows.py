"""Training without a flush is the sequential recurrence, whose weights are as old as the table says.

w_s[v+1] = update( w_s[v],  d loss / d w_s  with forwards on { w_j[v - a_j] } and backwards on { w_j[v - b_j] } )
"""

import copy
from functools import cache

import pytest
import torch
from descriptions import described
from layouts import CPU
from tiny_models import raw_inputs, tiny_dit, tiny_stable_diffusion

from diffusionpipe.ir import Op
from diffusionpipe.ir.versions import Versions, staleness_of, versions_held
from diffusionpipe.models.graph import layer_parameters
from diffusionpipe.models.run import run_layers
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.runtime.threads import run_threads
from diffusionpipe.runtime.versions import BlockVersions
from diffusionpipe.runtime.worker import build_worker

MODELS = {"stable diffusion": tiny_stable_diffusion, "dit": tiny_dit}
BATCH, STEPS = 8, 7
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


@cache
def model_of(name):
    graph = MODELS[name]()
    batches = [
        {key: value[8 * i : 8 * i + 8] for key, value in raw_inputs(graph, 8 * STEPS).items()} for i in range(STEPS)
    ]
    return graph, described(graph), batches


def trained_of(graph, layers):
    return {name: p for name, p in layer_parameters(graph, layers).items() if p.requires_grad}


def recurrence(graph, plan, batches, make_optimizer, flushes):
    """The sequential recurrence, written out: every version of every stage is kept."""
    graph = copy.deepcopy(graph)
    stages = [trained_of(graph, plan.blocks[stage.weights]) for stage in plan.train.placement.stages]
    optimizers = [make_optimizer(list(own.values())) for own in stages]
    versions = [[{name: p.detach().clone() for name, p in own.items()}] for own in stages]
    table, (pipeline,) = staleness_of(plan.train), plan.train.placement.pipelines
    first = 0
    for step, inputs in enumerate(batches):
        first = step if step in flushes else first
        gradients = [{name: torch.zeros_like(p) for name, p in own.items()} for own in stages]
        for microbatch in range(len(pipeline.microbatches)):
            rows = pipeline.rows(microbatch)

            def read(op, microbatch=microbatch, first=first, step=step):
                return [versions[s][max(step - table[s, op][microbatch], first)] for s in range(len(stages))]

            for own, values in zip(stages, read(Op.F), strict=True):
                for name, parameter in own.items():
                    parameter.data = values[name].clone()
                    parameter.grad = None
            size = BATCH // plan.mesh.data_parallel
            taken = [g * size + row for g in range(plan.mesh.data_parallel) for row in range(rows.start, rows.stop)]
            raw = {name: value[taken] for name, value in inputs.items()}
            loss = run_layers(graph.layers, graph.components, raw, targets=["loss"])["loss"].sum() / BATCH
            for own, values in zip(stages, read(Op.B), strict=True):
                for name, parameter in own.items():
                    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(parameter):
                        parameter.copy_(values[name])
            loss.backward()
            for own, sums in zip(stages, gradients, strict=True):
                for name, parameter in own.items():
                    sums[name] += parameter.grad
        for s, own in enumerate(stages):
            for name, parameter in own.items():
                parameter.data, parameter.grad = versions[s][step][name].clone(), gradients[s][name]
            optimizers[s].step()
            versions[s].append({name: p.detach().clone() for name, p in own.items()})
    return [own[0] for own in versions], [own[-1] for own in versions]


def pipeline_of(graph, model, plan, batches, make_optimizer, stops, make_versions=BlockVersions):
    """The real executor in threads; the weights of all stages at the end."""
    graphs = [copy.deepcopy(graph) for _ in range(plan.mesh.num_ranks)]

    def main(rank, transport):
        worker = build_worker(graphs[rank], model, plan, rank, transport, device=CPU)
        window = worker.window
        optimizers = {block: make_optimizer(list(worker.parameters.values())) for block in worker.versions}
        window.update = lambda block, step: optimizers[block].step()

        def encode(batch):
            encoder = window.encoder(batch)
            group = worker.place.group * (BATCH // plan.mesh.data_parallel)
            rows = worker.encoded
            worker.feed(encoder, {k: v[group + rows.start : group + rows.stop] for k, v in batches[batch].items()})
            encoder.run()

        losses = []
        for stop in stops:
            while window.batch < stop:
                worker.reset_gradients()
                outputs = window.run(stop, encode)
                losses.append(sum(float(output.value.sum()) for output in outputs) / BATCH)
        held = sum(versions.num_bytes for versions in worker.versions.values())
        return {name: p.detach().clone() for name, p in worker.parameters.items()}, losses, held

    return run_threads(plan.mesh.num_ranks, main)


def distance(name, layout, optimizer, stops=(STEPS,)):
    """Of the pipeline from the recurrence, as a part of the distance moved."""
    graph, model, batches = model_of(name)
    plan = build_plan(model, layout)
    make = OPTIMIZERS[optimizer]
    start, expected = recurrence(graph, plan, batches, make, {0, *stops})
    found = pipeline_of(graph, model, plan, batches, make, stops)
    apart = moved = 0.0
    for rank, (parameters, _, _) in enumerate(found):
        worker = plan.mesh.place(rank)[1]
        for key, value in parameters.items():
            apart += float((value - expected[worker][key]).square().sum())
            moved += float((start[worker][key] - expected[worker][key]).square().sum())
    assert moved > 0
    return (apart / moved) ** 0.5


ROWS = [Versions.STASHED, Versions.VERTICAL, Versions.DELAYED, Versions.NEWEST]


def layout_of(versions, stages, microbatches, **others):
    return Layout(
        batch=BATCH,
        stages=stages,
        microbatches=microbatches,
        versions=versions,
        delay=-(-(stages - 1) // microbatches),
        **others,
    )


@pytest.mark.parametrize("versions", ROWS)
@pytest.mark.parametrize(("stages", "microbatches", "optimizer"), [(2, 1, "sgd"), (3, 4, "adamw")])
def test_a_window_is_the_recurrence(versions, stages, microbatches, optimizer):
    limit = 1e-10 if optimizer == "adamw" else 1e-12
    assert distance("dit", layout_of(versions, stages, microbatches), optimizer) <= limit


SIZES = [
    *(("dit", stages, microbatches) for stages in (2, 3, 4) for microbatches in (1, 4)),
    ("stable diffusion", 4, 1),
    ("stable diffusion", 3, 4),
]


@pytest.mark.slow
@pytest.mark.parametrize("versions", ROWS)
@pytest.mark.parametrize(("name", "stages", "microbatches"), SIZES)
def test_every_row_is_the_recurrence(name, versions, stages, microbatches):
    layout = layout_of(versions, stages, microbatches)
    for optimizer in OPTIMIZERS:
        limit = 1e-10 if optimizer == "adamw" else 1e-12
        assert distance(name, layout, optimizer) <= limit, optimizer


def test_copies_of_the_pipeline_recomputation_and_flushes_between():
    """Two groups that share each batch; batches 3 and 5 begin with empty pipelines."""
    layout = layout_of(Versions.STASHED, 2, 2, data_parallel=2, checkpointed=("*",))
    assert distance("dit", layout, "momentum", stops=(3, 5, STEPS)) <= 1e-12


class LateBinding(BlockVersions):
    """Binds the newest version before a backward too."""

    def bind(self, version):
        super().bind(self.newest)


def test_a_backward_on_other_weights_than_its_forward_is_noticed(monkeypatch):
    monkeypatch.setattr("diffusionpipe.runtime.worker.BlockVersions", LateBinding)
    assert distance("stable diffusion", layout_of(Versions.STASHED, 2, 1), "sgd") > 1e-4


def test_bytes_of_versions_are_those_of_the_table():
    graph, model, batches = model_of("dit")
    plan = build_plan(model, layout_of(Versions.STASHED, 3, 1))
    found = pipeline_of(graph, model, plan, batches, OPTIMIZERS["sgd"], (2,))
    for rank, (parameters, _, held) in enumerate(found):
        own = sum(p.numel() * p.element_size() for p in parameters.values())
        assert held == own * versions_held(plan.train)[rank] == own * (3 - rank)
