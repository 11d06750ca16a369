"""Stages in buckets, adjacent groups, and what the search proposes: trained for real, they change no gradient."""

import pytest
from kit.descriptions import described
from kit.layouts import assert_same_step, reference_step, step_in_threads
from kit.tiny_models import raw_inputs, tiny_stable_diffusion

from diffusionpipe.planner import Layout


@pytest.fixture(scope="module")
def prepared():
    graph = tiny_stable_diffusion()
    inputs = raw_inputs(graph, 16)
    return graph, described(graph), inputs, reference_step(graph, inputs)


@pytest.mark.parametrize(
    "layout",
    [
        {"stages": 1, "microbatches": 2, "buckets": 4, "data_parallel": 2},
        {"stages": 2, "microbatches": 4, "buckets": 2, "data_parallel": 2, "adjacent": 2},
        {"stages": 2, "microbatches": 4, "buckets": 3, "replicas": (2, 1)},
    ],
)
def test_buckets_and_adjacent_groups_change_no_gradient(prepared, layout):
    graph, model, inputs, expected = prepared
    assert_same_step(step_in_threads(graph, model, Layout(batch=16, **layout), inputs), expected)
