"""Plans of chosen sizes on a measured model with two backbones."""

from dataclasses import replace

import pytest
from planner.synthetic import chain

from benchmarks.cascade.joining import joined_profile
from diffusionpipe.planner.assembly.build import build_plan
from diffusionpipe.planner.assembly.layout import BackboneLayout, Layout
from diffusionpipe.planner.from_profile import plan_from_profile, predicted_timeline, setting_of
from diffusionpipe.planner.search.proposal import pricing_of
from diffusionpipe.timing.legal import check


def pair(first=0.01, second=0.03, frozen=0.0):
    return joined_profile({
        name: chain([seconds] * 8, parameters=[10] * 8, frozen=frozen)
        for name, seconds in (("base", first), ("large", second))
    })  # fmt: skip


def layout(schedule, counts=(4, 8), **sizes):
    own = tuple(BackboneLayout(name=name, microbatches=n) for name, n in zip(("base", "large"), counts, strict=True))
    return Layout(batch=32, stages=4, microbatches=max(counts), schedule=schedule, backbones=own, **sizes)


def iteration(profile, plan):
    return predicted_timeline(profile, plan).makespan


def both(profile, own):
    """The plan with orders by measured times, and the one of the same stages with orders by equal times."""
    timed = plan_from_profile(profile, own)
    starts = {block[0] for block in timed.blocks[:-1]}
    layers = {backbone.name: profile.graph.layers_of(backbone) for backbone in profile.graph.backbones}
    splits = {name: tuple(layer for layer in of_model[1:] if layer in starts) for name, of_model in layers.items()}
    fixed = replace(own, backbones=tuple(replace(one, splits=splits[one.name]) for one in own.backbones))
    return timed, build_plan(profile.graph, fixed, pricing=pricing_of(setting_of(profile, own.mesh, own.batch)))


@pytest.mark.parametrize("schedule", ["opposed", "together"])
@pytest.mark.parametrize("sizes", [{}, {"replicas": (1, 1, 2, 1)}, {"data_parallel": 2}])
@pytest.mark.parametrize(("first", "second"), [(0.01, 0.03), (0.03, 0.01), (0.02, 0.02)])
def test_orders_by_measured_times_are_never_longer_than_those_by_equal_ones(schedule, sizes, first, second):
    profile = pair(first, second)
    timed, equal = both(profile, layout(schedule, **sizes))
    check(timed.train)
    assert timed.blocks == equal.blocks
    assert iteration(profile, timed) <= iteration(profile, equal)


def test_they_are_shorter_where_micro_batches_of_both_take_unequal_times():
    profile = pair(0.01, 0.05)
    timed, equal = both(profile, layout("opposed", (8, 16)))
    assert iteration(profile, timed) < 0.9 * iteration(profile, equal)
