"""Tiny models for several sizes of samples, and the layouts whose mixed steps are compared with one process."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from kit.cuts import traced_once
from kit.descriptions import described
from kit.layout_cases import scattered
from kit.layouts import Step, assert_same_step
from kit.sized_steps import Samples, mixed_steps, one_process
from kit.tiny_models import _prepare, tiny_flux_transformer, tiny_t5, tiny_text_encoder, tiny_unet, tiny_vae

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


KINDS = ("unet", "transformer", "adapters on nf4", "coordinates")
"""Models of `graph_of`."""


@cache
def graph_of(kind: str, sizes: tuple[Clip, ...] = SIZES) -> LayerGraph:
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
            clip=sizes[0],
            others=sizes[1:],
        )
    if kind == "coordinates":
        graph = with_coordinates(graph, "unet", "conv_in")
        with torch.no_grad():
            graph.components["unet"].get_parameter("conv_in.weight")[:, -2:] += 0.5
    if lora is not None:
        store(graph, lambda component: Form.NF4 if component != "vae" else None)
        materialize(graph, [one.name for one in graph.layers], {}, device="cpu", dtype=torch.float64, seed=0)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in graph.components["transformer"].named_parameters():
                if is_second_matrix(name):
                    parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return graph


def compare(
    graph: LayerGraph, layout: str, steps: Sequence[tuple[Sequence[int], Samples]], expected: Sequence[Step] = ()
) -> None:
    """Raises AssertionError where the gradients of a layout's steps are not the ones of one process, `expected`."""
    models = [described(replace(own, others=())) for own in graph.of_sizes]
    filler = scattered(1) if layout.startswith("filled") else None
    found = mixed_steps(graph, models, build_plan(models[0], LAYOUTS[layout], filler=filler), steps)
    alone = expected or [one_process(graph, *batch) for batch in steps]
    for own, one in zip(found, alone, strict=True):
        assert_same_step(own, one)
