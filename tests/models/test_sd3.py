import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from kit.descriptions import described
from kit.tiny_models import raw_inputs, tiny_sd3, tiny_t5
from torch.nn import functional

from diffusionpipe.errors import ModelError
from diffusionpipe.models.graphs.run import needed_layers, run_layers

TRANSFORMERS = {
    "three blocks": ({}, 8),
    "one block": ({"num_layers": 1}, 8),
    "other size than it was made for": ({}, 16),
    "as in version 3.5": ({"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)}, 8),
}
READ = ("noisy", "timesteps", "text_states", "pooled_text")


def _given(graph, batch=3):
    inputs = raw_inputs(graph, batch)
    return run_layers(needed_layers(graph.layers, READ, inputs), graph.components, inputs, targets=READ)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("three blocks", torch.float32), *((kind, torch.float64) for kind in TRANSFORMERS)],  # a trace each
    ids=str,
)
def test_layers_give_bit_for_bit_output_and_gradients_of_the_transformer(kind, dtype):
    config, resolution = TRANSFORMERS[kind]
    graph = tiny_sd3(dtype, transformer=config, resolution=resolution)
    transformer = graph.components["transformer"]
    given = _given(graph)

    expected = transformer(
        given["noisy"],
        encoder_hidden_states=given["text_states"],
        pooled_projections=given["pooled_text"],
        timestep=given["timesteps"],
    ).sample
    expected.pow(2).mean().backward()
    gradients = {name: p.grad for name, p in transformer.named_parameters()}
    transformer.zero_grad()

    layers = needed_layers(graph.layers, ["prediction"], given)
    prediction = run_layers(layers, graph.components, given, targets=["prediction"])["prediction"]
    prediction.pow(2).mean().backward()

    assert torch.equal(prediction, expected)
    ours = {name: p.grad for name, p in transformer.named_parameters()}
    assert not [name for name in gradients if not torch.equal(gradients[name], ours[name])]


def test_text_layers_give_bit_for_bit_what_diffusers_pipeline_reads():
    graph = tiny_sd3()
    inputs = raw_inputs(graph, 3)
    targets = ["text_states", "pooled_text"]
    found = run_layers(needed_layers(graph.layers, targets, inputs), graph.components, inputs, targets=targets)
    clips = [
        graph.components[name](inputs[ids], output_hidden_states=True)
        for name, ids in (("text_encoder", "input_ids"), ("text_encoder_2", "input_ids_2"))
    ]
    t5 = graph.components["text_encoder_3"](inputs["input_ids_3"])[0]
    clip = torch.cat([output.hidden_states[-2] for output in clips], dim=-1)
    assert torch.equal(found["text_states"], torch.cat([functional.pad(clip, (0, 4)), t5], dim=-2))
    assert torch.equal(found["pooled_text"], torch.cat([output.text_embeds for output in clips], dim=-1))


def test_text_is_as_long_as_diffusers_pipeline_has_it():
    import inspect

    default = inspect.signature(StableDiffusion3Pipeline.__call__).parameters["max_sequence_length"].default
    assert {spec.name: spec.shape for spec in tiny_sd3().inputs}["input_ids_3"] == (default,)


def test_exactly_encoders_and_noise_are_frozen():
    graph = tiny_sd3()
    backbone = ("transformer.", "objective.loss")
    expected = [layer.name for layer in graph.layers if not layer.name.startswith(backbone)]
    assert list(described(graph).frozen_layers) == expected


def test_nothing_is_written_that_nothing_reads():
    model = described(tiny_sd3())
    read = {name for layer in model.layers for name in layer.reads}
    written = {name for layer in model.layers for name in layer.writes}
    assert written - read == {"loss"}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"in_channels": 3}, "in_channels 3 is not 4, the VAE's latent channels"),
        ({"pooled_projection_dim": 9}, "pooled_projection_dim 9 is not 8"),
        ({"joint_attention_dim": 9}, "joint_attention_dim 9 is not 20, the width of T5"),
        ({"pos_embed_max_size": 1}, "latents of size 4 are not a multiple of the patch size 2 up to 2"),
    ],
)
def test_what_would_not_run_exactly_is_refused_by_name(config, named):
    with pytest.raises(ModelError) as caught:
        tiny_sd3(transformer=config)
    assert named in str(caught.value)


def test_the_bias_by_position_belongs_to_every_layer_of_t5():
    model = described(tiny_sd3())
    bias = "text_encoder_3.encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    users = [layer.name for layer in model.layers if bias in layer.parameters]
    assert users == [f"text_encoder_3.encoder.block.{i}" for i in range(tiny_t5().config.num_layers)]
