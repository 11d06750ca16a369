from dataclasses import replace
from itertools import accumulate, combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner.pairs import drawn_question
from diffusionpipe.planner.search import opposed_partition
from diffusionpipe.planner.search.constants import WIDTH
from diffusionpipe.planner.search.opposed_partition import best_pairs, bounded_pairs
from diffusionpipe.planner.search.pair_objectives import OppositeLoads, OppositePath, SameLoads
from diffusionpipe.planner.search.two_sided import TwoSidedQuestion

INFINITE = float("inf")


def gap_of(stages, links):
    """What of a reduction is left when the backwards behind it are done; stages and links in forward order."""
    later = [sum(b for _, b, _ in stages[:s]) + sum(b for _, b in links[:s]) for s in range(len(stages))]
    return max(reduce - after for (_, _, reduce), after in zip(stages, later, strict=True))


def loads_of(microbatches, first, second):
    m, n = microbatches
    return max(m * sum(a[:2]) + n * sum(b[:2]) for a, b in zip(first, second, strict=True))


def ramp_of(stages, links):
    return sum(f + b for f, b, _ in stages[:-1]) + sum(x + y for x, y in links)


def opposite_path(microbatches, first, second, links):
    """The paper's formula; stages and links by device."""
    t0 = max(f + b for f, b, *_ in (*first, *second, *links[0], *links[1]))
    gap = max(0.0, gap_of(first, links[0]), gap_of(second[::-1], links[1][::-1]))
    return (sum(microbatches) + 2 * len(first) - 2) * t0 + gap


def opposite_loads(microbatches, first, second, links):
    ramp = min(ramp_of(first, links[0]), ramp_of(second[::-1], links[1][::-1]))
    gap = max(0.0, gap_of(first, links[0]), gap_of(second[::-1], links[1][::-1]))
    return loads_of(microbatches, first, second) + ramp + gap


def same_loads(microbatches, first, second, links):
    # The ramp of the two sides: each without the stage that is the last on its way.
    ramps = ramp_of(first, links[0]) + ramp_of(second, links[1])
    gap = max(0.0, gap_of(first, links[0]), gap_of(second, links[1]))
    return loads_of(microbatches, first, second) + ramps / 2 + gap


OBJECTIVES = [(OppositePath, opposite_path), (OppositeLoads, opposite_loads), (SameLoads, same_loads)]


@st.composite
def questions(draw, most=5):
    layers = [draw(st.lists(st.tuples(*[st.integers(1, 9)] * 2), min_size=1, max_size=most)) for _ in range(2)]
    devices = draw(st.integers(1, 4))
    weights = [draw(st.lists(st.integers(0, 9), min_size=len(one), max_size=len(one))) for one in layers]
    crossing = [draw(st.lists(st.integers(0, 4), min_size=len(one) + 1, max_size=len(one) + 1)) for one in layers]
    speeds = draw(st.lists(st.integers(1, 3), min_size=devices, max_size=devices))
    memory = draw(st.integers(10, 60))

    def stage(backbone, first, stop, position, replicas):
        slow = 12 / (min(speeds[position : position + replicas]) * replicas)
        forward, backward = (sum(layer[k] for layer in layers[backbone][first:stop]) * slow for k in range(2))
        return forward, backward, sum(weights[backbone][first:stop]) * 12 * (replicas - 1) / replicas

    def link(backbone, cut, position, senders, receivers):
        seconds = 6 * crossing[backbone][cut] / min(senders, receivers)
        return seconds, seconds / 2

    def fits(first, second, position, replicas, blocks):
        held = sum(weights[0][slice(*first)]) + sum(weights[1][slice(*second)])
        return held + blocks * (first[1] - first[0]) + (position + 1) * (second[1] - second[0]) <= memory

    return TwoSidedQuestion(
        num_layers=(len(layers[0]), len(layers[1])),
        num_devices=devices,
        replicas=tuple(sorted(draw(st.sets(st.integers(1, devices), min_size=1)))),
        stage=stage,
        link=link,
        cap=INFINITE,
        work=([0] * (len(layers[0]) + 1), [0] * (len(layers[1]) + 1)),
        fits=fits,
    )


def all_values(question, formula, microbatches):
    """The formula's value of every pair of partitions that is allowed."""
    a, b = question.num_layers
    for blocks in range(1, min(question.num_devices, a, b) + 1):
        for replicas in product(question.replicas, repeat=blocks):
            if sum(replicas) == question.num_devices:
                for cuts, others in product(
                    combinations(range(1, a), blocks - 1), combinations(range(1, b), blocks - 1)
                ):
                    spans = list(zip((0, *cuts), (*cuts, a), strict=True))
                    facing = list(zip((0, *others), (*others, b), strict=True))[::-1]
                    yield from value_of(question, formula, microbatches, replicas, spans, facing)


def value_of(question, formula, microbatches, replicas, spans, facing):
    """The value, if all device blocks have room: spans of both backbones by device."""
    at = [sum(replicas[:k]) for k in range(len(replicas))]
    first = [question.stage(0, *span, p, r) for span, p, r in zip(spans, at, replicas, strict=True)]
    second = [question.stage(1, *span, p, r) for span, p, r in zip(facing, at, replicas, strict=True)]
    links = [
        [
            question.link(backbone, cut, at[k], replicas[k - 1], replicas[k])
            for k, cut in ((k, spans[k][0] if backbone == 0 else facing[k][1]) for k in range(1, len(replicas)))
        ]
        for backbone in range(2)
    ]
    blocks = len(replicas)
    if all(question.fits(spans[k], facing[k], at[k], replicas[k], blocks - k) for k in range(blocks)):
        yield formula(microbatches, first, second, links)


@pytest.mark.parametrize(("objective", "formula"), OBJECTIVES)
@settings(max_examples=60)
@given(question=questions(), microbatches=st.tuples(st.integers(1, 6), st.integers(1, 6)))
def test_the_best_pair_is_the_best_of_all_pairs_and_has_the_value_of_its_formula(
    objective, formula, question, microbatches
):
    values = list(all_values(question, formula, microbatches))
    found = best_pairs(question, objective(microbatches), width=10_000)
    assert bool(found) == bool(values)
    for pair in found[:1]:
        assert pair.value == pytest.approx(min(values), rel=1e-12)
    for pair in found:
        first, second = (
            list(zip(own, (*own[1:], count), strict=True))
            for own, count in zip(pair.starts, question.num_layers, strict=True)
        )
        (own,) = value_of(question, formula, microbatches, pair.replicas, first, second[::-1])
        assert pair.value == pytest.approx(own, rel=1e-12)


@pytest.mark.parametrize(("objective", "formula"), OBJECTIVES)
@settings(max_examples=15)
@given(question=questions(), microbatches=st.tuples(st.integers(1, 6), st.integers(1, 6)))
def test_limits_lose_no_best_pair_and_coarse_questions_give_pairs_of_the_whole_one(
    objective, formula, question, microbatches
):
    """The limits come from questions of 2 and of 3 layers, and the bounds from the work of each layer."""
    work = tuple(
        list(accumulate((sum(question.stage(b, k, k + 1, 0, 1)[:2]) for k in range(count)), initial=0))
        for b, count in enumerate(question.num_layers)
    )  # on devices of unequal speeds it may be more than the least
    question = replace(question, work=tuple([one / 12 for one in own] for own in work))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opposed_partition, "FEW_LAYERS", 2)
        patch.setattr(opposed_partition, "MORE_LAYERS", 3)
        values = list(all_values(question, formula, microbatches))
        found = bounded_pairs(question, objective(microbatches), width=10_000)
        assert bool(found) == bool(values)
        for pair in found[:1]:
            assert pair.value == pytest.approx(min(values), rel=1e-12)
        patch.setattr(opposed_partition, "EFFORT", 0)
        for pair in bounded_pairs(question, objective(microbatches), width=10_000):
            assert min(values) <= pair.value * (1 + 1e-12)
        assert bool(found) == bool(bounded_pairs(question, objective(microbatches), width=10_000))


def assert_close_to_uncapped(seed):
    microbatches = (2 + seed % 7, 2 + seed % 5)
    replicas = (1, 2) if seed % 4 == 0 else (1,)
    question = drawn_question(seed, (10, 10), 2 + seed // 3 % 4, replicas)
    objective = (OppositeLoads, OppositePath, SameLoads)[seed % 3](microbatches)
    best = best_pairs(question, objective, width=10_000)[0]
    found = bounded_pairs(question, objective, width=WIDTH)[0]
    assert found.value <= best.value * 1.005


def test_caps_and_narrow_fronts_lose_nothing_that_counts():
    for seed in range(12):
        assert_close_to_uncapped(seed)


def test_caps_and_narrow_fronts_lose_nothing_that_counts_in_200_cases():
    for seed in range(200):
        assert_close_to_uncapped(seed)
