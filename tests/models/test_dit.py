import pytest
import torch
from kit.descriptions import described
from kit.tiny_models import NUM_CLASSES, raw_inputs, tiny_dit

from diffusionpipe.errors import ModelError
from diffusionpipe.models.graphs.run import needed_layers, run_layers

TRANSFORMERS = {
    "three blocks": ({}, 8),
    "one block": ({"num_layers": 1}, 8),
    "other size than it was made for": ({}, 16),
    "patches of one, no bias": ({"patch_size": 1, "attention_bias": False}, 8),
    "learned variances": ({"out_channels": 8}, 8),
}


def _denoiser_inputs(graph):
    inputs = raw_inputs(graph, 4)
    inputs["labels"][0] = NUM_CLASSES  # the null class
    layers = needed_layers(graph.layers, ["noisy", "timesteps"], inputs)
    noised = run_layers(layers, graph.components, inputs, targets=["noisy", "timesteps"])
    return {**noised, "labels": inputs["labels"]}


@pytest.mark.parametrize(("config", "resolution"), TRANSFORMERS.values(), ids=TRANSFORMERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_layers_give_bit_for_bit_output_and_gradients_of_the_transformer(config, resolution, dtype):
    graph = tiny_dit(dtype, transformer=config, resolution=resolution)
    transformer = graph.components["transformer"]
    given = _denoiser_inputs(graph)

    expected = transformer(given["noisy"], given["timesteps"], given["labels"]).sample[:, :4]
    expected.pow(2).mean().backward()
    gradients = {name: p.grad for name, p in transformer.named_parameters()}
    transformer.zero_grad()

    layers = needed_layers(graph.layers, ["prediction"], given)
    prediction = run_layers(layers, graph.components, given, targets=["prediction"])["prediction"]
    prediction.pow(2).mean().backward()

    assert torch.equal(prediction, expected)
    ours = {name: p.grad for name, p in transformer.named_parameters()}
    assert not [name for name in gradients if not torch.equal(gradients[name], ours[name])]


def test_training_never_reads_the_global_generator():
    graph = tiny_dit()
    before = torch.get_rng_state()
    losses = [run_layers(graph.layers, graph.components, raw_inputs(graph, 3), targets=["loss"])["loss"] for _ in "ab"]
    assert torch.equal(*losses)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_null_class_keeps_its_row():
    graph = tiny_dit()
    table = graph.components["transformer"].transformer_blocks[0].norm1.emb.class_embedder.embedding_table
    assert table.num_embeddings == NUM_CLASSES + 1


def test_the_embedding_goes_straight_to_the_output_layer():
    model = described(tiny_dit())
    readers = [layer.name for layer in model.layers if "conditioning.out" in layer.reads]
    assert readers == ["transformer.proj_out"]
    embedded = [layer.name for layer in model.layers for p in layer.parameters if "blocks.0.norm1.emb." in p]
    assert set(embedded) == {"transformer.conditioning"}


def test_no_parameter_belongs_to_two_layers():
    model = described(tiny_dit())
    names = [p for layer in model.layers for p in layer.parameters]
    assert len(names) == len(set(names))


def test_exactly_vae_and_noise_are_frozen():
    graph = tiny_dit()
    expected = [layer.name for layer in graph.layers if layer.component == "vae" or layer.name == "objective.noise"]
    assert list(described(graph).frozen_layers) == expected


def test_the_half_for_variances_gets_zero_gradients():
    graph = tiny_dit(transformer={"out_channels": 8})
    run_layers(graph.layers, graph.components, raw_inputs(graph, 3), targets=["loss"])["loss"].sum().backward()
    gradient = graph.components["transformer"].proj_out_2.weight.grad.reshape(2, 2, 8, -1)  # (P, P, C, D)
    assert gradient[:, :, 4:].abs().max() == 0
    assert gradient[:, :, :4].abs().min() > 0


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"dropout": 0.1}, "dropout = 0.1"),
        ({"in_channels": 3}, "in_channels 3 is not the VAE's 4"),
        ({"out_channels": 12}, "out_channels 12 must be 4, or 8"),
        ({"patch_size": 3, "sample_size": 6}, "latents of size 4 cannot be cut into patches of 3"),
    ],
)
def test_what_would_not_run_exactly_is_refused_by_name(config, named):
    with pytest.raises(ModelError) as caught:
        tiny_dit(transformer=config)
    assert named in str(caught.value)
