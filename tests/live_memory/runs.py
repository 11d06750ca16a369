"""One case: a model, a schedule, a number of ranks. What a third step holds, beside what is predicted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch
from kit.descriptions import described
from kit.kept_results import kept
from kit.layouts import CPU, copies_of, feed_rows
from kit.tiny_models import raw_inputs, tiny_dit, tiny_flux, tiny_stable_diffusion
from live_memory.counter import LiveStorages, UnseenCopies, sampled_between
from torch import Tensor

from diffusionpipe.costs import ModelGraph, Profile
from diffusionpipe.costs.forms import Form
from diffusionpipe.holding.memory import MemoryUse
from diffusionpipe.ir import Op, Plan, Range
from diffusionpipe.ir.unroll import unroll
from diffusionpipe.ir.versions import Versions
from diffusionpipe.models.cut.glue import tables_of
from diffusionpipe.models.graphs.graph import LayerGraph, canonical_names
from diffusionpipe.models.parameters.lora import LoraSettings, add_lora
from diffusionpipe.models.parameters.stored_linear import store
from diffusionpipe.models.parameters.weights import materialize
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.planner.from_profile import setting_of
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.window_costs import window_memory
from diffusionpipe.planner.search.proposal import predict
from diffusionpipe.profiler.analytic import analytic_profile
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.comm.transport import Transport
from diffusionpipe.runtime.engine.worker import Worker, build_worker

LEAST_HELD = 8_000_000
"""Bytes that the fullest rank holds at least, so that no rounding of small things bears on a ratio."""
LEAST_LAYERS = 32
"""Trained layers of a model at least."""
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Of the profile: no more samples are in a micro-batch."""
BATCHES = (24, 48, 96, 192)
"""A case has the smallest of these batches with which the prediction is as much; else the largest."""
STEPS = 3


def stable_diffusion() -> LayerGraph:
    unet = {
        "block_out_channels": (16, 32, 32),
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "layers_per_block": (3, 3, 4),
        "sample_size": 16,
    }
    return tiny_stable_diffusion(torch.float32, resolution=32, unet=unet)


def dit() -> LayerGraph:
    transformer = {"num_layers": 32, "sample_size": 16, "num_attention_heads": 2, "attention_head_dim": 16}
    return tiny_dit(torch.float32, resolution=32, transformer=transformer)


def flux() -> LayerGraph:
    transformer = {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 4}
    return tiny_flux(torch.float32, resolution=32, transformer=transformer)


def flux_adapters(form: Form | None = None) -> LayerGraph:
    graph = flux()
    add_lora(graph.components, "transformer", LoraSettings(rank=4))
    store(graph, lambda component: form if component != "vae" else None)
    materialize(graph, [layer.name for layer in graph.layers], {}, device="cpu", dtype=torch.float32, seed=0)
    return graph


MODELS: Mapping[str, Callable[[], LayerGraph]] = {
    "stable diffusion": stable_diffusion,
    "dit": dit,
    "flux": flux,
    "flux, adapters": flux_adapters,
    "flux, adapters, int8": partial(flux_adapters, Form.INT8),
    "flux, adapters, nf4": partial(flux_adapters, Form.NF4),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is run."""

    model: str
    schedule: str
    ranks: int
    is_recomputed: bool
    versions: Versions = Versions.FLUSHED
    """Without a flush the next batch's forwards begin among this one's backwards."""

    def __str__(self) -> str:
        weights = "" if self.versions is Versions.FLUSHED else f", {self.versions} weights"
        return f"{self.model}, {self.schedule} on {self.ranks}{weights}{', recomputed' if self.is_recomputed else ''}"


@dataclass(frozen=True, kw_only=True)
class Held:
    """On the rank that holds most: bytes beside weights, their gradients and copies."""

    counted: int
    predicted: int
    is_split: bool

    @property
    def ratio(self) -> float:
        """1: the prediction is right."""
        return self.counted / self.predicted


@cache
def profiled(name: str) -> tuple[LayerGraph, ModelGraph, Profile]:
    graph = MODELS[name]()
    model = described(graph)
    trained = {parameter.name for parameter in model.parameters if parameter.is_trainable}
    num_trained = sum(not trained.isdisjoint(model.layer(layer).parameters) for layer in model.backbone_layers)
    assert num_trained >= LEAST_LAYERS, f"{name}: {num_trained} trained layers"
    profile = kept(
        ("live memory", name),
        lambda: analytic_profile(graph, model, device="rtx4090", precision="float32", batch_sizes=BATCH_SIZES),
    )
    return graph, model, profile


def held_by(case: Case, *, computes_all: bool = False) -> Held:
    """Raises ConfigError where the schedule cannot do these sizes; `computes_all` as of `LiveStorages`."""
    graph, model, profile = profiled(case.model)
    plan, predicted = planned(case, model, profile)
    counted = counted_in(graph, model, plan, computes_all=computes_all)
    most = max(range(len(counted)), key=counted.__getitem__)
    is_split = any(Op.W in pipeline.ops for pipeline in plan.train.placement.pipelines)
    return Held(counted=counted[most], predicted=predicted[most], is_split=is_split)


def planned(case: Case, model: ModelGraph, profile: Profile) -> tuple[Plan, list[int]]:
    """The plan of the case's batch, and what is predicted of each worker in bytes; raises ConfigError as `held_by`."""
    for batch in BATCHES:
        layout = Layout(
            batch=batch,
            stages=case.ranks,
            microbatches=2 * case.ranks,
            schedule=case.schedule,
            checkpointed=("*",) if case.is_recomputed else (),
            versions=case.versions,
        )
        plan = build_plan(model, layout)
        setting = setting_of(profile, plan.mesh, plan.batch, checkpointed=plan.checkpointed)
        predicted = [predicted_of(use) for use in memory_of(setting, plan)]
        if max(predicted) >= LEAST_HELD:
            break
    return plan, predicted


def memory_of(setting: Setting, plan: Plan) -> tuple[MemoryUse, ...]:
    """What is predicted of each worker; without a flush as `workflows.training.expectation` does."""
    if not plan.train.lead:
        return predict(setting, plan.train, plan.blocks, plan.mesh).memory
    trained = predict(setting, unroll(plan.train, 2 * plan.train.lead + 2), plan.blocks, plan.mesh).memory
    encoding = predict(setting, plan.validate, plan.blocks, plan.mesh).memory
    return window_memory(plan.train, trained, [use.frozen_outputs for use in encoding])


def predicted_of(use: MemoryUse) -> int:
    """What of it counts here."""
    return use.activations + use.messages + use.frozen_outputs


def rows_of(worker: Worker, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this rank encodes of a batch."""
    rows = worker.encoded
    return {name: value[rows.start : rows.stop] for name, value in inputs.items()} if rows else {}


def programs_of(worker: Worker) -> list[list[tuple[Callable[[], None] | None, Callable[[], None]]]]:
    """The lists of instructions that a rank runs: one a batch in flight, or one a turn of its stores."""
    if worker.window:
        return [context.program for context in worker.window._contexts]
    return [program.instructions() for program in worker.train._programs]


def counted_in(graph: LayerGraph, model: ModelGraph, plan: Plan, *, computes_all: bool) -> list[int]:
    """What each rank holds at most between two actions of a third step, each rank a thread."""
    inputs = raw_inputs(graph, plan.batch)
    copies = copies_of(graph, plan.mesh.num_ranks)

    def main(rank: int, transport: Transport) -> int:
        own = copies[rank]
        most = 0
        for weight in canonical_names(own.components):
            weight.grad = None  # of the case before
        with LiveStorages(computes_all=computes_all) as live:
            worker = build_worker(own, model, plan, rank, UnseenCopies(transport), device=CPU)
            weights = [t for part in own.components.values() for t in (*part.parameters(), *part.buffers())]
            # Rows of validation and drawing are there all the time, and no part of a training step.
            idle = [executor.store for executor in (worker.validate, worker.sample())]
            other_rows = [store.view(name, Range(0, 0)) for store in idle for name in store]
            older = [
                tensor
                for versions in worker.versions.values()
                for tensors in (*versions._ring, *versions._copies)
                for tensor in tensors
            ]

            def sample() -> None:
                nonlocal most
                gradients = [weight.grad for weight in weights if weight.grad is not None]
                others = (*weights, *gradients, *worker.casts.copies, *tables_of(own.layers), *other_rows, *older)
                most = max(most, live.without(others))

            window = worker.window

            def feed(batch: int) -> None:
                worker.feed_batch(batch, rows_of(worker, inputs))

            if window:  # weights stay as they are: only how many versions there are bears on memory
                window.update = window.predict = lambda *_: None

            for step in range(STEPS):
                if step == STEPS - 1:
                    for program in programs_of(worker):
                        program[:] = sampled_between(program, sample)
                worker.reset_gradients()
                if window:
                    window.run(STEPS + 2, feed)  # the third step is between others
                else:
                    feed_rows(worker, inputs)
                    worker.train.run()
        return most

    return run_threads(plan.mesh.num_ranks, main)
