import inspect

import pytest
import torch
from diffusers import FluxPipeline
from kit.descriptions import described
from kit.tiny_models import raw_inputs, tiny_flux

from diffusionpipe.errors import ModelError
from diffusionpipe.models.graphs.run import needed_layers, run_layers

TRANSFORMERS = {
    "both kinds of blocks": ({}, 8),
    "joint blocks alone": ({"num_single_layers": 0}, 8),
    "single blocks alone": ({"num_layers": 0}, 8),
    "without guidance": ({"guidance_embeds": False}, 16),
}
READ = ("noisy", "timesteps", "text_states", "pooled_text")


def _given(graph, batch=3):
    inputs = raw_inputs(graph, batch)
    found = run_layers(needed_layers(graph.layers, READ, inputs), graph.components, inputs, targets=READ)
    return found | {name: inputs[name] for name in ("guidance",) if name in inputs}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("both kinds of blocks", torch.float32), *((kind, torch.float64) for kind in TRANSFORMERS)],  # a trace each
    ids=str,
)
def test_layers_give_bit_for_bit_output_and_gradients_of_the_transformer(kind, dtype):
    config, resolution = TRANSFORMERS[kind]
    graph = tiny_flux(dtype, transformer=config, resolution=resolution)
    transformer = graph.components["transformer"]
    given = _given(graph)
    batch, channels, size, _ = given["noisy"].shape
    length = given["text_states"].shape[1]

    packed = transformer(
        FluxPipeline._pack_latents(given["noisy"], batch, channels, size, size),
        encoder_hidden_states=given["text_states"],
        pooled_projections=given["pooled_text"],
        timestep=given["timesteps"] / 1000,
        guidance=given.get("guidance"),
        txt_ids=torch.zeros(length, 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(batch, size // 2, size // 2, "cpu", torch.float32),
    ).sample
    expected = FluxPipeline._unpack_latents(packed, size * 8, size * 8, 8)
    expected.pow(2).mean().backward()
    gradients = {name: p.grad for name, p in transformer.named_parameters()}
    transformer.zero_grad()

    layers = needed_layers(graph.layers, ["prediction"], given)
    prediction = run_layers(layers, graph.components, given, targets=["prediction"])["prediction"]
    prediction.pow(2).mean().backward()

    assert torch.equal(prediction, expected)
    ours = {name: p.grad for name, p in transformer.named_parameters()}
    different = [name for name in gradients if (gradients[name] is None) != (ours[name] is None)]
    different += [n for n, g in gradients.items() if g is not None and not torch.equal(g, ours[n])]
    assert not different


def test_text_layers_give_bit_for_bit_what_diffusers_pipeline_reads():
    graph = tiny_flux()
    inputs = raw_inputs(graph, 3)
    targets = ["text_states", "pooled_text"]
    found = run_layers(needed_layers(graph.layers, targets, inputs), graph.components, inputs, targets=targets)
    assert torch.equal(found["pooled_text"], graph.components["text_encoder"](inputs["input_ids"]).pooler_output)
    assert torch.equal(found["text_states"], graph.components["text_encoder_2"](inputs["input_ids_2"])[0])


def test_text_is_as_long_as_diffusers_pipeline_has_it():
    default = inspect.signature(FluxPipeline.__call__).parameters["max_sequence_length"].default
    assert {spec.name: spec.shape for spec in tiny_flux().inputs}["input_ids_2"] == (default,)


def test_exactly_encoders_and_noise_are_frozen():
    graph = tiny_flux()
    backbone = ("transformer.", "objective.loss")
    expected = [layer.name for layer in graph.layers if not layer.name.startswith(backbone)]
    assert list(described(graph).frozen_layers) == expected


def test_nothing_is_written_that_nothing_reads():
    model = described(tiny_flux())
    read = {name for layer in model.layers for name in layer.reads}
    written = {name for layer in model.layers for name in layer.writes}
    assert written - read == {"loss"}


@pytest.mark.parametrize(
    ("config", "resolution", "named"),
    [
        ({"in_channels": 4}, 8, "in_channels 4 is not 16, a patch of the VAE's latents"),
        ({"out_channels": 4}, 8, "out_channels 4 is not in_channels 16"),
        ({"pooled_projection_dim": 9}, 8, "pooled_projection_dim 9 is not 8, the width of CLIP"),
        ({}, 10, "latents of size 5 cannot be cut into patches of 2"),
    ],
)
def test_what_would_not_run_exactly_is_refused_by_name(config, resolution, named):
    with pytest.raises(ModelError) as caught:
        tiny_flux(transformer=config, resolution=resolution)
    assert named in str(caught.value)
