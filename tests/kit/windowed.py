"""Windows of real models on every rank, and the optimizers of their stages: in threads, or in processes of a crew."""

import copy
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from random import Random

import torch
from kit.descriptions import described
from kit.layout_cases import scattered
from kit.layouts import CPU
from kit.tiny_models import raw_inputs, tiny_controlled, tiny_dit, tiny_flux, tiny_stable_diffusion

from diffusionpipe.costs.forms import Form
from diffusionpipe.ir import Op
from diffusionpipe.ir.versions import staleness_of
from diffusionpipe.models.graphs.graph import layer_parameters
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.models.parameters.lora import LoraSettings, add_lora
from diffusionpipe.models.parameters.stored_linear import store
from diffusionpipe.models.parameters.weights import materialize
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.runtime.comm.places import holders_of
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.comm.transport import ProcessTransport
from diffusionpipe.runtime.compute.stage import Precision
from diffusionpipe.runtime.engine.worker import build_worker
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.trainer.optim.lookahead import predict
from diffusionpipe.trainer.optim.optimizer import set_learning_rates

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


def trained_of(graph, layers):
    return {name: p for name, p in layer_parameters(graph, layers).items() if p.requires_grad}


def recurrence(graph, plan, batches, names, flushes, autocast=None, table=None):
    """The sequential recurrence, written out: every version of every stage is kept.

    `table`: the ages that forwards and backwards read, as `staleness_of` gives them; None: the plan's own.
    """
    graph = copy.deepcopy(graph)
    placement = plan.train.placement
    stages = [
        trained_of(graph, plan.blocks[stage.weights])
        for index, stage in enumerate(placement.stages)
        if not placement.is_frozen(index)
    ]
    optimizers = [Optimizers(list(own.values()), names) for own in stages]
    versions = [[{name: p.detach().clone() for name, p in own.items()}] for own in stages]
    directions = [[{name: direction(own, p) for name, p in stages[s].items()}] for s, own in enumerate(optimizers)]
    table, (pipeline, *_) = table or staleness_of(plan.train), placement.pipelines
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
            with Precision(autocast=autocast).context():
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


def distances_of(plan, names, start, expected, found):
    """Of the weights found on each rank from those expected, in parts of the distance moved: by optimizer."""
    apart, moved = (dict.fromkeys(names, 0.0) for _ in range(2))
    for rank, (parameters, *_) in enumerate(found):
        worker = plan.mesh.place(rank)[1]
        for number, (key, value) in enumerate(parameters.items()):
            optimizer = names[number % len(names)]
            apart[optimizer] += float((value - expected[worker][key]).square().sum())
            moved[optimizer] += float((start[worker][key] - expected[worker][key]).square().sum())
    return {optimizer: (apart[optimizer] / moved[optimizer]) ** 0.5 for optimizer in names}


def is_within_limits(found):
    return all(distance <= LIMITS[optimizer] for optimizer, distance in found.items())


def layout_of(versions, stages, microbatches, **others):
    return Layout(
        batch=BATCH,
        stages=stages,
        microbatches=microbatches,
        versions=versions,
        delay=-(-(stages - 1) // microbatches),
        **others,
    )


def batches_of(graph, steps=STEPS):
    inputs = raw_inputs(graph, BATCH * steps)
    return [{key: value[BATCH * i : BATCH * (i + 1)] for key, value in inputs.items()} for i in range(steps)]


def run_windows(graph, model, plan, rank, transport, *, batch_of, names, stops, autocast=None, wait=None):
    """One rank's weights at the end, its losses, the bytes of its versions and of its rows by tensor.

    `wait` is called before each update.
    """
    precision = Precision(autocast=autocast)
    worker = build_worker(copy.deepcopy(graph), model, plan, rank, transport, device=CPU, precision=precision)
    window = worker.window
    (optimizers,) = [Optimizers(list(worker.parameters.values()), names) for _ in worker.versions]

    def update(block, step):
        if wait is not None:
            wait()
        optimizers.step(step)

    def feed(batch):
        group = worker.place.group * (BATCH // plan.mesh.data_parallel)
        rows = worker.encoded
        worker.feed_batch(batch, {k: v[group + rows.start : group + rows.stop] for k, v in batch_of(batch).items()})

    window.update = update
    window.predict = lambda block, version, step: optimizers.predict(version, step)
    losses = []
    for stop in stops:
        while window.batch < stop:
            worker.reset_gradients()
            outputs = window.run(stop, feed)
            losses.append(sum(float(output.value.sum()) for output in outputs) / BATCH)
    held = sum(versions.num_bytes for versions in worker.versions.values())
    rows = {name: row_bytes(window.stores, name) for name in window.stores[0]}
    return {name: p.detach().clone() for name, p in worker.parameters.items()}, losses, held, rows


def row_bytes(stores, name):
    """Of a tensor in all stores."""
    views = [store.view(name, store.extents[name]) for store in stores]
    return sum(view.numel() * view.element_size() for view in views)


def windows_in_process(
    job: Job,
    build: Callable,
    layouts: Sequence[tuple[Layout, tuple[str, ...]]],
    stops: Sequence[int],
    seed: int | None,
    fill: int | None = None,
):
    """One rank's `run_windows` of each layout, over torch.distributed; with a seed every update waits a random time.

    With `fill` the frozen work is scattered, as that number says.
    """
    graph = build()
    model, batches = described(graph), batches_of(graph)
    random, rank = Random(seed), job.membership.rank
    random.seed(f"{seed} {rank}")
    wait = partial(_sleep, random) if seed is not None else None
    found = []
    for layout, names in layouts:
        plan = build_plan(model, layout, filler=None if fill is None else scattered(fill))
        transport = ProcessTransport(job.device, summing=tuple(holders_of(plan).values()))
        batch_of = lambda batch: batches[batch % STEPS]  # noqa: E731
        found.append(
            run_windows(graph, model, plan, rank, transport, batch_of=batch_of, names=names, stops=stops, wait=wait)
        )
    return found


def _sleep(random: Random) -> None:
    time.sleep(random.choice((0, 0, 0.002, 0.01)))


def tiny_adapters(form: Form | None = None):
    graph = tiny_flux(torch.float64)
    add_lora(graph.components, "transformer", LoraSettings(rank=2))
    store(graph, lambda component: form if component != "vae" else None)
    materialize(graph, [layer.name for layer in graph.layers], {}, device="cpu", dtype=torch.float64, seed=0)
    return graph


MODELS = {
    "stable diffusion": tiny_stable_diffusion,
    "dit": tiny_dit,
    "adapters": tiny_adapters,
    "adapters on nf4": partial(tiny_adapters, Form.NF4),
    "text encoder": lambda: tiny_stable_diffusion(train=("unet", "text_encoder")),
    "controlnet": tiny_controlled,
    "float32": lambda: tiny_dit(torch.float32),
}


@cache
def model_of(name):
    graph = MODELS[name]()
    return graph, described(graph, autocast=torch.bfloat16 if name == "float32" else None), batches_of(graph)


def pipeline_of(graph, model, plan, batches, names, stops, autocast=None):
    """The real executor in threads: of each rank the weights at the end, the losses, the bytes of its versions."""

    def main(rank, transport):
        one = {"batch_of": batches.__getitem__, "names": names, "stops": stops, "autocast": autocast}
        return run_windows(graph, model, plan, rank, transport, **one)

    return run_threads(plan.mesh.num_ranks, main)
