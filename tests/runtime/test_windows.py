"""Training without a flush is the sequential recurrence, whose weights are as old as the table says.

w_s[v+1] = update( w_s[v],  d loss / d w_s  with forwards on { w_j[v - a_j] } and backwards on { w_j[v - b_j] } )
"""

import copy
from functools import cache, partial

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
from diffusionpipe.trainer.optimizer import set_learning_rates
from diffusionpipe.trainer.prediction import predict

MODELS = {"stable diffusion": tiny_stable_diffusion, "dit": tiny_dit}
BATCH, STEPS = 8, 7
RATES = {"sgd": 1e-2, "momentum": 1e-2, "adamw": 1e-3}
LIMITS = {"sgd": 1e-12, "momentum": 1e-12, "adamw": 1e-10}


def rates_at(step):
    """They rise, so a prediction over several steps needs the rate of each of them."""
    return {name: rate * (1 + step / 4) for name, rate in RATES.items()}


class Optimizers:
    """Every third parameter of a stage has the first of these optimizers, and so on."""

    def __init__(self, parameters, names):
        make = {
            "sgd": torch.optim.SGD,
            "momentum": partial(torch.optim.SGD, momentum=0.9),
            "adamw": partial(torch.optim.AdamW, weight_decay=0.1),
        }
        shares = {name: parameters[i :: len(names)] for i, name in enumerate(names)}
        self.all = {
            name: make[name]([{"params": share, "group": name}], lr=0.0) for name, share in shares.items() if share
        }

    def step(self, step):
        for optimizer in self.all.values():
            set_learning_rates(optimizer, rates_at(step))
            optimizer.step()

    def predict(self, version, step):
        for optimizer in self.all.values():
            predict(optimizer, [rates_at(number) for number in range(version, step)])


def direction(optimizers, parameter):
    """(optimizer, the step that it would make again for a rate of 1), as published; zero before the first step."""
    for name, optimizer in optimizers.all.items():
        if parameter in optimizer.state:
            state = optimizer.state[parameter]
            if name == "momentum":
                return name, -state["momentum_buffer"].clone()
            steps = float(state["step"])
            mean, square = state["exp_avg"] / (1 - 0.9**steps), state["exp_avg_sq"] / (1 - 0.999**steps)
            return name, -mean / (square.sqrt() + 1e-8) - 0.1 * parameter.detach()
    return "sgd", torch.zeros_like(parameter)


@cache
def model_of(name):
    graph = MODELS[name]()
    batches = [
        {key: value[8 * i : 8 * i + 8] for key, value in raw_inputs(graph, 8 * STEPS).items()} for i in range(STEPS)
    ]
    return graph, described(graph), batches


def trained_of(graph, layers):
    return {name: p for name, p in layer_parameters(graph, layers).items() if p.requires_grad}


def recurrence(graph, plan, batches, names, flushes):
    """The sequential recurrence, written out: every version of every stage is kept."""
    graph = copy.deepcopy(graph)
    stages = [trained_of(graph, plan.blocks[stage.weights]) for stage in plan.train.placement.stages]
    optimizers = [Optimizers(list(own.values()), names) for own in stages]
    versions = [[{name: p.detach().clone() for name, p in own.items()}] for own in stages]
    directions = [[{name: direction(own, p) for name, p in stages[s].items()}] for s, own in enumerate(optimizers)]
    table, (pipeline,) = staleness_of(plan.train), plan.train.placement.pipelines
    is_predicted = any(action.reading.predicted for _, action in plan.train.actions())
    first = 0

    def ahead(s, version, step):
        values = versions[s][version]
        for number in range(version, step) if is_predicted else ():
            values = {
                name: value + rates_at(number)[directions[s][version][name][0]] * directions[s][version][name][1]
                for name, value in values.items()
            }
        return values

    for step, inputs in enumerate(batches):
        first = step if step in flushes else first
        gradients = [{name: torch.zeros_like(p) for name, p in own.items()} for own in stages]
        for microbatch in range(len(pipeline.microbatches)):
            rows = pipeline.rows(microbatch)

            def read(op, microbatch=microbatch, first=first, step=step):
                return [ahead(s, max(step - table[s, op][microbatch], first), step) for s in range(len(stages))]

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
            optimizers[s].step(step)
            versions[s].append({name: p.detach().clone() for name, p in own.items()})
            directions[s].append({name: direction(optimizers[s], p) for name, p in own.items()})
    return [own[0] for own in versions], [own[-1] for own in versions]


def pipeline_of(graph, model, plan, batches, names, stops):
    """The real executor in threads; the weights of all stages at the end."""
    graphs = [copy.deepcopy(graph) for _ in range(plan.mesh.num_ranks)]

    def main(rank, transport):
        worker = build_worker(graphs[rank], model, plan, rank, transport, device=CPU)
        window = worker.window
        (optimizers,) = [Optimizers(list(worker.parameters.values()), names) for _ in worker.versions]
        window.update = lambda block, step: optimizers.step(step)
        window.predict = lambda block, version, step: optimizers.predict(version, step)

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


def distances(name, layout, names=tuple(RATES), stops=(STEPS,)):
    """Of the pipeline from the recurrence, as parts of the distance moved: optimizer -> of its parameters."""
    graph, model, batches = model_of(name)
    plan = build_plan(model, layout)
    start, expected = recurrence(graph, plan, batches, names, {0, *stops})
    found = pipeline_of(graph, model, plan, batches, names, stops)
    apart, moved = (dict.fromkeys(names, 0.0) for _ in range(2))
    for rank, (parameters, _, _) in enumerate(found):
        worker = plan.mesh.place(rank)[1]
        for number, (key, value) in enumerate(parameters.items()):
            optimizer = names[number % len(names)]
            apart[optimizer] += float((value - expected[worker][key]).square().sum())
            moved[optimizer] += float((start[worker][key] - expected[worker][key]).square().sum())
    return {optimizer: (apart[optimizer] / moved[optimizer]) ** 0.5 for optimizer in names}


def is_within_limits(found):
    return all(distance <= LIMITS[optimizer] for optimizer, distance in found.items())


ROWS = [row for row in Versions if row is not Versions.FLUSHED]
"""Of them "predicted" trains with optimizers that have a direction."""


def optimizers_of(versions):
    return ("momentum", "adamw") if versions is Versions.PREDICTED else tuple(RATES)


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
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (3, 4)])
def test_a_window_is_the_recurrence(versions, stages, microbatches):
    assert is_within_limits(distances("dit", layout_of(versions, stages, microbatches), optimizers_of(versions)))


SIZES = [
    *(("dit", stages, microbatches) for stages, microbatches in ((2, 4), (3, 1), (4, 1), (4, 4))),
    ("stable diffusion", 4, 1),
    ("stable diffusion", 3, 4),
]
"""Beside those of `test_a_window_is_the_recurrence`."""


@pytest.mark.slow
@pytest.mark.parametrize("versions", ROWS)
@pytest.mark.parametrize(("name", "stages", "microbatches"), SIZES)
def test_every_row_is_the_recurrence(name, versions, stages, microbatches):
    assert is_within_limits(distances(name, layout_of(versions, stages, microbatches), optimizers_of(versions)))


@pytest.mark.parametrize("versions", [Versions.STASHED, Versions.PREDICTED])
def test_copies_of_the_pipeline_recomputation_and_flushes_between(versions):
    """Two groups that share each batch; batches 3 and 5 begin with empty pipelines."""
    layout = layout_of(versions, 2, 2, data_parallel=2, checkpointed=("*",))
    assert is_within_limits(distances("dit", layout, ("momentum",), stops=(3, 5, STEPS)))


class LateBinding(BlockVersions):
    """Binds the newest version before a backward too."""

    def bind(self, version):
        super().bind(self.newest)


def test_a_backward_on_other_weights_than_its_forward_is_noticed(monkeypatch):
    monkeypatch.setattr("diffusionpipe.runtime.worker.BlockVersions", LateBinding)
    assert distances("stable diffusion", layout_of(Versions.STASHED, 2, 1), ("sgd",))["sgd"] > 1e-4


@pytest.mark.parametrize(("versions", "counts"), [(Versions.STASHED, (3, 2, 1)), (Versions.PREDICTED, (4, 3, 1))])
def test_bytes_of_versions_are_those_of_the_table(versions, counts):
    graph, model, batches = model_of("dit")
    plan = build_plan(model, layout_of(versions, 3, 1))
    found = pipeline_of(graph, model, plan, batches, ("momentum",), (2,))
    for rank, (parameters, _, held) in enumerate(found):
        own = sum(p.numel() * p.element_size() for p in parameters.values())
        assert held == own * versions_held(plan.train)[rank] == own * counts[rank]
