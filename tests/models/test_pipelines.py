"""Folders of the larger pipelines, as diffusers itself writes them, become graphs that run what the folders hold."""

import inspect

import diffusers
import pytest
import torch
from kit.tiny_models import raw_inputs, tiny_controlled, tiny_flux, tiny_sd3, tiny_sdxl, tiny_stable_diffusion

from diffusionpipe.errors import ModelError
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.models.objectives.objective import ObjectiveSettings, Prediction
from diffusionpipe.models.opening.folder import REGISTRY, build_graph, weight_sources
from diffusionpipe.models.parameters.lora import LoraSettings, is_adapter
from diffusionpipe.models.parameters.weights import materialize

EPSILON = ObjectiveSettings()
FLOW = ObjectiveSettings(prediction=Prediction.FLOW_MATCHING)
PIPELINES = {
    "StableDiffusionXLPipeline": (tiny_sdxl, diffusers.DDPMScheduler, EPSILON),
    "StableDiffusionControlNetPipeline": (tiny_controlled, diffusers.DDPMScheduler, EPSILON),
    "StableDiffusion3Pipeline": (tiny_sd3, diffusers.FlowMatchEulerDiscreteScheduler, FLOW),
    "FluxPipeline": (tiny_flux, diffusers.FlowMatchEulerDiscreteScheduler, FLOW),
}


def _save(name, graph, scheduler, folder):
    kind = getattr(diffusers, name)
    parts = {part: component for part, component in graph.components.items() if part != "objective"}
    wanted = inspect.signature(kind.__init__).parameters
    absent = {part: None for part in wanted if part.startswith(("tokenizer", "safety", "feature", "image_enc"))}
    off = {"requires_safety_checker": False} if "requires_safety_checker" in wanted else {}
    kind(**parts, **absent, **off, scheduler=scheduler()).save_pretrained(folder)


@pytest.mark.parametrize("name", PIPELINES)
def test_what_the_folder_holds_is_what_runs(name, tmp_path):
    tiny, scheduler, objective = PIPELINES[name]
    original = tiny(torch.float32)
    _save(name, original, scheduler, tmp_path)
    graph = build_graph(tmp_path, objective=objective, resolution=8)
    layers = [layer.name for layer in graph.layers]
    assert layers == [layer.name for layer in original.layers]
    materialize(graph, layers, weight_sources(tmp_path, graph), device="cpu", dtype=torch.float32, seed=0)
    inputs = raw_inputs(original, 2)
    losses = [run_layers(g.layers, g.components, inputs, targets=["loss"])["loss"] for g in (original, graph)]
    assert torch.equal(*losses)


def test_a_folder_opens_with_adapters(tmp_path):
    original = tiny_flux(torch.float32)
    _save("FluxPipeline", original, diffusers.FlowMatchEulerDiscreteScheduler, tmp_path)
    graph = build_graph(tmp_path, objective=FLOW, resolution=8, lora=LoraSettings(rank=2))
    layers = [layer.name for layer in graph.layers]
    materialize(graph, layers, weight_sources(tmp_path, graph), device="cpu", dtype=torch.float32, seed=0)
    inputs = raw_inputs(original, 2)
    losses = [run_layers(g.layers, g.components, inputs, targets=["loss"])["loss"] for g in (original, graph)]
    assert torch.allclose(*losses, rtol=1e-5)
    trainable = [name for name, p in graph.components["transformer"].named_parameters() if p.requires_grad]
    assert trainable
    assert all(".lora_" in name for name in trainable)


def test_only_denoisers_and_text_encoders_get_adapters(tmp_path):
    graph = tiny_stable_diffusion(torch.float32)
    _save("StableDiffusionPipeline", graph, diffusers.DDPMScheduler, tmp_path)
    opened = build_graph(
        tmp_path, objective=EPSILON, resolution=8, train=("text_encoder", "unet"), lora=LoraSettings(rank=2)
    )
    adapted = {p.name.partition(".")[0] for p in describe(opened).parameters if p.is_trainable}
    assert adapted == {"text_encoder", "unet"}
    assert all(is_adapter(p.name) for p in describe(opened).parameters if p.is_trainable)
    with pytest.raises(ModelError, match="vae"):
        build_graph(tmp_path, objective=EPSILON, resolution=8, train=("vae", "unet"), lora=LoraSettings(rank=2))


@pytest.mark.parametrize("name", REGISTRY)
def test_components_have_the_names_that_diffusers_pipeline_gives_them(name):
    accepted = inspect.signature(getattr(diffusers, name).__init__).parameters
    assert REGISTRY[name].components.keys() <= accepted.keys()
