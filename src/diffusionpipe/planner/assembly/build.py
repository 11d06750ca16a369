"""Makes a plan from given sizes: partition by counted work, the named schedule, and every pass in order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from fractions import Fraction
from math import lcm, prod

from diffusionpipe.costs import Backbone, Costs, ModelGraph
from diffusionpipe.costs.graph import upstream
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Edge, Mesh, Plan, Schedule, Sharded
from diffusionpipe.ir.versions import Versions
from diffusionpipe.passes import (
    encoding_of,
    insert_fills,
    prologue,
    shard_parameters,
    with_versions,
    without_flush,
)
from diffusionpipe.planner.assembly.buckets import bucket_starts
from diffusionpipe.planner.assembly.folded import stage_starts
from diffusionpipe.planner.assembly.layout import Blocks, Filler, Layout, Pricing, Unfilled
from diffusionpipe.planner.assembly.layout_check import check_layout, check_tied
from diffusionpipe.planner.assembly.queued import in_queues
from diffusionpipe.planner.assembly.shardable import check_shardable, sharded_buckets
from diffusionpipe.planner.assembly.structure import Division, connected, encoded, reduced
from diffusionpipe.planner.assembly.windows import communicate_window, turns_of
from diffusionpipe.schedules import forward_over
from diffusionpipe.schedules.building.branches import GRAPHPIPE, branched
from diffusionpipe.schedules.building.shapes import Pipe
from diffusionpipe.schedules.several.backbones import of_backbone, one_by_one
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.timing.legal import check


def build_plan(
    graph: ModelGraph, layout: Layout, *, pricing: Pricing | None = None, filler: Filler | None = None
) -> Plan:
    """The plan of a layout: its blocks, mesh, and checked schedules for training, validation and drawing.

    `pricing` says what actions cost, for the order of messages and for the filler; without it all stages are alike.
    `filler` places a later batch's frozen work; without it each batch is encoded before its first forward.

    Raises:
        ConfigError: sizes that do not fit each other or the model; all problems are listed.
    """
    build = _build(graph, layout, pricing)
    names = [name for block in build.blocks[:-1] for name in block]
    patterns = layout.checkpointed
    if layout.versions is Versions.FLUSHED:
        train = _checked(_train_schedule(build, build.layout.generated(), filler))
        first = prologue(train) if filler else None
    else:
        train = _window(build, filler)
        first = None if filler else encoding_of(_checked(_train_schedule(build, build.layout.generated(), None)))
    return Plan(
        mesh=layout.mesh,
        blocks=build.blocks,
        train=train,
        prologue=first,
        validate=_checked(
            _train_schedule(
                _validating(build), one_by_one("forward", [_forwards_over(pipe) for pipe in layout.pipes()]), None
            )
        ),
        sample=tuple(_checked(_sample_schedule(build, backbone)) for backbone in graph.backbones),
        checkpointed=tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)),
        encoders=layout.encoders,
    )


def build_train_schedule(
    graph: ModelGraph, layout: Layout, *, pricing: Pricing | None = None, filler: Filler | None = None
) -> tuple[Schedule, Blocks]:
    """(training schedule of the plan of a layout, names of the layers of each block), without the rest of the plan.

    The schedule is not checked: a search makes many of them and checks the one that it chooses. `pricing` and `filler`
    as in `build_plan`.

    Raises:
        ConfigError: sizes that do not fit each other or the model.
    """
    build = _build(graph, layout, pricing)
    return _train_schedule(build, build.layout.generated(), filler), build.blocks


def build_orders(graph: ModelGraph, layout: Layout, orders: Schedule) -> Schedule:
    """The complete training schedule of a layout that runs `orders`, checked: with buckets, reductions and messages.

    `orders` holds compute actions alone. Its micro-batches may have any numbers of samples.

    Raises:
        ConfigError: sizes that do not fit each other or the model.
        ScheduleError: the schedule is illegal.
    """
    return _checked(_train_schedule(_build(graph, layout, None), orders, None))


def build_window(
    graph: ModelGraph, layout: Layout, *, pricing: Pricing | None = None, filler: Filler | None = None
) -> tuple[Schedule, Blocks]:
    """(checked window of a layout without a flush, names of the layers of each block), without the rest of the plan.

    `pricing` and `filler` as in `build_plan`.

    Raises:
        ConfigError: sizes that do not fit each other or the model.
    """
    build = _build(graph, layout, pricing)
    return _window(build, filler), build.blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Build:
    """A checked layout with the blocks into which it cuts the model, and the function that prices its schedules."""

    graph: ModelGraph
    layout: Layout
    blocks: tuple[tuple[str, ...], ...]
    """The names of the layers of each block, after buckets; the last block holds the frozen layers."""
    pricing: Pricing


def _build(graph: ModelGraph, layout: Layout, pricing: Pricing | None) -> _Build:
    check_layout(graph, layout)
    partition = _partition(graph, layout)
    check_tied(graph, layout, partition)
    layout = replace(layout, buckets=layout.buckets or sharded_buckets(graph, partition), probes=graph.probes)
    # GraphPipe's orders follow from the graph of the stages, which is known when the model is cut.
    if layout.schedule == GRAPHPIPE and layout.orders is None and layout.versions is Versions.FLUSHED:
        orders = branched(frozenset(graph.flows(partition)), layout.stages, layout.microbatches)
        layout = replace(layout, orders=orders)
    backbone = _bucketed(graph, partition, layout.buckets)
    if layout.sharded is not Sharded.NONE:
        check_shardable(graph, (*backbone, graph.frozen_layers))
    return _Build(graph=graph, layout=layout, blocks=(*backbone, graph.frozen_layers), pricing=pricing or _uniform)


def _uniform(schedule: Schedule, blocks: Blocks, mesh: Mesh) -> Costs:
    return uniform_costs(schedule)


def _partition(graph: ModelGraph, layout: Layout) -> tuple[tuple[str, ...], ...]:
    """The names of the trained layers of each block before buckets, backbone after backbone."""
    if layout.backbones:
        alone = [(graph.alone(backbone), layout.backbone(i)) for i, backbone in enumerate(graph.backbones)]
        return tuple(block for own, sizes in alone for block in _partition(own, sizes))
    layers = graph.backbone_layers
    if layout.splits:
        starts = [0, *_split_positions(layers, layout.splits, layout.num_blocks())]
    else:
        flops = {layer.name: layer.flops for layer in graph.layers}
        # Where nothing was counted, layers count alike.
        costs = [flops[name] for name in layers] if any(flops[name] for name in layers) else [1] * len(layers)
        starts = list(stage_starts(graph, costs, layout.places()))
    return tuple(layers[start:stop] for start, stop in zip(starts, [*starts[1:], len(layers)], strict=True))


def _split_positions(layers: Sequence[str], splits: Sequence[str], num_blocks: int) -> list[int]:
    unknown = [name for name in splits if name not in layers]
    if unknown:
        close = get_close_matches(unknown[0], layers, n=3, cutoff=0.3)
        raise ConfigError(f"no trained layer is named {unknown[0]!r}; close names: {', '.join(close) or 'none'}")
    positions = [layers.index(name) for name in splits]
    # Ascending, each once, and none of them 0.
    if len(positions) != num_blocks - 1 or sorted({0, *positions}) != [0, *positions]:
        raise ConfigError(
            f"{num_blocks} stages need {num_blocks - 1} splits in the model's order, none of them its first "
            f"layer; got {', '.join(splits)}"
        )
    return positions


def _edges(graph: ModelGraph, blocks: Sequence[Sequence[str]]) -> tuple[Edge, ...]:
    """The edges between blocks, with the tensors that one block reads from the other; ends are block ids."""
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
    """The blocks after each was cut into `parts` buckets whose gradients have about the same size."""
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
    """The schedule of one forward of every micro-batch through a backbone's stages, without backwards.

    `microbatches`: the samples of each micro-batch; () for the micro-batches of `pipe`.
    """
    forwards = forward_over(pipe.workers, microbatches or pipe.microbatches)
    return of_backbone(forwards, pipe.model, pipe.first_block)


def _validating(build: _Build) -> _Build:
    """The build for validation: with self-conditioning every sample reads its own estimate, as in sampling."""
    probes = tuple((name, Fraction(1)) for name, _ in build.graph.probes)
    return replace(build, layout=replace(build.layout, probes=probes))


def _train_schedule(build: _Build, schedule: Schedule, filler: Filler | None) -> Schedule:
    """The complete schedule made of compute actions alone: with edges, reductions, frozen work and messages."""
    layout, blocks = build.layout, build.blocks
    backbone = blocks[:-1]
    schedule = reduced(_connected(build, schedule, backbone, layout.division), layout.division)
    if filler:
        costs = _priced(build, schedule)
        filled = _filled(build, schedule, schedule, costs, filler)
        return in_queues(filled, _priced(build, filled), unfilled=(schedule, costs))
    outputs = [build.graph.frozen_outputs(block) for block in backbone]
    return _communicated(build, encoded(schedule, layout.encoding(build.graph, outputs)))


def _filled(build: _Build, schedule: Schedule, flushed: Schedule, costs: Costs, filler: Filler) -> Schedule:
    """The schedule with fills at the points of its orders that the filler chooses.

    `schedule` is `flushed` itself, or its window. `costs` are the costs of `flushed`, whose timeline the filler reads.
    """
    unfilled = Unfilled(
        schedule=schedule,
        timeline=simulate(flushed, costs),
        costs=costs,
        blocks=build.blocks,
        mesh=build.layout.mesh,
    )
    outputs = {block: build.graph.frozen_outputs(layers) for block, layers in enumerate(build.blocks[:-1])}
    return insert_fills(schedule, filler(unfilled), block=len(build.blocks) - 1, outputs=outputs)


def _sample_schedule(build: _Build, backbone: Backbone) -> Schedule:
    """The schedule that draws samples: forwards of one backbone's denoiser, without encoders and loss.

    The denoiser's inputs are put in from outside; the last tensor that it writes is the prediction.
    """
    graph, layout = build.graph, build.layout
    trained = frozenset(graph.layers_of(backbone))
    # Drawing needs no loss: of each block only the layers that lead to the prediction.
    needed = {layer.name for layer in upstream([x for x in graph.layers if x.name in trained], backbone.result)}
    blocks = [tuple(name for name in block if name in needed) for block in build.blocks[:-1]]
    replicas = layout.replicas or (1,) * layout.stages
    # The replicas of every stage share each micro-batch evenly.
    unit = lcm(*replicas)
    wanted = -(-layout.sample_batch // layout.sample_microbatch) if layout.sample_microbatch else layout.stages
    count = max(1, min(wanted, layout.sample_batch // unit))  # each micro-batch has a sample for each replica at least
    # Rounded up so that the replicas can share it; a batch of 0 means a sample for each stage.
    size = layout.sample_microbatch or -(-max(layout.sample_batch, layout.stages) // (count * unit)) * unit
    pipe = layout.pipes()[graph.backbones.index(backbone)]
    forwards = _forwards_over(pipe, [size] * count)
    idle = [()] * (layout.stages - forwards.num_workers)  # where the backbones are on different devices
    division = replace(layout.division, probes=())  # the last step's estimate is put in from outside
    schedule = _connected(build, replace(forwards, orders=(*forwards.orders, *idle)), blocks, division)
    return _communicated(build, shard_parameters(schedule) if layout.sharded is Sharded.ALL else schedule)


def _window(build: _Build, filler: Filler | None) -> Schedule:
    """The checked window of a layout without a flush, with its messages and versions.

    Without a filler it has no fills: each batch is encoded before its first forward.
    """
    layout = build.layout
    flushed = reduced(_connected(build, layout.generated(), build.blocks[:-1], layout.division), layout.division)
    turns = turns_of(layout.schedule, layout.stages, layout.microbatches)
    replicas = layout.division.replicas
    # Each replica leads as its worker did.
    of_worker = [lead for lead, count in zip(turns.ahead, replicas, strict=True) for _ in range(count)]
    window = without_flush(flushed, of_worker, turns.length)
    if filler:
        window = _filled(build, window, flushed, _priced(build, flushed), filler)
    return _checked(with_versions(communicate_window(window), layout.versions, layout.delay))


def _communicated(build: _Build, schedule: Schedule) -> Schedule:
    return in_queues(schedule, _priced(build, schedule))


def _priced(build: _Build, schedule: Schedule) -> Costs:
    return build.pricing(schedule, build.blocks, build.layout.mesh)


def _checked(schedule: Schedule) -> Schedule:
    """The schedule itself, if it is legal.

    Raises:
        ScheduleError: it is illegal.
    """
    check(schedule)
    return schedule
