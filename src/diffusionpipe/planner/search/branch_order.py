"""Finds out whether layers can gain by running beside each other, and lists a model's layers branch by branch."""

from dataclasses import replace
from functools import lru_cache

from diffusionpipe.costs import ModelGraph
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.constants import SIDE_BY_SIDE
from diffusionpipe.planner.search.series_parallel import (
    Tree,
    before_of,
    crossing_of,
    listed,
    longest,
    longest_of,
    tree_with_waits,
)
from diffusionpipe.units import Seconds


def tree_of_branches(setting: Setting) -> Tree | None:
    """The series-parallel tree of the trained layers, by their numbers; None if branches gain too little.

    A layer may wait in the tree for one that it does not read. Such waits only group layers: no message follows from
    them. None also if waits make the longest way through every tree clearly longer.
    """
    return _tree(tuple(_edges(setting.graph)), _seconds(setting)) if has_branches(setting) else None


def has_branches(setting: Setting) -> bool:
    """Whether at least 1.5 % of the trained layers' time could pass beside the longest way through them."""
    graph = setting.graph
    if not setting.may_branch or len(graph.backbones) > 1 or graph.estimates or not graph.backbone_layers:
        return False
    return part_in_a_row(setting) <= 1 - SIDE_BY_SIDE


def part_in_a_row(setting: Setting) -> float:
    """The part, 0 to 1, of the trained layers' time that the longest way through them takes."""
    seconds = _seconds(setting)
    return longest(_edges(setting.graph), seconds) / sum(seconds)


def _seconds(setting: Setting) -> tuple[Seconds, ...]:
    """The seconds of forward and backward of each trained layer, for an equal share of the batch."""
    return setting.table.sums(setting.workload.batch / setting.cluster.num_ranks).steps()


@lru_cache(maxsize=64)
def _tree(edges: tuple[tuple[int, int], ...], seconds: tuple[Seconds, ...]) -> Tree | None:
    """The series-parallel tree of layers; None if the waits that it needs make its longest way clearly longer.

    `edges`: (a layer, one that reads its output). `seconds`: forward and backward of each layer.
    """
    tree = tree_with_waits(len(seconds), edges, seconds)
    is_long = longest_of(tree, seconds) > longest(edges, seconds) + SIDE_BY_SIDE * sum(seconds)
    return None if is_long else tree


def in_branch_order(setting: Setting) -> Setting:
    """The setting with its trained layers listed branch by branch, if they have branches; else the same setting.

    Layers of a branch that are neighbours can be a stage. Frozen layers come first, in their order. Each layer
    still comes after all layers whose tensors it reads.
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
    """A sentence why a model is planned as a chain, if its branches are not series-parallel; "" for other models."""
    if not has_branches(setting) or tree_of_branches(setting) is not None:
        return ""
    graph = setting.graph
    crossing = crossing_of(before_of(len(graph.backbone_layers), _edges(graph)))
    assert crossing, "an order without an N has a tree"
    own, shared, last, other = (graph.backbone_layers[layer] for layer in crossing)
    return (
        f"The model's branches are not series-parallel, so it is planned as a chain: {last} depends on {own} and on "
        f"{shared}, and {other} on {shared} alone."
    )


def _edges(graph: ModelGraph) -> list[tuple[int, int]]:
    """(a trained layer, a layer that reads its output) of all such pairs, by the layers' numbers."""
    layers = [graph.layer(name) for name in graph.backbone_layers]
    writer = {tensor: number for number, layer in enumerate(layers) for tensor in layer.writes}
    return [(writer[tensor], n) for n, layer in enumerate(layers) for tensor in layer.reads if tensor in writer]
