import pytest
import torch
from kit.descriptions import described
from kit.tiny_models import VOCABULARY, raw_inputs, tiny_sdxl

from diffusionpipe.errors import ModelError
from diffusionpipe.models.graphs.run import needed_layers, run_layers

UNETS = {
    "one and three transformer blocks": ({}, 8),
    "no attention above, two layers a block": (
        {
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": (1, 2),
            "layers_per_block": 2,
        },
        8,
    ),
    "projections by convolution": ({"use_linear_projection": False}, 8),
    "sizes that do not halve": ({}, 10),
}
FROZEN = ("noisy", "timesteps", "text_states", "pooled_text")


def _frozen(graph, targets, batch=3):
    inputs = raw_inputs(graph, batch)
    layers = needed_layers(graph.layers, targets, inputs)
    return inputs | run_layers(layers, graph.components, inputs, targets=targets)


@pytest.mark.parametrize(("config", "resolution"), UNETS.values(), ids=UNETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_unet_layers_give_bit_for_bit_output_and_gradients_of_the_unet(config, resolution, dtype):
    graph = tiny_sdxl(dtype, unet=config, resolution=resolution)
    unet = graph.components["unet"]
    given = _frozen(graph, FROZEN)

    added = {"text_embeds": given["pooled_text"], "time_ids": given["time_ids"]}
    expected = unet(given["noisy"], given["timesteps"], given["text_states"], added_cond_kwargs=added).sample
    expected.pow(2).mean().backward()
    gradients = {name: p.grad for name, p in unet.named_parameters()}
    unet.zero_grad()

    layers = needed_layers(graph.layers, ["prediction"], given)
    prediction = run_layers(layers, graph.components, given, targets=["prediction"])["prediction"]
    prediction.pow(2).mean().backward()

    assert torch.equal(prediction, expected)
    ours = {name: p.grad for name, p in unet.named_parameters()}
    assert not [name for name in gradients if not torch.equal(gradients[name], ours[name])]
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())


@pytest.mark.parametrize("eos", [2, VOCABULARY - 3], ids=["an old file's end", "the stored end"])
def test_text_layers_give_bit_for_bit_penultimate_states_and_pooled_embedding(eos):
    graph = tiny_sdxl(text_encoders={"num_hidden_layers": 3, "eos_token_id": eos})
    inputs = raw_inputs(graph, 3)
    inputs["input_ids_2"][:2, 3] = eos
    inputs["input_ids_2"][:2, 5] = eos
    targets = ["text_states", "pooled_text"]
    found = run_layers(needed_layers(graph.layers, targets, inputs), graph.components, inputs, targets=targets)
    first = graph.components["text_encoder"](inputs["input_ids"], output_hidden_states=True)
    second = graph.components["text_encoder_2"](inputs["input_ids_2"], output_hidden_states=True)
    assert torch.equal(found["text_states"], torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1))
    assert torch.equal(found["pooled_text"], second.text_embeds)


def test_exactly_encoders_and_noise_are_frozen():
    graph = tiny_sdxl()
    expected = [x.name for x in graph.layers if x.component not in ("unet", "objective") or x.name == "objective.noise"]
    assert list(described(graph).frozen_layers) == expected


def test_what_no_one_reads_of_the_first_text_encoder_is_left_out():
    names = {p.name for p in described(tiny_sdxl()).parameters}
    assert "text_encoder.encoder.layers.0.mlp.fc1.weight" in names
    assert not any(name.startswith(("text_encoder.encoder.layers.1.", "text_encoder.final")) for name in names)


def test_every_transformer_block_of_a_deep_attention_is_a_layer():
    names = [layer.name for layer in described(tiny_sdxl()).layers]
    assert [name for name in names if name.startswith("unet.mid_block")] == [
        "unet.mid_block.resnets.0",
        *(f"unet.mid_block.attentions.0.transformer_blocks.{k}" for k in range(3)),
        "unet.mid_block.resnets.1",
    ]
    assert not any(name.startswith("unet.down_blocks.0.attentions") for name in names)


def test_no_parameter_belongs_to_two_layers():
    names = [p for layer in described(tiny_sdxl()).layers for p in layer.parameters]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"addition_embed_type": None}, "addition_embed_type = None is not supported; supported: 'text_time'"),
        ({"cross_attention_dim": 8}, "cross_attention_dim 8 is not the text encoder's 16"),
        ({"projection_class_embeddings_input_dim": 15}, "projection_class_embeddings_input_dim 15 is not 16"),
    ],
)
def test_what_would_not_run_exactly_is_refused_by_name(config, named):
    with pytest.raises(ModelError) as caught:
        tiny_sdxl(unet=config)
    assert named in str(caught.value)
