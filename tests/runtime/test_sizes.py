"""Micro-batches of several sizes in one step: every layout gives the gradients of one process."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from descriptions import described
from layouts import assert_same_step
from sized_steps import mixed_steps, one_process, samples_of
from tiny_models import _prepare, tiny_flux_transformer, tiny_t5, tiny_text_encoder, tiny_unet, tiny_vae

from diffusionpipe.ir.size import Clip
from diffusionpipe.models.families import flux, stable_diffusion
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings, Prediction
from diffusionpipe.models.opening.folder import family_graph
from diffusionpipe.planner import Layout, build_plan

SIZES = (Clip(width=8, height=16), Clip(width=16, height=8), Clip.square(8))
"""Two aspects of one area, and a smaller area."""
MIXED = ((0, 0, 1, 1, 2, 2, 1, 1), (2, 2, 0, 0, 0, 0, 1, 1), (1, 1, 1, 1, 1, 1, 1, 1))


@cache
def graph_of(kind: str) -> LayerGraph:
    """A tiny model for all sizes."""
    if kind == "unet":
        family, components = (
            stable_diffusion.FAMILY,
            {"text_encoder": tiny_text_encoder(), "vae": tiny_vae(), "unet": tiny_unet()},
        )
        objective = ObjectiveSettings()
    else:
        family, components = (
            flux.FAMILY,
            {
                "text_encoder": tiny_text_encoder(),
                "text_encoder_2": tiny_t5(),
                "vae": tiny_vae(shift_factor=0.2, use_quant_conv=False),
                "transformer": tiny_flux_transformer(),
            },
        )
        objective = ObjectiveSettings(prediction=Prediction.FLOW_MATCHING)
    _prepare(components, torch.float64, True)
    return family_graph(
        family,
        components,
        Objective(objective, {}),
        resolution=8,
        train=None,
        dtype="float64",
        lora=None,
        clip=SIZES[0],
        others=SIZES[1:],
    )


def check(kind: str, layout: Layout, steps=MIXED) -> None:
    graph = graph_of(kind)
    models = [described(replace(own, others=())) for own in graph.of_sizes]
    batches = [(sizes, samples_of(graph, sizes, number)) for number, sizes in enumerate(steps)]
    found = mixed_steps(graph, models, build_plan(models[0], layout), batches)
    for own, batch in zip(found, batches, strict=True):
        assert_same_step(own, one_process(graph, *batch))


@pytest.mark.parametrize("kind", ["unet", "transformer"])
def test_mixed_steps_over_two_stages_have_the_gradients_of_one_process(kind):
    check(kind, Layout(batch=8, stages=2, microbatches=4))
