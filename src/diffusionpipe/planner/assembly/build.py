"""A plan from given sizes: partition by counted work, the named schedule, and every pass in order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import pairwise
from math import prod
from typing import Protocol

from diffusionpipe.costs import Costs, ModelGraph
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Edge, Mesh, Plan, Range, Schedule, Timeline
from diffusionpipe.passes import (
    PlacedFill,
    communicate,
    connect,
    gathers_first,
    insert_encoding,
    insert_fills,
    prologue,
    shard_parameters,
)
from diffusionpipe.planner.assembly.buckets import bucket_starts
from diffusionpipe.planner.assembly.folded import stage_starts
from diffusionpipe.planner.assembly.shardable import check_homes, check_shardable, sharded_buckets, sharding_problems
from diffusionpipe.planner.assembly.structure import Division, connected, generated, reduced
from diffusionpipe.schedules import forward_over
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.timing.legal import check

Blocks = Sequence[Sequence[str]]


class Pricing(Protocol):
    """Says what the actions of a schedule cost."""

    def __call__(self, schedule: Schedule, blocks: Blocks, mesh: Mesh) -> Costs:
        """The costs of a schedule whose stage s holds the layers `blocks[weights of s]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfilled:
    """A training iteration before its frozen work is placed."""

    schedule: Schedule
    """Compute and gradient reductions; no messages, no frozen pipeline."""
    timeline: Timeline
    """Of that schedule at these costs."""
    costs: Costs
    blocks: Blocks
    """The last one is the frozen block, in order."""
    mesh: Mesh


class Filler(Protocol):
    """Places the frozen work of the next batch in the bubbles of this one."""

    def __call__(self, unfilled: Unfilled) -> Mapping[int, Sequence[PlacedFill]]:
        """Worker -> its fills in their order, as `passes.insert_fills` takes them; together they cover the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The sizes that the user chose."""

    batch: int
    """Samples of one step, over all data-parallel groups."""
    stages: int
    """Workers of one pipeline, before they are replicated; a schedule may cut the model finer than that."""
    microbatches: int
    schedule: str = "1f1b"
    replicas: tuple[int, ...] = ()
    """Workers in place of each; () for one."""
    data_parallel: int = 1
    """Copies of the whole pipeline."""
    adjacent: int = 1
    """So many of these copies stand side by side, worker by worker (see `Mesh`): they share a node's links."""
    sharded: bool = False
    """Whether the copies hold every block's parameters, gradients and optimizer state in parts, once among them; a
    block, a bucket of a stage, is gathered for its compute. See `passes.shard_parameters`."""
    encode_chunk: int = 16
    """Samples that go through the frozen layers at a time,"""
    encode_chunks: tuple[tuple[str, int], ...] = ()
    """and through those of some components, by name."""
    splits: tuple[str, ...] = ()
    """Names of the layers with which blocks 1, 2, ... start; () cuts by counted work."""
    checkpointed: tuple[str, ...] = ()
    """Patterns (as of file names) of layers to recompute in the backward."""
    buckets: int = 1
    """Parts of every block, each reduced as soon as its own gradients are complete. 0, for sharded parameters alone:
    as many as `sharded_buckets` says."""
    orders: Schedule | None = None
    """Orders of compute actions made for these very sizes, in place of those of `schedule`; None: the family's."""
    offload_frozen: bool = False
    """Whether the frozen part's parameters rest in host memory and come to the device layer by layer, as they run."""
    sample_batch: int = 0
    """Samples drawn at a time during training (both halves of guidance counted); 0 for one per stage."""

    @property
    def workers(self) -> int:
        """Workers of one pipeline."""
        return sum(self.replicas) if self.replicas else self.stages

    @property
    def mesh(self) -> Mesh:
        """The mesh of the job."""
        return Mesh(
            data_parallel=self.data_parallel,
            pipeline=self.workers,
            adjacent=self.adjacent,
            shard=self.data_parallel if self.sharded else 1,
        )

    @property
    def division(self) -> Division:
        """How its stages are divided further."""
        return Division(
            replicas=self.replicas or (1,) * self.stages,
            buckets=self.buckets,
            data_parallel=self.data_parallel,
            sharded=self.sharded,
        )

    def generated(self) -> Schedule:
        """The layout's own orders, or the family's schedule of these sizes.

        Raises:
            ConfigError: there is no such family, or it cannot do these sizes.
        """
        size = self.batch // (self.data_parallel * self.microbatches)
        if self.orders is not None:
            schedule = self.orders
            for number, pipeline in enumerate(schedule.placement.pipelines):
                sizes = (max(size, 1),) * len(pipeline.microbatches)
                schedule = connect(schedule, pipeline.edges, microbatches=sizes, pipeline=number)
            return schedule
        return generated(self.schedule, self.stages, self.microbatches, max(size, 1))

    def places(self) -> tuple[int, ...]:
        """The worker of each stage of the first pipeline, in forward order: as many as blocks, before buckets.

        Raises:
            ConfigError: there is no such family, or it cannot do these sizes.
        """
        return self.generated().placement.workers()

    def num_blocks(self) -> int:
        """Parts into which the trained model is cut, before buckets.

        Raises:
            ConfigError: there is no such family, or it cannot do these sizes.
        """
        return len(self.places())


def build_plan(
    graph: ModelGraph, layout: Layout, *, pricing: Pricing | None = None, filler: Filler | None = None
) -> Plan:
    """The plan of a layout.

    `pricing` says what actions cost, for the order of messages and for the filler; without it all stages are alike.
    `filler` places the next batch's frozen work; without it each batch is encoded before its first forward.

    Raises:
        ConfigError: sizes that do not fit each other or the model; all problems are listed.
    """
    build = _build(graph, layout, pricing)
    names = [name for block in build.blocks[:-1] for name in block]
    patterns = layout.checkpointed
    train = _train_schedule(build, layout.generated(), filler)
    return Plan(
        mesh=layout.mesh,
        blocks=build.blocks,
        train=train,
        prologue=prologue(train) if filler else None,
        validate=_train_schedule(build, _forwards_of(layout), None),
        sample=_sample_schedule(build),
        checkpointed=tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)),
        offload_frozen=layout.offload_frozen,
    )


def build_train_schedule(
    graph: ModelGraph, layout: Layout, *, pricing: Pricing | None = None, filler: Filler | None = None
) -> tuple[Schedule, Blocks]:
    """The training schedule of `build_plan` and its blocks, without the rest of the plan.

    Raises:
        ConfigError: sizes that do not fit each other or the model.
    """
    build = _build(graph, layout, pricing)
    return _train_schedule(build, layout.generated(), filler), build.blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Build:
    graph: ModelGraph
    layout: Layout
    blocks: tuple[tuple[str, ...], ...]
    pricing: Pricing


def _build(graph: ModelGraph, layout: Layout, pricing: Pricing | None) -> _Build:
    _check_layout(graph, layout)
    partition = _partition(graph, layout)
    layout = replace(layout, buckets=layout.buckets or sharded_buckets(graph, partition))
    backbone = _bucketed(graph, partition, layout.buckets)
    if layout.sharded:
        check_shardable(graph, (*backbone, graph.frozen_layers))
    return _Build(graph=graph, layout=layout, blocks=(*backbone, graph.frozen_layers), pricing=pricing or _uniform)


def _uniform(schedule: Schedule, blocks: Blocks, mesh: Mesh) -> Costs:
    return uniform_costs(schedule)


def _check_layout(graph: ModelGraph, layout: Layout) -> None:
    problems = []
    num_blocks = layout.stages
    try:
        num_blocks = layout.num_blocks()
        if layout.sharded:
            check_homes(layout.generated())
    except ConfigError as error:
        problems.append(str(error))
    if layout.replicas and len(layout.replicas) != layout.stages:
        problems.append(f"{len(layout.replicas)} replica counts for {layout.stages} stages; give one per stage")
    if num_blocks > len(graph.backbone_layers):
        problems.append(
            f"{num_blocks} stages but the trained part has only {len(graph.backbone_layers)} layers; "
            f"use at most {len(graph.backbone_layers)} stages"
        )
    per_microbatch, rest = divmod(layout.batch, layout.data_parallel * layout.microbatches)
    if rest or not per_microbatch:
        problems.append(
            f"a batch of {layout.batch} cannot be cut into {layout.microbatches} equal micro-batches on each of "
            f"{layout.data_parallel} data-parallel groups; use a multiple of "
            f"{layout.data_parallel * layout.microbatches}"
        )
    if layout.adjacent < 1 or layout.data_parallel % layout.adjacent:
        problems.append(
            f"{layout.adjacent} adjacent copies of {layout.data_parallel} data-parallel groups; use a divisor"
        )
    if layout.buckets < (not layout.sharded) or num_blocks * layout.buckets > len(graph.backbone_layers):
        problems.append(
            f"{num_blocks} stages of {layout.buckets} buckets need {num_blocks * layout.buckets} layers; the "
            "trained part has "
            f"{len(graph.backbone_layers)}: use at most {len(graph.backbone_layers) // max(num_blocks, 1)} buckets"
        )
    if layout.sharded:
        problems += sharding_problems(layout.data_parallel, layout.replicas)
    problems += [
        f"micro-batches of {per_microbatch} samples cannot be shared evenly by {count} replicas of stage {stage}; "
        f"make the micro-batch a multiple of {count}"
        for stage, count in enumerate(layout.replicas)
        if per_microbatch % count
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _partition(graph: ModelGraph, layout: Layout) -> tuple[tuple[str, ...], ...]:
    """Names of the backbone's layers, block by block."""
    layers = graph.backbone_layers
    if layout.splits:
        starts = [0, *_split_positions(layers, layout.splits, layout.num_blocks())]
    else:
        flops = {layer.name: layer.flops for layer in graph.layers}
        costs = [flops[name] for name in layers] if any(flops[name] for name in layers) else [1] * len(layers)
        starts = list(stage_starts(graph, costs, layout.places()))
    return tuple(layers[start:stop] for start, stop in zip(starts, [*starts[1:], len(layers)], strict=True))


def _split_positions(layers: Sequence[str], splits: Sequence[str], num_blocks: int) -> list[int]:
    unknown = [name for name in splits if name not in layers]
    if unknown:
        close = get_close_matches(unknown[0], layers, n=3, cutoff=0.3)
        raise ConfigError(f"no trained layer is named {unknown[0]!r}; close names: {', '.join(close) or 'none'}")
    positions = [layers.index(name) for name in splits]
    if len(positions) != num_blocks - 1 or sorted({0, *positions}) != [0, *positions]:
        raise ConfigError(
            f"{num_blocks} stages need {num_blocks - 1} splits in the model's order, none of them its first "
            f"layer; got {', '.join(splits)}"
        )
    return positions


def _edges(graph: ModelGraph, blocks: Sequence[Sequence[str]]) -> tuple[Edge, ...]:
    """The tensors that blocks read from each other: edges between block ids."""
    return tuple(
        Edge(
            producer=producer,
            consumer=consumer,
            tensors=tensors,
            gradients=tuple(name for name in tensors if graph.tensor(name).needs_gradient),
        )
        for (producer, consumer), tensors in sorted(graph.flows(blocks).items())
    )


def _bucketed(graph: ModelGraph, blocks: Blocks, parts: int) -> tuple[tuple[str, ...], ...]:
    """Every block cut into that many of about equal gradients."""
    sizes = {p.name: prod(p.shape) for p in graph.parameters if p.is_trainable}
    gradients = {layer.name: sum(sizes.get(name, 0) for name in layer.parameters) for layer in graph.layers}
    found = []
    for block in blocks:
        if parts > len(block):
            raise ConfigError(
                f"{parts} buckets cannot be made of the {len(block)} layers of a stage, which begins with "
                f"{block[0]}; use at most {len(block)} buckets"
            )
        starts = bucket_starts([gradients[name] for name in block], parts)
        stops = (*starts[1:], len(block))
        found += [tuple(block[start:stop]) for start, stop in zip(starts, stops, strict=True)]
    return tuple(found)


def _connected(build: _Build, schedule: Schedule, backbone: Blocks) -> Schedule:
    return connected(schedule, _edges(build.graph, backbone), build.layout.division)


def _forwards_of(layout: Layout, microbatches: Sequence[int] = ()) -> Schedule:
    """Forwards through the first pipeline's stages; of the whole batch, if nothing else is said."""
    batch = [size for pipeline in layout.generated().placement.pipelines for size in pipeline.microbatches]
    return forward_over(layout.places(), microbatches or batch)


def _train_schedule(build: _Build, schedule: Schedule, filler: Filler | None) -> Schedule:
    """A family's schedule after all passes; every result of a pass is checked."""
    graph, layout, blocks = build.graph, build.layout, build.blocks
    backbone, frozen = blocks[:-1], len(blocks) - 1
    schedule = reduced(_connected(build, schedule, backbone), layout.division)
    outputs = {block: graph.frozen_outputs(layers) for block, layers in enumerate(backbone)}
    if filler:
        costs = build.pricing(schedule, blocks, layout.mesh)
        timeline = simulate(schedule, costs)
        fills = filler(Unfilled(schedule=schedule, timeline=timeline, costs=costs, blocks=blocks, mesh=layout.mesh))
        schedule = insert_fills(schedule, fills, block=frozen, outputs=outputs)
    else:
        schedule = insert_encoding(
            schedule,
            block=frozen,
            outputs=outputs,
            num_layers=len(blocks[frozen]),
            max_chunk=layout.encode_chunk,
            runs=_encoding_runs(build),
        )
        schedule = gathers_first(schedule)
    return _communicated(build, schedule)


def _encoding_runs(build: _Build) -> list[tuple[Range, int]]:
    """The frozen block cut where the samples change that go through its layers at a time."""
    layout, component = build.layout, {layer.name: layer.component for layer in build.graph.layers}
    of_component = dict(layout.encode_chunks)
    chunks = [of_component.get(component[name], layout.encode_chunk) for name in build.blocks[-1]]
    starts = [i for i, chunk in enumerate(chunks) if i == 0 or chunk != chunks[i - 1]]
    return [(Range(start, stop), chunks[start]) for start, stop in pairwise([*starts, len(chunks)])]


def _sample_schedule(build: _Build) -> Schedule:
    """The denoiser alone: its inputs are put in from outside, its last tensor is the prediction."""
    graph, layout = build.graph, build.layout
    needed = set(graph.backbone_layers) if graph.prediction is None else _ancestors(graph, graph.prediction)
    backbone = [tuple(name for name in block if name in needed) for block in build.blocks[:-1]]
    replicas = layout.replicas or (1,) * layout.stages
    unit = max(replicas)
    count = max(1, min(layout.stages, layout.sample_batch // unit))
    size = -(-max(layout.sample_batch, layout.stages) // (count * unit)) * unit
    schedule = _connected(build, _forwards_of(layout, [size] * count), backbone)
    return _communicated(build, shard_parameters(schedule) if layout.sharded else schedule)


def _ancestors(graph: ModelGraph, tensor: str) -> set[str]:
    """Backbone layers that the tensor depends on."""
    wanted, layers = {tensor}, set()
    backbone = set(graph.backbone_layers)
    for layer in reversed(graph.layers):
        if layer.name in backbone and not wanted.isdisjoint(layer.writes):
            layers.add(layer.name)
            wanted.update(layer.reads)
    return layers


def _communicated(build: _Build, schedule: Schedule) -> Schedule:
    check(schedule)
    costs = build.pricing(schedule, build.blocks, build.layout.mesh)
    schedule = communicate(schedule, simulate(schedule, costs))
    check(schedule)
    return schedule
