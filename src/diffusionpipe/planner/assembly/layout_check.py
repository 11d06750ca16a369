"""Checks of a layout: whether its sizes fit each other and the model."""

from collections.abc import Iterator, Sequence

from diffusionpipe.combinations.features import Feature
from diffusionpipe.combinations.refused import refusal
from diffusionpipe.costs import ModelGraph
from diffusionpipe.costs.tied import tied_blocks, tied_problems
from diffusionpipe.errors import ConfigError
from diffusionpipe.holding.storage import storage_of
from diffusionpipe.ir import Sharded
from diffusionpipe.ir.versions import Versions
from diffusionpipe.planner.assembly.layout import Layout
from diffusionpipe.planner.assembly.shardable import check_homes, sharding_problems


def check_layout(graph: ModelGraph, layout: Layout) -> None:
    """Raise an error if the sizes do not fit each other or the model; return None if they do.

    Raises:
        ConfigError: they do not. It lists all problems; names of backbones that are not the model's it reports alone.
    """
    names = [backbone.name for backbone in graph.backbones]
    given = [own.name for own in layout.backbones] or [""]
    if given != names and (layout.backbones or len(names) > 1):
        raise ConfigError(
            f"the model has the backbones {_listed(names)}, but the layout gives sizes for {_listed(given)}; "
            "give sizes for each backbone, in this order"
        )
    problems: list[str] = []
    try:
        if layout.sharded is not Sharded.NONE:
            check_homes(layout.generated())
    except ConfigError as error:
        problems.append(str(error))
    for number, backbone in enumerate(graph.backbones):
        problems += _problems_of_sizes(graph.alone(backbone), layout.backbone(number))
    if layout.adjacent < 1 or layout.data_parallel % layout.adjacent:
        problems.append(
            f"{layout.adjacent} adjacent copies of {layout.data_parallel} data-parallel groups; use a divisor"
        )
    if layout.sharded is not Sharded.NONE:
        problems += sharding_problems(layout.data_parallel, layout.replicas)
    problems += _problems_of_versions(graph, layout)
    if problems:
        # Backbones share most sizes, so the same problem may come from each.
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def check_tied(graph: ModelGraph, layout: Layout, blocks: Sequence[Sequence[str]]) -> None:
    """Raise an error if ranks would have copies of a trained parameter that drift apart; return None if not.

    `blocks`: the layers of each trained block, before buckets.

    Raises:
        ConfigError: layers of several blocks use a trained parameter, and they are on different workers, or the layout
            trains without a flush.
    """
    tied = tied_blocks(graph, blocks)
    if not tied:
        return
    if layout.versions is not Versions.FLUSHED:
        raise ConfigError(refusal(Feature.VERSIONS, Feature.TIED, parameter=next(iter(tied)), count=len(tied)))
    if problems := list(tied_problems(graph, layout.generated().placement, blocks)):
        raise ConfigError("\n".join(problems))


def _problems_of_versions(graph: ModelGraph, layout: Layout) -> Iterator[str]:
    """A sentence for each setting of a layout without a flush that is refused there; nothing with a flush."""
    if layout.versions is Versions.FLUSHED:
        return
    if layout.sharded is not Sharded.NONE:
        yield refusal(Feature.VERSIONS, Feature.SHARDED)
    if layout.buckets > 1:
        yield refusal(Feature.VERSIONS, Feature.BUCKETS)
    if layout.orders is not None:
        yield refusal(Feature.VERSIONS, Feature.ORDERS)
    if graph.probes:
        yield refusal(Feature.VERSIONS, Feature.SELF_CONDITIONING)
    if storage_of(layout.encoders).brings:
        yield refusal(Feature.VERSIONS, Feature.OFFLOAD)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name or "without a name" for name in names)


def _problems_of_sizes(graph: ModelGraph, layout: Layout) -> list[str]:
    """A sentence for each size of a layout of one backbone that does not fit the others or the model."""
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
    most = len(graph.backbone_layers) // max(num_blocks, 1)
    # Where most is 0, no number of buckets helps: there are too many stages, as said above.
    # The least number is 1, and 0 where it is left to `sharded_buckets`: with all parameters in parts.
    if most and not (layout.sharded is not Sharded.ALL) <= layout.buckets <= most:
        problems.append(
            f"{num_blocks} stages of {layout.buckets} buckets need {num_blocks * layout.buckets} layers; the "
            "trained part has "
            f"{len(graph.backbone_layers)}: use at most {most} buckets"
        )
    return problems + [
        f"micro-batches of {per_microbatch} samples cannot be shared evenly by {count} replicas of stage {stage}; "
        f"make the micro-batch a multiple of {count}"
        for stage, count in enumerate(layout.replicas)
        if per_microbatch % count
    ]
