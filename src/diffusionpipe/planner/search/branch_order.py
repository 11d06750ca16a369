"""Whether layers of a model can gain by running beside each other, and the model listed branch by branch."""

from collections.abc import Iterator
from dataclasses import replace

from diffusionpipe.costs import ModelGraph
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.constants import SIDE_BY_SIDE
from diffusionpipe.planner.search.series_parallel import Tree, listed, longest, tree_of


def tree_of_branches(setting: Setting) -> Tree | None:
    """The tree of the trained layers, by their numbers; None where branches gain too little or there is none."""
    graph = setting.graph
    return tree_of(len(graph.backbone_layers), _edges(graph)) if has_branches(setting) else None


def has_branches(setting: Setting) -> bool:
    """Whether a part of the layers' time worth looking at could pass beside the longest way through them."""
    graph = setting.graph
    if not setting.may_branch or len(graph.backbones) > 1 or graph.estimates or not graph.backbone_layers:
        return False
    return part_in_a_row(setting) <= 1 - SIDE_BY_SIDE


def part_in_a_row(setting: Setting) -> float:
    """The part of the trained layers' time that the longest way through them takes."""
    seconds = setting.table.sums(setting.workload.batch / setting.cluster.num_ranks).steps()
    return longest(_edges(setting.graph), seconds) / sum(seconds)


def in_branch_order(setting: Setting) -> Setting:
    """The setting with its trained layers listed branch by branch, where they have branches; else the same.

    Layers of a branch that stand side by side can be a stage. The others stand as they did, and what a layer reads is
    still written by layers before it.
    """
    tree = tree_of_branches(setting)
    if tree is None or listed(tree) == tuple(range(len(setting.graph.backbone_layers))):
        return setting
    graph, profile = setting.graph, setting.profile
    trained = tuple(graph.backbone_layers[layer] for layer in listed(tree))
    names = (*graph.frozen_layers, *trained)  # frozen layers read nothing that is trained
    layers = tuple(graph.layer(name) for name in names)
    reordered = replace(profile, graph=replace(graph, layers=layers), layers=tuple(map(profile.layer, names)))
    return replace(setting, profile=reordered)


def unbranched(setting: Setting) -> str:
    """A sentence, if layers could run beside each other but form no series-parallel order; else ""."""
    if not has_branches(setting) or tree_of_branches(setting) is not None:
        return ""
    names = setting.graph.backbone_layers
    last, other, shared, own = (names[layer] for layer in _crossing(setting.graph))
    return (
        f"The model's branches are not series-parallel, so it is planned as a chain: {last} depends on {own} and on "
        f"{shared}, and {other} on {shared} alone."
    )


def _edges(graph: ModelGraph) -> list[tuple[int, int]]:
    """(a trained layer, one that reads what it writes), by their numbers."""
    layers = [graph.layer(name) for name in graph.backbone_layers]
    writer = {tensor: number for number, layer in enumerate(layers) for tensor in layer.writes}
    return [(writer[tensor], n) for n, layer in enumerate(layers) for tensor in layer.reads if tensor in writer]


def _crossing(graph: ModelGraph) -> tuple[int, int, int, int]:
    """Layers c, d, b, a of which c depends on a and b, and d on b, and nothing else on each other."""
    before = [set[int]() for _ in graph.backbone_layers]
    for writer, reader in sorted(_edges(graph), key=lambda edge: edge[1]):
        before[reader] |= before[writer] | {writer}

    def apart(one: int, other: int) -> bool:
        return one not in before[other] and other not in before[one]

    def found() -> Iterator[tuple[int, int, int, int]]:
        for c, above in enumerate(before):
            for d, beside in enumerate(before):
                if c != d and apart(c, d):
                    for a in sorted(above - beside):
                        yield from ((c, d, b, a) for b in sorted(above & beside) if apart(a, d) and apart(a, b))

    return next(found())
