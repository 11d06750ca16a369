"""Measured on virtual ranks: waits instead of compute, everything else real, beside what the simulator says.

Both backbones in opposite directions, in the same direction and one after the other, over the same four stages; and one
backbone with and without self-conditioning. All in turn on one set of processes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from rich.table import Table

from benchmarks.cascade.models import deepfloyd_pair
from benchmarks.paper.profiles import load
from benchmarks.throughput.ratios import interleaved
from diffusionpipe.costs import Backbone, Profile
from diffusionpipe.costs.graph import LayerSpec
from diffusionpipe.ir import Plan
from diffusionpipe.planner.assembly.layout import BackboneLayout, Layout
from diffusionpipe.planner.from_profile import plan_from_profile, setting_of
from diffusionpipe.planner.pricing.stage_costs import costs_of
from diffusionpipe.runtime.job.local_ranks import local_ranks
from diffusionpipe.runtime.rehearsals.rehearsal import VirtualRun
from diffusionpipe.units import Seconds
from diffusionpipe.workflows.rehearsing.rehearsal import (
    Rehearsed,
    fitting_bytes_scale,
    measured_link,
    predict_run,
    rehearse_runs,
    virtual_run,
)

STAGES, BATCH, COUNTS = 4, 32, (4, 8)
"""Micro-batches of both backbones: in proportion to their work, roughly."""
ITERATION: Seconds = 1.0
"""How long the first way's iteration is to last; all others are scaled alike."""
ROUNDS = 9
WAYS = {"opposite directions": "opposed", "same direction": "together", "one after the other": "1f1b"}
ALONE, SHARE = "sd-2.1", 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One plan, measured and simulated."""

    name: str
    seconds: Seconds
    """Median of its iterations."""
    predicted: Seconds
    bubble: float
    """Idle part, measured."""

    @property
    def ratio(self) -> float:
        """1 where the simulation is right."""
        return self.seconds / self.predicted


def measured_ways(rounds: int = ROUNDS) -> list[Measured]:
    """Every plan, measured in turn."""
    plans = {name: (plan, profile) for name, plan, profile in _plans()}
    costs = {
        name: costs_of(plan.train, plan.blocks, plan.mesh, setting_of(profile, plan.mesh, BATCH))
        for name, (plan, profile) in plans.items()
    }
    with local_ranks(STAGES) as ranks:
        link = measured_link(ranks)

        def runs(scale: float, bytes_scale: float) -> dict[str, VirtualRun]:
            return {
                name: virtual_run(
                    plan.train,
                    costs[name],
                    profile.graph,
                    plan.mesh,
                    scale=scale,
                    bytes_scale=bytes_scale,
                    link=link,
                )
                for name, (plan, profile) in plans.items()
            }

        scale = ITERATION / max(predict_run(run).makespan for run in runs(1.0, 1e-9).values())
        bytes_scale = min(
            fitting_bytes_scale(plan.train, costs[name], link, ITERATION) for name, (plan, _) in plans.items()
        )
        order = [name for turn in interleaved(list(plans), rounds) for name in turn]
        found = rehearse_runs(ranks, runs(scale, bytes_scale), order)
    return [_measured(name, found[name]) for name in plans]


def _measured(name: str, found: Rehearsed) -> Measured:
    return Measured(
        name=name,
        seconds=median(found.seconds),
        predicted=found.predicted.makespan,
        bubble=median(timeline.bubble for timeline in found.measured),
    )


def _plans() -> Iterator[tuple[str, Plan, Profile]]:
    pair = deepfloyd_pair()
    own = tuple(
        BackboneLayout(name=backbone.name, microbatches=count)
        for backbone, count in zip(pair.graph.backbones, COUNTS, strict=True)
    )
    for name, schedule in WAYS.items():
        layout = Layout(batch=BATCH, stages=STAGES, microbatches=max(COUNTS), schedule=schedule, backbones=own)
        yield name, plan_from_profile(pair, layout), pair
    plain = load(ALONE)
    for name, profile in (("alone", plain), ("alone, self-conditioned", conditioned(plain, SHARE))):
        layout = Layout(batch=BATCH, stages=STAGES, microbatches=8, probes=profile.graph.probes)
        yield name, plan_from_profile(profile, layout), profile


def conditioned(profile: Profile, share: float) -> Profile:
    """The same model with self-conditioning: the readers of its noisy samples also read what the loss's layer writes.

    A pass without gradients is taken to last as long as a forward; that of a wider first convolution is left out.
    """
    graph = profile.graph
    backbone = graph.backbones[0]
    latents = graph.tensor(backbone.noisy)
    estimate = replace(latents, name="estimate", needs_gradient=False)
    own = set(graph.backbone_layers)
    return replace(
        profile,
        graph=replace(
            graph,
            layers=tuple(_with_estimate(layer, backbone) if layer.name in own else layer
                         for layer in graph.layers),
            tensors=(*graph.tensors, estimate),
            backbones=(replace(backbone, estimate="estimate", self_conditioning=share),),
        ),
    )  # fmt: skip


def _with_estimate(layer: LayerSpec, backbone: Backbone) -> LayerSpec:
    if backbone.loss in layer.writes:
        return replace(layer, writes=(*layer.writes, "estimate"))
    return replace(layer, reads=(*layer.reads, "estimate")) if backbone.noisy in layer.reads else layer


def virtual_table(rows: Sequence[Measured]) -> Table:
    """Measured over simulated."""
    table = Table(box=None, title_justify="left", title=f"{STAGES} virtual ranks, {ROUNDS} iterations of each")
    for head in ("way", "measured ms", "simulated ms", "measured / simulated", "idle"):
        table.add_column(head, justify="left" if head == "way" else "right")
    for row in rows:
        table.add_row(
            row.name, f"{row.seconds * 1e3:.1f}", f"{row.predicted * 1e3:.1f}", f"{row.ratio:.3f}", f"{row.bubble:.1%}"
        )
    return table
