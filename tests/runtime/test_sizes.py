"""Micro-batches of several sizes in one step: every layout gives the gradients of one process."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from cuts import traced_once
from descriptions import described
from layout_cases import scattered
from layouts import assert_same_step
from sized_steps import mixed_steps, one_process, samples_of
from tiers import quick_and_slow
from tiny_models import _prepare, tiny_flux_transformer, tiny_t5, tiny_text_encoder, tiny_unet, tiny_vae

from diffusionpipe.costs.forms import Form
from diffusionpipe.ir.size import Clip
from diffusionpipe.models.base.coordinates import with_coordinates
from diffusionpipe.models.families import flux, stable_diffusion
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings, Prediction
from diffusionpipe.models.opening.folder import family_graph
from diffusionpipe.models.parameters.lora import LoraSettings, is_second_matrix
from diffusionpipe.models.parameters.stored_linear import store
from diffusionpipe.models.parameters.weights import materialize
from diffusionpipe.planner import Layout, build_plan

SIZES = (Clip(width=8, height=16), Clip(width=16, height=8), Clip.square(8))
"""Two aspects of one area, and a smaller area."""
MIXED = ((0, 0, 1, 1, 2, 2, 1, 1), (2, 2, 0, 0, 0, 0, 1, 1))
BY_SIZE = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "use_dynamic_shifting": True,
    "base_image_seq_len": 2,
    "max_image_seq_len": 16,
    "base_shift": 0.5,
    "max_shift": 1.15,
}
"""A scheduler that shifts times by the number of tokens."""
SMALL = {"num_layers": 1, "num_single_layers": 1}
OF_EIGHT = {"batch": 8, "stages": 2, "microbatches": 4}
LAYOUTS = {
    "1f1b": Layout(**OF_EIGHT),
    "zb-v": Layout(**OF_EIGHT, schedule="zb-v"),
    "zb-v, recomputed": Layout(**OF_EIGHT, schedule="zb-v", checkpointed=("*",)),
    "replicas": Layout(**OF_EIGHT, replicas=(2, 1)),
    "two copies": Layout(**OF_EIGHT | {"microbatches": 2}, data_parallel=2),
    "sharded": Layout(**OF_EIGHT | {"microbatches": 2}, data_parallel=2, sharded=True),
    "two directions": Layout(**OF_EIGHT, schedule="chimera"),
    "encoders on the host": Layout(**OF_EIGHT, encoders="host", encode_chunk=3),
    "filled": Layout(**OF_EIGHT, encode_chunk=3),
    "filled, encoders on the host": Layout(**OF_EIGHT, encoders="host"),
}


@cache
def graph_of(kind: str) -> LayerGraph:
    """A tiny model for all sizes."""
    lora = None
    if kind in ("unet", "coordinates"):
        family, objective = stable_diffusion.FAMILY, ObjectiveSettings()
        components = {"text_encoder": tiny_text_encoder(), "vae": tiny_vae(), "unet": tiny_unet()}
    else:
        family, objective = flux.FAMILY, ObjectiveSettings(prediction=Prediction.FLOW_MATCHING, shift=None)
        components = {
            "text_encoder": tiny_text_encoder(),
            "text_encoder_2": tiny_t5(),
            "vae": tiny_vae(shift_factor=0.2, use_quant_conv=False),
            "transformer": tiny_flux_transformer(**SMALL),
        }
        lora = LoraSettings(rank=2, alpha=3.0) if kind == "adapters on nf4" else None
    _prepare(components, torch.float64, True)
    with traced_once():
        graph = family_graph(
            family,
            components,
            Objective(objective, BY_SIZE if "transformer" in components else {}),
            resolution=8,
            train=None,
            dtype="float64",
            lora=lora,
            clip=SIZES[0],
            others=SIZES[1:],
        )
    if kind == "coordinates":
        graph = with_coordinates(graph, "unet", "conv_in")
        with torch.no_grad():
            graph.components["unet"].conv_in.weight[:, -2:] += 0.5
    if lora is not None:
        store(graph, lambda component: Form.NF4 if component != "vae" else None)
        materialize(graph, [one.name for one in graph.layers], {}, device="cpu", dtype=torch.float64, seed=0)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in graph.components["transformer"].named_parameters():
                if is_second_matrix(name):
                    parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return graph


def check(kind, layout, steps=MIXED) -> None:
    graph = graph_of(kind)
    models = [described(replace(own, others=())) for own in graph.of_sizes]
    batches = [(sizes, samples_of(graph, sizes, number)) for number, sizes in enumerate(steps)]
    filler = scattered(1) if layout.startswith("filled") else None
    found = mixed_steps(graph, models, build_plan(models[0], LAYOUTS[layout], filler=filler), batches)
    for own, batch in zip(found, batches, strict=True):
        assert_same_step(own, one_process(graph, *batch))


CASES = [(kind, layout) for kind in ("unet", "transformer", "adapters on nf4", "coordinates") for layout in LAYOUTS]
QUICK = [("unet", "1f1b"), ("unet", "filled"), ("transformer", "1f1b"), ("coordinates", "filled")]


@pytest.mark.parametrize(("kind", "layout"), quick_and_slow(CASES, quick=QUICK))
def test_mixed_steps_have_the_gradients_of_one_process(kind, layout):
    check(kind, layout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unet", "transformer"])
@pytest.mark.parametrize("layout", ["zb-v", "filled"])
def test_twenty_mixed_steps_have_the_gradients_of_one_process(kind, layout):
    draw = random.Random(0)
    check(kind, layout, [tuple(size for size in draw.choices((0, 1, 2), k=4) for _ in range(2)) for _ in range(20)])


def test_layers_of_another_aspect_give_other_gradients_though_every_shape_between_layers_is_equal():
    graph = graph_of("transformer")
    models = [described(replace(own, others=())) for own in graph.of_sizes]
    crossing = {spec.name for spec in models[0].tensors if spec == models[1].tensor(spec.name)}
    assert any(name.startswith("transformer.") for name in crossing)
    sizes = (0, 0, 1, 1, 0, 0, 1, 1)
    batch = sizes, samples_of(graph, sizes)
    (found,) = mixed_steps(with_layers_of_the_first(graph), models, build_plan(models[0], LAYOUTS["1f1b"]), [batch])
    with pytest.raises(AssertionError):
        assert_same_step(found, one_process(graph, *batch))


def test_times_are_shifted_by_each_sample_s_own_tokens():
    graph = graph_of("transformer")
    shifted = []
    for own in graph.of_sizes:
        noise = next(layer for layer in own.layers if layer.name == "objective.noise")
        latents = torch.zeros(1, *own.inputs[-2].shape, dtype=torch.float64)
        time = torch.full((1,), 0.5, dtype=torch.float64)
        shifted.append(float(noise.run(graph.components["objective"], latents, latents, time)[1]))
    assert shifted[0] == shifted[1]
    assert shifted[2] != shifted[0]


def with_layers_of_the_first(graph: LayerGraph) -> LayerGraph:
    """The graph whose second aspect runs the first one's blocks: all layers that read and write what those do."""
    first, second, third = graph.of_sizes
    own = {layer.name: layer for layer in second.layers}
    blocks = [layer for layer in first.layers if "blocks" in layer.name]
    assert blocks
    own |= {layer.name: layer for layer in blocks}
    return replace(first, others=(replace(second, layers=tuple(own.values())), third))
