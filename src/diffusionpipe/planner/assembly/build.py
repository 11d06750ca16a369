"""A plan from given sizes: partition by counted work, the named schedule, and every pass in order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from fractions import Fraction
from itertools import pairwise
from math import prod

from diffusionpipe.costs import Backbone, Costs, ModelGraph
from diffusionpipe.costs.graph import upstream
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Edge, Mesh, Plan, Range, Schedule
from diffusionpipe.ir.combinations import Feature, refusal
from diffusionpipe.ir.versions import Versions
from diffusionpipe.passes import (
    communicate,
    encoding_of,
    gathers_first,
    insert_encoding,
    insert_fills,
    prologue,
    shard_parameters,
    with_versions,
    without_flush,
)
from diffusionpipe.planner.assembly.buckets import bucket_starts
from diffusionpipe.planner.assembly.folded import stage_starts
from diffusionpipe.planner.assembly.layout import Blocks, Filler, Layout, Pricing, Unfilled
from diffusionpipe.planner.assembly.shardable import check_homes, check_shardable, sharded_buckets, sharding_problems
from diffusionpipe.planner.assembly.structure import Division, connected, reduced
from diffusionpipe.planner.assembly.windows import communicate_window, forwards_ahead
from diffusionpipe.schedules import forward_over
from diffusionpipe.schedules.backbones import of_backbone, one_by_one
from diffusionpipe.schedules.shapes import Pipe
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.timing.legal import check


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
    first = prologue(train) if filler else None
    if layout.versions is not Versions.FLUSHED:
        train, first = _window(build), encoding_of(train)
    return Plan(
        mesh=layout.mesh,
        blocks=build.blocks,
        train=train,
        prologue=first,
        validate=_train_schedule(
            _validating(build), one_by_one("forward", [_forwards_over(pipe) for pipe in layout.pipes()]), None
        ),
        sample=tuple(_sample_schedule(build, backbone) for backbone in graph.backbones),
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


def build_window(graph: ModelGraph, layout: Layout) -> tuple[Schedule, Blocks]:
    """The window of a layout without a flush, and its blocks, without the rest of the plan.

    Raises:
        ConfigError: sizes that do not fit each other or the model.
    """
    build = _build(graph, layout, None)
    return _window(build), build.blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Build:
    graph: ModelGraph
    layout: Layout
    blocks: tuple[tuple[str, ...], ...]
    pricing: Pricing


def _build(graph: ModelGraph, layout: Layout, pricing: Pricing | None) -> _Build:
    _check_layout(graph, layout)
    partition = _partition(graph, layout)
    layout = replace(layout, buckets=layout.buckets or sharded_buckets(graph, partition), probes=graph.probes)
    backbone = _bucketed(graph, partition, layout.buckets)
    if layout.sharded:
        check_shardable(graph, (*backbone, graph.frozen_layers))
    return _Build(graph=graph, layout=layout, blocks=(*backbone, graph.frozen_layers), pricing=pricing or _uniform)


def _uniform(schedule: Schedule, blocks: Blocks, mesh: Mesh) -> Costs:
    return uniform_costs(schedule)


def _check_layout(graph: ModelGraph, layout: Layout) -> None:
    names = [backbone.name for backbone in graph.backbones]
    given = [own.name for own in layout.backbones] or [""]
    if given != names and (layout.backbones or len(names) > 1):
        raise ConfigError(
            f"the model has the backbones {_listed(names)}, but the layout gives sizes for {_listed(given)}; "
            "give sizes for each backbone, in this order"
        )
    problems: list[str] = []
    try:
        if layout.sharded:
            check_homes(layout.generated())
    except ConfigError as error:
        problems.append(str(error))
    for number, backbone in enumerate(graph.backbones):
        problems += _problems_of_sizes(graph.alone(backbone), layout.backbone(number))
    if layout.adjacent < 1 or layout.data_parallel % layout.adjacent:
        problems.append(
            f"{layout.adjacent} adjacent copies of {layout.data_parallel} data-parallel groups; use a divisor"
        )
    if layout.sharded:
        problems += sharding_problems(layout.data_parallel, layout.replicas)
    problems += _problems_of_versions(graph, layout)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def _problems_of_versions(graph: ModelGraph, layout: Layout) -> Iterator[str]:
    """What does not go together with training without a flush."""
    if layout.versions is Versions.FLUSHED:
        return
    if layout.sharded:
        yield refusal(Feature.VERSIONS, Feature.SHARDED)
    if layout.buckets > 1:
        yield refusal(Feature.VERSIONS, Feature.BUCKETS)
    if layout.orders is not None:
        yield refusal(Feature.VERSIONS, Feature.ORDERS)
    if graph.probes:
        yield refusal(Feature.VERSIONS, Feature.SELF_CONDITIONING)
    if layout.offload_frozen:
        yield refusal(Feature.VERSIONS, Feature.OFFLOAD)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name or "without a name" for name in names)


def _problems_of_sizes(graph: ModelGraph, layout: Layout) -> list[str]:
    """Sizes that do not fit each other or a model of one backbone."""
    problems = []
    num_blocks = layout.stages
    try:
        num_blocks = layout.num_blocks()
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
    if layout.buckets < (not layout.sharded) or num_blocks * layout.buckets > len(graph.backbone_layers):
        problems.append(
            f"{num_blocks} stages of {layout.buckets} buckets need {num_blocks * layout.buckets} layers; the "
            "trained part has "
            f"{len(graph.backbone_layers)}: use at most {len(graph.backbone_layers) // max(num_blocks, 1)} buckets"
        )
    return problems + [
        f"micro-batches of {per_microbatch} samples cannot be shared evenly by {count} replicas of stage {stage}; "
        f"make the micro-batch a multiple of {count}"
        for stage, count in enumerate(layout.replicas)
        if per_microbatch % count
    ]


def _partition(graph: ModelGraph, layout: Layout) -> tuple[tuple[str, ...], ...]:
    """Names of the trained layers, block by block, backbone after backbone."""
    if layout.backbones:
        alone = [(graph.alone(backbone), layout.backbone(i)) for i, backbone in enumerate(graph.backbones)]
        return tuple(block for own, sizes in alone for block in _partition(own, sizes))
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


def _connected(build: _Build, schedule: Schedule, backbone: Blocks, division: Division) -> Schedule:
    return connected(schedule, _edges(build.graph, backbone), division)


def _forwards_over(pipe: Pipe, microbatches: Sequence[int] = ()) -> Schedule:
    """Forwards through a backbone's stages; of the whole batch, if nothing else is said."""
    forwards = forward_over(pipe.workers, microbatches or pipe.microbatches)
    return of_backbone(forwards, pipe.model, pipe.first_block)


def _validating(build: _Build) -> _Build:
    """Every sample reads its own estimate, as in sampling."""
    probes = tuple((name, Fraction(1)) for name, _ in build.graph.probes)
    return replace(build, layout=replace(build.layout, probes=probes))


def _train_schedule(build: _Build, schedule: Schedule, filler: Filler | None) -> Schedule:
    """A family's schedule after all passes; every result of a pass is checked."""
    graph, layout, blocks = build.graph, build.layout, build.blocks
    backbone, frozen = blocks[:-1], len(blocks) - 1
    schedule = reduced(_connected(build, schedule, backbone, layout.division), layout.division)
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


def _sample_schedule(build: _Build, backbone: Backbone) -> Schedule:
    """A denoiser alone: its inputs are put in from outside, its last tensor is the prediction."""
    graph, layout = build.graph, build.layout
    trained = frozenset(graph.layers_of(backbone))
    needed = {layer.name for layer in upstream([x for x in graph.layers if x.name in trained], backbone.result)}
    blocks = [tuple(name for name in block if name in needed) for block in build.blocks[:-1]]
    replicas = layout.replicas or (1,) * layout.stages
    unit = max(replicas)
    wanted = -(-layout.sample_batch // layout.sample_microbatch) if layout.sample_microbatch else layout.stages
    count = max(1, min(wanted, layout.sample_batch // unit))
    size = layout.sample_microbatch or -(-max(layout.sample_batch, layout.stages) // (count * unit)) * unit
    pipe = layout.pipes()[graph.backbones.index(backbone)]
    forwards = _forwards_over(pipe, [size] * count)
    idle = [()] * (layout.stages - forwards.num_workers)  # where the backbones are on different devices
    division = replace(layout.division, probes=())  # the last step's estimate is put in from outside
    schedule = _connected(build, replace(forwards, orders=(*forwards.orders, *idle)), blocks, division)
    return _communicated(build, shard_parameters(schedule) if layout.sharded else schedule)


def _window(build: _Build) -> Schedule:
    """The layout's window. It reads no frozen outputs from others: each batch is encoded before it begins."""
    layout = build.layout
    flushed = reduced(_connected(build, layout.generated(), build.blocks[:-1], layout.division), layout.division)
    ahead = forwards_ahead(layout.schedule, layout.stages)
    replicas = layout.division.replicas
    of_worker = [lead for lead, count in zip(ahead, replicas, strict=True) for _ in range(count)]
    window = communicate_window(without_flush(flushed, of_worker))
    window = with_versions(window, layout.versions, layout.delay)
    check(window)
    return window


def _communicated(build: _Build, schedule: Schedule) -> Schedule:
    check(schedule)
    costs = build.pricing(schedule, build.blocks, build.layout.mesh)
    schedule = communicate(schedule, simulate(schedule, costs))
    check(schedule)
    return schedule
