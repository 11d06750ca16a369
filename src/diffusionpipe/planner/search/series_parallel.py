r"""Makes a tree of series and parallel parts from the order in which layers depend on each other.

    a   b        layers with the edges a c, b d, c e, d e
    |   |
    c   d        Series(Parallel(Series(a, c), Series(b, d)), e)
     \ /
      e          listed branch by branch: a c b d e

Layers of a series part depend on all layers of the part before. Layers of different branches of a parallel part do not
depend on each other. An order has such a tree, which is then the only one, if no four layers a, b, c, d are an N: c
depends on a and b, d on b, and nothing else among them depends on each other (Valdes, Tarjan and Lawler, "The
Recognition of Series Parallel Digraphs", SIAM J. Comput. 1982, section 2). The tree is found by connected parts: the
layers fall apart into branches where no two of them depend on each other, and into a series where all do. An order with
an N gets a tree where layers wait for others that they do not read (`tree_with_waits`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from diffusionpipe.units import Seconds


@dataclass(frozen=True, slots=True)
class Series:
    """A tree whose parts depend on each other: each on all parts before it; no part is a series itself."""

    parts: "tuple[Tree, ...]"


@dataclass(frozen=True, slots=True)
class Parallel:
    """A tree whose branches do not depend on each other; no branch is parallel itself."""

    branches: "tuple[Tree, ...]"


Tree: TypeAlias = int | Series | Parallel
"""A layer, by its number, or a part made of other trees."""


def tree_of(num_layers: int, edges: Iterable[tuple[int, int]]) -> Tree | None:
    """The series-parallel tree of layers 0, 1, ...; None if their order of dependence has none.

    Each layer depends on earlier ones alone.

    `edges`: (a layer, one that reads what it writes). Branches come in the order of their first layers. Cost: O(layers²
    x depth of the tree) operations on sets of layers, which are integers.

    >>> tree_of(5, [(0, 2), (1, 3), (2, 4), (3, 4)])
    Series(parts=(Parallel(branches=(Series(parts=(0, 2)), Series(parts=(1, 3)))), 4))
    >>> tree_of(4, [(0, 2), (1, 2), (1, 3)]) is None  # an N
    True
    """
    before = before_of(num_layers, edges)
    return _tree((1 << num_layers) - 1, before, _related(before))


def tree_with_waits(num_layers: int, edges: Iterable[tuple[int, int]], seconds: Sequence[Seconds]) -> Tree:
    """The series-parallel tree of layers in any order; some may wait in it for others that they do not read.

    `edges`: (a layer, one that reads its output). `seconds`: the time of each layer. Layers that neither fall apart
    into branches nor into a series are cut in two, and all of the second part wait for all of the first: for the layers
    on which one that joins branches depends. Of such cuts the one with the shortest longest way is taken.

    >>> tree_with_waits(4, [(0, 2), (1, 2), (1, 3)], [1, 1, 1, 1])  # an N: layer 3 waits for layer 0
    Series(parts=(Parallel(branches=(0, 1)), Parallel(branches=(2, 3))))
    """
    before = before_of(num_layers, edges)
    tree = _tree((1 << num_layers) - 1, before, _related(before), seconds)
    assert tree is not None, "a cut is always found"
    return tree


def crossing_of(before: Sequence[int]) -> tuple[int, int, int, int] | None:
    """Layers (a, b, c, d) that form an N: c depends on a and b, d on b, nothing else; None if there are none.

    `before` has for each layer the set of those on which it depends.
    """
    related = _related(before)
    for c, above in enumerate(before):
        for d in _members(~(related[c] | 1 << c) & ((1 << len(before)) - 1)):
            for b in _members(above & before[d]):
                # a: c depends on it, and it is related to neither d nor b.
                if rest := above & ~before[d] & ~related[d] & ~related[b] & ~(1 << b):
                    return (rest & -rest).bit_length() - 1, b, c, d
    return None


def before_of(num_layers: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """The set of layers on which each layer depends, by layer, as bits of an integer; edges must not form a circle.

    `edges`: (a layer, one that reads its output).
    """
    readers: list[list[int]] = [[] for _ in range(num_layers)]
    waiting = [0] * num_layers
    for writer, reader in set(edges):
        readers[writer].append(reader)
        waiting[reader] += 1
    before, ready = [0] * num_layers, [layer for layer in range(num_layers) if not waiting[layer]]
    while ready:
        writer = ready.pop()
        for reader in readers[writer]:
            before[reader] |= before[writer] | 1 << writer
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.append(reader)
    return before


def _related(before: Sequence[int]) -> list[int]:
    """The set of layers that depend on a layer or on which it depends, by layer, as bits of an integer."""
    related = list(before)
    for layer, those in enumerate(before):
        for other in _members(those):
            related[other] |= 1 << layer
    return related


def listed(tree: Tree) -> tuple[int, ...]:
    """The numbers of the tree's layers, branch by branch; in this order they can run."""
    match tree:
        case Series(parts) | Parallel(parts):
            return tuple(layer for part in parts for layer in listed(part))
        case layer:
            return (layer,)


def longest(edges: Iterable[tuple[int, int]], seconds: Sequence[Seconds]) -> Seconds:
    """The seconds of the longest way along the edges, during which all other layers can run.

    >>> longest([(0, 2), (1, 3), (2, 4), (3, 4)], [1, 2, 1, 2, 1])
    5
    """
    return _longest((1 << len(seconds)) - 1, before_of(len(seconds), edges), seconds)


def longest_of(tree: Tree, seconds: Sequence[Seconds]) -> Seconds:
    """The seconds of the longest way through the tree's layers."""
    match tree:
        case Series(parts):
            return sum(longest_of(part, seconds) for part in parts)
        case Parallel(branches):
            return max(longest_of(branch, seconds) for branch in branches)
        case layer:
            return seconds[layer]


def renumbered(tree: Tree) -> Tree:
    """The tree with its layers numbered 0, 1, ... in the order of `listed`."""
    number = {layer: at for at, layer in enumerate(listed(tree))}

    def renamed(part: Tree) -> Tree:
        match part:
            case Series(parts):
                return Series(tuple(map(renamed, parts)))
            case Parallel(branches):
                return Parallel(tuple(map(renamed, branches)))
            case layer:
                return number[layer]

    return renamed(tree)


def _tree(
    layers: int, before: Sequence[int], related: Sequence[int], seconds: Sequence[Seconds] | None = None
) -> Tree | None:
    """The series-parallel tree of a set of layers, given as bits of an integer.

    If it has none, the layers are cut with waits by their times; if `seconds` is None, the result is None.
    """
    if layers & (layers - 1) == 0:  # a power of two: a single layer
        return layers.bit_length() - 1
    # Where dependence does not connect all layers, they are branches; where independence does not, they are a series.
    branches = _parts(layers, lambda layer: related[layer])
    parts = branches if len(branches) > 1 else _parts(layers, lambda layer: ~related[layer])
    if len(parts) == 1:
        if seconds is None:
            return None
        first = _cut(layers, before, seconds)
        parts = [first, layers & ~first]
    elif len(branches) == 1:  # in the order in which they depend on each other
        parts.sort(key=lambda part: (before[part.bit_length() - 1] & layers).bit_count())
    found = [_tree(part, before, related, seconds) for part in parts]
    trees = [tree for tree in found if tree is not None]
    if len(trees) < len(found):
        return None
    if len(branches) > 1:
        return Parallel(tuple(trees))
    # A series within a series is one series.
    return Series(tuple(part for tree in trees for part in (tree.parts if isinstance(tree, Series) else (tree,))))


def _cut(layers: int, before: Sequence[int], seconds: Sequence[Seconds]) -> int:
    """The part of a set of layers without a tree for which all its other layers wait, as bits of an integer."""
    firsts = dict.fromkeys(before[layer] & layers for layer in _members(layers))
    joined = [first for first in firsts if first.bit_count() > 1 and _lasts(first, before).bit_count() > 1]
    return min(joined, key=lambda first: _longest(first, before, seconds) + _longest(layers & ~first, before, seconds))


def _lasts(layers: int, before: Sequence[int]) -> int:
    """The layers of a set on which no other layer of it depends, as bits of an integer."""
    inner = 0
    for layer in _members(layers):
        inner |= before[layer]
    return layers & ~inner


def _longest(layers: int, before: Sequence[int], seconds: Sequence[Seconds]) -> Seconds:
    reached = dict[int, Seconds]()
    # A layer depends on more layers than each of those before it, so these come first.
    for layer in sorted(_members(layers), key=lambda layer: (before[layer] & layers).bit_count()):
        reached[layer] = seconds[layer] + max((reached[other] for other in _members(before[layer] & layers)), default=0)
    return max(reached.values())


def _parts(layers: int, neighbours: Callable[[int], int]) -> list[int]:
    """The connected parts of a set of layers, in the order of their first layers; sets are bits of an integer.

    `neighbours`: layer -> the set of layers that are connected with it.
    """
    found = []
    while layers:
        part = new = layers & -layers
        while new:
            near = 0
            for layer in _members(new):
                near |= neighbours(layer)
            new = near & layers & ~part
            part |= new
        found.append(part)
        layers &= ~part
    return found


def _members(layers: int) -> Iterable[int]:
    while layers:
        lowest = layers & -layers
        yield lowest.bit_length() - 1
        layers ^= lowest
