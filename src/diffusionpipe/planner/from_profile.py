"""Makes the plan of given sizes for a measured model: cut by time, messages ordered by time, bubbles filled."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from diffusionpipe.costs import AllReduce, Cluster, Costs, Device, Link, ModelGraph, Profile
from diffusionpipe.errors import ConfigError
from diffusionpipe.holding import Workload
from diffusionpipe.ir import Mesh, Plan, Schedule, Timeline
from diffusionpipe.passes import PlacedFill
from diffusionpipe.planner.assembly.build import build_plan, build_train_schedule
from diffusionpipe.planner.assembly.folded import stage_starts
from diffusionpipe.planner.assembly.layout import BackboneLayout, Filler, Layout, Unfilled
from diffusionpipe.planner.filling.fills import FillOptions, frozen_layers, plan_fills
from diffusionpipe.planner.filling.windows import window_fills
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import costs_of
from diffusionpipe.planner.pricing.window_costs import window_costs
from diffusionpipe.planner.search.branch_program import best_branches
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.proposal import pricing_of
from diffusionpipe.schedules.building.branches import GRAPHPIPE
from diffusionpipe.schedules.building.list_scheduling import StageTimes
from diffusionpipe.schedules.several.opposed import JOINT
from diffusionpipe.simulator import simulate
from diffusionpipe.simulator.steady import steady
from diffusionpipe.units import Bytes, Seconds

LINKS = {"cpu": Link(1e-4, 1.5e9), "cuda": Link(1e-5, 2.5e10)}
"""Kind of device -> the link between ranks of one machine, if the profile has none."""

UNKNOWN_MEMORY: Bytes = 2**50
"""The memory of a device without a limit: users choose the sizes here, so all of them fit."""


def plan_from_profile(profile: Profile, layout: Layout, cluster: Cluster | None = None) -> Plan:
    """The plan of a layout on a profiled model: cut by time, with frozen work of the next batch in bubbles.

    Stages are cut by measured time, unless the layout names the splits. A model without frozen layers has nothing to
    fill with and gets a plan without fills. How long an offloaded frozen part waits for its parameters is not counted.
    Without a cluster the plan is made for one machine with devices like the profiled one.

    Raises:
        ConfigError: the sizes do not fit each other or the model.
    """
    setting = setting_of(profile, layout.mesh, layout.batch, checkpointed=layout.checkpointed, cluster=cluster)
    layout, filler = cut_and_filled(setting, layout)
    return build_plan(profile.graph, layout, pricing=pricing_of(setting), filler=filler)


def cut_and_filled(setting: Setting, layout: Layout) -> tuple[Layout, Filler | None]:
    """(the layout with splits by time if it names none, the filler of its bubbles or None).

    The filler is None where the model has no frozen layers: bubbles stay empty.

    Raises:
        ConfigError: there are more stages than layers.
    """
    profile = setting.profile
    if layout.backbones:
        layout = _listed(setting, replace(layout, backbones=tuple(_split(profile, layout))))
    elif not layout.splits:
        splits = _branch_splits(setting, layout) or _splits(profile, profile.graph, layout)
        layout = replace(layout, splits=splits)
    if not profile.graph.frozen_layers:
        return layout, None
    frozen = frozen_layers(profile)
    chunks = tuple(size for size in profile.batch_sizes if size <= layout.encode_chunk) or (1,)
    options = FillOptions(chunks=chunks, max_chunk=layout.encode_chunk, overhead=setting.fill_start)

    def filler(unfilled: Unfilled) -> Mapping[int, Sequence[PlacedFill]]:
        costs = costs_of(unfilled.schedule, unfilled.blocks, unfilled.mesh, setting)
        if unfilled.schedule.lead:
            return window_fills(unfilled.schedule, costs, frozen, options)
        return plan_fills(unfilled.schedule, costs, frozen, options).fills

    return layout, filler


def predicted_timeline(profile: Profile, plan: Plan, cluster: Cluster | None = None) -> Timeline:
    """The simulated timeline of a plan's training iteration, at the times of a profile.

    Without a cluster it is simulated on one machine with devices like the profiled one.
    """
    setting = setting_of(profile, plan.mesh, plan.batch, checkpointed=plan.checkpointed, cluster=cluster)
    return simulate(plan.train, costs_of(plan.train, plan.blocks, plan.mesh, setting))


def predicted_period(profile: Profile, plan: Plan, cluster: Cluster | None = None) -> Seconds:
    """The seconds from one batch to the next that a profile predicts for a plan without a flush, updates included."""
    setting = setting_of(profile, plan.mesh, plan.batch, checkpointed=plan.checkpointed, cluster=cluster)
    count = plan.train.num_microbatches()
    encoding = 0.0
    if not plan.is_filled:
        share = plan.train.placement.num_samples / plan.train.num_workers
        encoding = sum(profile.forward(name, share) for name in profile.graph.frozen_layers)

    def price(unrolled: Schedule) -> Costs:
        batches = unrolled.num_microbatches() // count
        return window_costs(unrolled, plan.blocks, plan.mesh, setting, batches=batches, encoding=encoding)

    return float(steady(plan.train, price).period)


def setting_of(
    profile: Profile, mesh: Mesh, batch: int, *, checkpointed: tuple[str, ...] = (), cluster: Cluster | None = None
) -> Setting:
    """The setting in which a profiled model trains with `batch` samples a step on a cluster.

    `cluster`: None is one machine with a device like the profiled one, without a memory limit, for each rank of the
    mesh. `checkpointed`: patterns of recomputed layers.
    """
    workload = Workload(batch=batch, checkpointed=checkpointed)
    return Setting(profile=profile, cluster=cluster or _one_machine(profile, mesh.num_ranks), workload=workload)


def _one_machine(profile: Profile, num_ranks: int) -> Cluster:
    """A cluster of one machine with `num_ranks` devices like the profiled one, and the links of the profile."""
    link = profile.link or LINKS.get(profile.device_type, LINKS["cuda"])
    reduce = profile.reduce or AllReduce(latency=link.latency, bandwidth=link.bandwidth / 2)
    return Cluster(
        name="this machine",
        devices=(Device(name=profile.device, memory=UNKNOWN_MEMORY),) * num_ranks,
        nodes=(0,) * num_ranks,
        intra=link,
        inter=link,
        intra_reduce=reduce,
        inter_reduce=reduce,
    )


def _split(profile: Profile, layout: Layout) -> Iterator[BackboneLayout]:
    """The sizes of each of several backbones; a backbone without splits gets splits by measured time."""
    for number, (own, backbone) in enumerate(zip(layout.backbones, profile.graph.backbones, strict=False)):
        graph = profile.graph.alone(backbone)
        yield replace(own, splits=own.splits or _splits(profile, graph, layout.backbone(number)))


def _listed(setting: Setting, layout: Layout) -> Layout:
    """The layout with the times of its stages, by which orders of both backbones at once are listed, if that is faster.

    Else the layout as it is, whose orders are listed by equal times. True times nearly always give a shorter iteration,
    but not always.
    """
    if layout.schedule not in JOINT or layout.orders is not None:
        return layout
    timed = replace(layout, times=tuple(_times(setting.profile, layout)))
    return min((layout, timed), key=lambda one: _unfilled(setting, one))


def _times(profile: Profile, layout: Layout) -> Iterator[StageTimes]:
    """The times of each stage for one micro-batch on one of its replicas, backbone after backbone."""
    replicas = layout.replicas or (1,) * layout.stages
    for own, backbone, pipe in zip(layout.backbones, profile.graph.backbones, layout.pipes(), strict=True):
        layers = profile.graph.layers_of(backbone)
        starts = (0, *(layers.index(name) for name in own.splits), len(layers))
        for worker, (first, stop) in zip(pipe.workers, pairwise(starts), strict=True):
            size = layout.batch / (layout.data_parallel * own.microbatches * replicas[worker])
            span = layers[first:stop]
            yield StageTimes(
                forward=sum(profile.forward(name, size) for name in span),
                backward=sum(profile.input_grad(name, size) + profile.weight_grad(name, size) for name in span),
            )


def _unfilled(setting: Setting, layout: Layout) -> Seconds:
    """The simulated seconds of an iteration of a layout whose frozen work comes first."""
    train, blocks = build_train_schedule(setting.graph, layout, pricing=pricing_of(setting))
    return simulate(train, costs_of(train, blocks, layout.mesh, setting)).makespan


def _branch_splits(setting: Setting, layout: Layout) -> tuple[str, ...]:
    """The first layers of stages 1, 2, ... on the branches of a model, for the schedule `graphpipe`.

    () for any other schedule, for a layout with replicas, or if the model has no branches.
    """
    judge = Judge(setting=setting)
    if layout.schedule != GRAPHPIPE or layout.replicas or judge.tables.tree is None:
        return ()
    place = Arrangement(data_parallel=layout.data_parallel, units=layout.stages)
    question = judge.questions.question(place, layout.microbatches, ignores_memory=True)
    found = best_branches(question, judge.tables.tree, layout.microbatches)
    return tuple(setting.graph.backbone_layers[start] for start in found[0].starts[1:]) if found else ()


def _splits(profile: Profile, graph: ModelGraph, layout: Layout) -> tuple[str, ...]:
    """The first layers of stages 1, 2, ... whose slowest stage is fastest; replicas are not counted."""
    layers = graph.backbone_layers
    size = layout.batch / (layout.data_parallel * layout.microbatches)
    num_blocks = layout.num_blocks()
    if num_blocks > len(layers):
        raise ConfigError(f"{num_blocks} stages but only {len(layers)} trained layers; use fewer stages")
    share = float(sum(share for _, share in graph.probes))

    def forward(name: str) -> Seconds:
        """Seconds of the layer's forward, and of its probes by the share of samples that have one."""
        return profile.forward(name, size) + share * profile.forward_only(name, size)

    times = [forward(name) + profile.input_grad(name, size) + profile.weight_grad(name, size) for name in layers]
    return tuple(layers[start] for start in stage_starts(graph, times, layout.places())[1:])
