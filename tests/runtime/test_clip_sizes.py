"""Clips of several lengths and pictures in one step: gradients of one process."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from kit.cuts import traced_once
from kit.descriptions import described
from kit.layout_cases import scattered
from kit.layouts import assert_same_step
from kit.sized_steps import mixed_steps, one_process, samples_of
from kit.tiny_described import PIPELINES
from kit.tiny_models import randomise_parameters
from runtime.test_unequal import cut_steps

from diffusionpipe.ir.size import Clip
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings, Prediction
from diffusionpipe.models.opening.folder import REGISTRY, family_graph
from diffusionpipe.planner import Layout, build_plan

SIZES = {
    "WanPipeline": (Clip(width=16, height=16, frames=33), Clip(width=16, height=24, frames=17), Clip.square(16)),
    "HunyuanVideoPipeline": (*(Clip(width=16, height=16, frames=frames) for frames in (33, 17)), Clip.square(16)),
}
MIXED = ((0, 0, 2, 2, 1, 1, 2, 2), (2, 2, 2, 2, 0, 0, 1, 1))
OF_EIGHT = {"batch": 8, "stages": 2, "microbatches": 4}
LAYOUTS = {
    "1f1b": Layout(**OF_EIGHT),
    "zb-v": Layout(**OF_EIGHT, schedule="zb-v"),
    "two copies": Layout(**OF_EIGHT | {"microbatches": 2}, data_parallel=2),
    "filled": Layout(**OF_EIGHT, encode_chunk=3),
}


@pytest.fixture(scope="module", autouse=True)
def norms_in_float64():
    """Models of clips compute norms in float32, whatever they are given."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


@cache
def graph_of(kind):
    """A tiny model of clips for all its sizes, in float64."""
    pipeline = PIPELINES[kind]()
    family = REGISTRY[kind]
    components = {name: getattr(pipeline, name).double() for name in family.components}
    for seed, component in enumerate(components.values()):
        randomise_parameters(component, seed)
    first, *others = SIZES[kind]
    with traced_once():
        return family_graph(
            family,
            components,
            Objective(ObjectiveSettings(prediction=Prediction.FLOW_MATCHING), {}),
            resolution=16,
            train=None,
            dtype="float64",
            lora=None,
            clip=first,
            others=others,
        )


CASES = [(kind, layout) for kind in SIZES for layout in LAYOUTS]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_clips_of_several_lengths_and_pictures_have_the_gradients_of_one_process(kind, layout):
    graph = graph_of(kind)
    models = [described(replace(own, others=())) for own in graph.of_sizes]
    batches = [(sizes, samples_of(graph, sizes, number)) for number, sizes in enumerate(MIXED)]
    filler = scattered(1) if layout == "filled" else None
    found = mixed_steps(graph, models, build_plan(models[0], LAYOUTS[layout], filler=filler), batches)
    for own, batch in zip(found, batches, strict=True):
        assert_same_step(own, one_process(graph, *batch))


@pytest.mark.slow
@pytest.mark.parametrize("kind", SIZES)
def test_steps_cut_by_tokens_put_pictures_together_and_have_the_gradients_of_one_process(kind):
    graph = graph_of(kind)
    plan = build_plan(described(replace(graph, others=())), Layout(**OF_EIGHT))
    batches = [(sizes, samples_of(graph, sizes, number)) for number, sizes in enumerate(MIXED)]
    steps, microbatches = cut_steps(graph, plan, batches)
    for own, batch in zip(steps, batches, strict=True):
        assert_same_step(own, one_process(graph, *batch))
    assert max(microbatches) <= 8
