"""A tiny cascade of two different networks, and what each of its backbones learns in a step."""

import copy
from dataclasses import replace

import torch
from kit.descriptions import described
from kit.layouts import CPU, Step, feed_rows
from kit.tiny_models import raw_inputs, tiny_dit, tiny_stable_diffusion
from torch.nn.functional import interpolate

from diffusionpipe.models.compose.cascade import cascade_graph
from diffusionpipe.planner import build_plan
from diffusionpipe.runtime.comm.places import holders_of
from diffusionpipe.runtime.comm.transport import ProcessTransport
from diffusionpipe.runtime.engine.worker import build_worker

BATCH = 16
MEMBERS = {
    "base": lambda: tiny_dit(),
    "super": lambda: tiny_stable_diffusion(resolution=16, unet={"block_out_channels": (4, 8), "sample_size": 8}),
}


def cascade():
    return cascade_graph({name: build() for name, build in MEMBERS.items()})


def inputs_of(member, name, inputs):
    """What the model reads when it is alone."""
    found = {spec.name: inputs.get(f"{name}/{spec.name}") for spec in member.inputs}
    size = next(spec.shape[-1] for spec in member.inputs if spec.name == "pixels")
    found["pixels"] = interpolate(inputs["pixels"], size=(size, size), mode="bilinear", antialias=True)
    if size == inputs["pixels"].shape[-1]:
        found["pixels"] = inputs["pixels"]
    return found


def batch_of(graph, seed):
    """Labels, tokens and times are drawn by the ends of their names."""
    known = {spec.name: spec.name.rpartition("/")[2] for spec in graph.inputs}
    drawn = {}
    for number, spec in enumerate(graph.inputs):
        alone = replace(graph, inputs=(replace(spec, name=known[spec.name]),))
        drawn[spec.name] = raw_inputs(alone, BATCH, seed * 100 + number)[known[spec.name]]
    return drawn


def parts_of(worker, outputs):
    """This rank's part of each backbone's loss, and its gradients."""
    losses = {backbone.name: 0.0 for backbone in worker.model.backbones}
    for output in outputs:
        losses[output.name.partition("/")[0]] += float(output.value.double().sum()) / worker.plan.batch
    return losses, {name: p.grad.clone() for name, p in worker.parameters.items() if p.grad is not None}


def merged(results):
    """Backbone by backbone: the loss of all ranks and the gradients under the names that the model has alone."""
    found = {name: Step(0.0, {}) for name in MEMBERS}
    for losses, gradients in results:
        found = {name: Step(step.loss + losses[name], step.gradients) for name, step in found.items()}
        for full, gradient in gradients.items():
            name, _, own = full.partition("/")
            known = found[name].gradients.setdefault(own, gradient)
            assert torch.equal(known, gradient), f"replicas differ in {full}"
    return found


def step_of(worker, inputs):
    feed_rows(worker, inputs)
    worker.reset_gradients()
    return parts_of(worker, worker.train.run())


def steps_in_process(job, layouts):
    graph = cascade()
    model = described(graph)
    inputs = batch_of(graph, 0)
    found = []
    for one in layouts:
        plan = build_plan(model, one)
        transport = ProcessTransport(job.device, summing=tuple(holders_of(plan).values()))
        worker = build_worker(copy.deepcopy(graph), model, plan, job.membership.rank, transport, device=CPU)
        found.append(step_of(worker, inputs))
    return found
