"""The program that cuts branches, against all cuts of small graphs, looked at one by one."""

import random
from collections.abc import Iterator
from itertools import combinations, product

import pytest

from diffusionpipe.planner.search.branch_program import best_branches
from diffusionpipe.planner.search.dynamic_program import Question
from diffusionpipe.planner.search.series_parallel import (
    Parallel,
    Series,
    listed,
    longest,
    longest_of,
    renumbered,
    tree_of,
    tree_with_waits,
)

NUM_DEVICES = 4


def grown_graph(rng: random.Random, nodes: list[int]) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """(edges, first nodes, last nodes) of a random series-parallel graph of these nodes, some edges doubled over."""
    if len(nodes) == 1:
        return [], nodes, nodes
    at = rng.randrange(1, len(nodes))
    (edges, sources, sinks), (more, others, ends) = grown_graph(rng, nodes[:at]), grown_graph(rng, nodes[at:])
    if rng.random() < 0.5:
        return edges + more, sources + others, sinks + ends
    skips = [(a, b) for a in nodes[:at] for b in nodes[at:] if rng.random() < 0.1]
    return [*edges, *more, *product(sinks, others), *skips], sources, ends


def ways(num_layers: int, edges: list[tuple[int, int]]) -> list[list[bool]]:
    """Entry [a][b]: whether a path leads from a to b."""
    found = [[(a, b) in edges for b in range(num_layers)] for a in range(num_layers)]
    for middle, a, b in product(range(num_layers), repeat=3):
        found[a][b] |= found[a][middle] and found[middle][b]
    return found


def is_stage(first: int, stop: int, ways: list[list[bool]]) -> bool:
    """Whether each other layer comes before all layers of the range, after all, or beside all."""
    others = [*range(first), *range(stop, len(ways))]
    return all(len({(ways[x][own], ways[own][x]) for own in range(first, stop)}) == 1 for x in others)


def longest_path(num: int, ways_on: set[tuple[int, int]], weights: list[float], through: int) -> float:
    """The most that the stages on a path through one of them weigh together, found by walking all paths."""

    def walk(stage: int, ahead: bool) -> float:
        steps = [b if ahead else a for a, b in ways_on if (a if ahead else b) == stage]
        return weights[stage] + max((walk(step, ahead) for step in steps), default=0)

    return walk(through, ahead=True) + walk(through, ahead=False) - weights[through]


def all_values(question: Question, edges: list[tuple[int, int]], microbatches: int) -> Iterator[float]:
    """The time of every partition that fits, one after the other."""
    reach, layers = ways(question.num_layers, edges), question.num_layers
    for count in range(1, NUM_DEVICES + 1):
        for cuts in combinations(range(1, layers), count - 1):
            spans = list(zip((0, *cuts), (*cuts, layers), strict=True))
            if not all(is_stage(*span, reach) for span in spans):
                continue
            of_layer = [stage for stage, (first, stop) in enumerate(spans) for _ in range(first, stop)]
            ways_on = {(of_layer[a], of_layer[b]) for a, b in edges if of_layer[a] != of_layer[b]}
            ones = [1.0] * count
            depths = [
                longest_path(count, {way for way in ways_on if way[0] >= stage}, ones, stage) for stage in range(count)
            ]
            for replicas in product(question.replicas, repeat=count):
                if sum(replicas) != NUM_DEVICES:
                    continue
                times = [
                    question.stage(*spans[s], sum(replicas[:s]), replicas[s], int(depths[s])) for s in range(count)
                ]
                if None not in times:
                    works = [forward + backward for forward, backward, _ in times]
                    yield max(
                        longest_path(count, ways_on, works, s) + (microbatches - 1) * works[s] for s in range(count)
                    )


def question_of(rng: random.Random, num_layers: int, microbatches: int) -> Question:
    """Layers with times, parameters and activations of their own on devices with speeds and memories of their own."""
    forward, backward, weights, kept = ([rng.randint(1, 9) for _ in range(num_layers)] for _ in range(4))
    speeds = [rng.randint(1, 3) for _ in range(NUM_DEVICES)]
    memories = [rng.randint(15, 90) for _ in range(NUM_DEVICES)]

    def stage(first, stop, position, replicas, depth):
        held = sum(weights[first:stop]) + min(depth, microbatches) * sum(kept[first:stop]) / replicas
        if held > min(memories[position : position + replicas]):
            return None
        slow = 12 / (min(speeds[position : position + replicas]) * replicas)
        return sum(forward[first:stop]) * slow, sum(backward[first:stop]) * slow, 0

    replicas = (1,) if rng.random() < 0.5 else (1, 2, 3, 4)
    return Question(
        num_layers=num_layers,
        num_devices=NUM_DEVICES,
        max_stages=NUM_DEVICES,
        replicas=replicas,
        stage=stage,
        link=lambda *_: (0, 0),
    )


def assert_best(seed: int) -> tuple[bool, bool]:
    """Whether the graph has branches, and whether something fits."""
    rng = random.Random(seed)
    num_layers, microbatches = rng.randint(2, 8), rng.randint(1, 6)
    edges, _, _ = grown_graph(rng, list(range(num_layers)))
    tree = tree_of(num_layers, edges)
    assert tree is not None
    place = {layer: at for at, layer in enumerate(listed(tree))}
    edges = [(place[a], place[b]) for a, b in edges]
    question = question_of(rng, num_layers, microbatches)
    values = list(all_values(question, edges, microbatches))
    found = best_branches(question, renumbered(tree), microbatches, width=1000)
    assert [one.value for one in found[:1]] == pytest.approx([min(values)] if values else [], rel=1e-12)
    return any(isinstance(part, Parallel) for part in (tree, *getattr(tree, "parts", ()))), bool(values)


def test_the_best_partition_of_two_hundred_graphs_is_the_best_of_all():
    seen = [assert_best(seed) for seed in range(200)]
    assert seen.count((True, True)) > 50
    assert seen.count((True, False)) > 20


def test_two_towers_with_a_join_have_two_stages_on_the_longest_path():
    def stage(first, stop, position, replicas, depth):
        return (stop - first, 2 * (stop - first), 0)

    tree = Series((Parallel((Series((0, 1)), Series((2, 3)))), 4, 5))
    question = Question(num_layers=6, num_devices=3, max_stages=3, replicas=(1,), stage=stage, link=lambda *_: (0, 0))
    best = best_branches(question, tree, 4)[0]
    assert (best.starts, best.numbers) == ((0, 2, 4), ((4 + 1) * 6, 12, 2))


def test_memory_that_holds_two_micro_batches_a_stage_allows_towers_side_by_side_alone():
    def stage(first, stop, position, replicas, depth):
        return (stop - first, 2 * (stop - first), 0) if depth * (stop - first) <= 2 else None

    question = Question(num_layers=3, num_devices=3, max_stages=3, replicas=(1,), stage=stage, link=lambda *_: (0, 0))
    assert best_branches(question, Series((Parallel((0, 1)), 2)), 4)[0].starts == (0, 1, 2)
    assert best_branches(question, Series((0, 1, 2)), 4) == ()


def test_a_tree_is_found_again_from_the_order_alone():
    edges = [(0, 1), (0, 2), (1, 3), (2, 4), (4, 5), (3, 6), (5, 6), (0, 6)]
    tree = tree_of(7, edges)
    assert tree == Series((0, Parallel((Series((1, 3)), Series((2, 4, 5)))), 6))
    assert listed(tree) == (0, 1, 3, 2, 4, 5, 6)
    assert longest(edges, [1, 2, 3, 2, 1, 1, 1]) == 1 + 5 + 1


@pytest.mark.parametrize(
    "edges",
    [
        [(0, 2), (1, 2), (1, 3)],
        [(0, 1), (0, 2), (1, 3), (2, 3), (2, 4), (1, 5), (3, 5), (4, 5), (0, 5)],
    ],
)
def test_an_n_among_the_layers_has_no_tree(edges):
    assert tree_of(6, edges) is None


@pytest.mark.parametrize("seed", range(20))
def test_waits_make_any_order_series_parallel_and_keep_what_layers_read(seed):
    rng = random.Random(seed)
    pairs = [(a, b) for b in range(7) for a in range(b)]
    edges, seconds = rng.sample(pairs, rng.randint(3, 10)), [rng.randint(1, 9) for _ in range(7)]
    tree = tree_with_waits(7, edges, seconds)
    place = {layer: at for at, layer in enumerate(listed(tree))}
    assert sorted(place) == list(range(7))
    assert all(place[a] < place[b] for a, b in edges)
    assert longest_of(tree, seconds) >= longest(edges, seconds)
    if exact := tree_of(7, edges):
        assert tree == exact


def test_three_encoders_that_cross_wait_for_the_longest():
    """As in SD3: the last but one states of two encoders and the last of the third, and the pooled ones of two."""
    edges = [(0, 1), (2, 3), (0, 6), (2, 6), (4, 5), (5, 6), (1, 7), (3, 7), (6, 8), (7, 8)]
    seconds = [2, 1, 5, 1, 10, 10, 1, 1, 30]
    tree = tree_with_waits(9, edges, seconds)
    assert tree_of(9, edges) is None
    assert longest_of(tree, seconds) == longest(edges, seconds) + 1
