import pytest
import torch
from kit.descriptions import described
from kit.tiny_models import raw_inputs, tiny_controlled

from diffusionpipe.errors import ModelError
from diffusionpipe.models.graphs.run import needed_layers, run_layers

ATTENTION = {"down_block_types": ("CrossAttnDownBlock2D",) * 2}
BOTH = {
    "two levels": ({}, 8),
    "two layers a block": ({"layers_per_block": 2}, 8),
    "attention everywhere, two transformer blocks": (
        {**ATTENTION, "transformer_layers_per_block": 2},
        8,
    ),
    "sizes that do not halve": ({}, 10),
}
READ = ("noisy", "timesteps", "text_states")


def _given(graph, batch=3):
    inputs = raw_inputs(graph, batch)
    layers = needed_layers(graph.layers, READ, inputs)
    return {"condition": inputs["condition"], **run_layers(layers, graph.components, inputs, targets=READ)}


@pytest.mark.parametrize(("config", "resolution"), BOTH.values(), ids=BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_layers_give_bit_for_bit_output_and_gradients_of_unet_and_controlnet(config, resolution, dtype):
    unet_config = {**config, "up_block_types": ("CrossAttnUpBlock2D",) * 2} if "down_block_types" in config else config
    graph = tiny_controlled(dtype, unet=unet_config, controlnet=config, resolution=resolution)
    unet, controlnet = graph.components["unet"], graph.components["controlnet"]
    given = _given(graph)
    noisy, timesteps, text = (given[name] for name in READ)

    down, middle = controlnet(noisy, timesteps, text, given["condition"], return_dict=False)
    expected = unet(
        noisy, timesteps, text, down_block_additional_residuals=down, mid_block_additional_residual=middle
    ).sample
    expected.pow(2).mean().backward()
    gradients = {name: p.grad for name, p in controlnet.named_parameters()}
    controlnet.zero_grad()

    layers = needed_layers(graph.layers, ["prediction"], given)
    prediction = run_layers(layers, graph.components, given, targets=["prediction"])["prediction"]
    prediction.pow(2).mean().backward()

    assert torch.equal(prediction, expected)
    ours = {name: p.grad for name, p in controlnet.named_parameters()}
    assert not [name for name in gradients if not torch.equal(gradients[name], ours[name])]
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    assert all(p.grad is None for p in unet.parameters())


def test_exactly_encoders_noise_and_the_locked_way_to_the_middle_are_frozen():
    graph = tiny_controlled()
    locked = ("unet.time", "unet.conv_in", "unet.down_blocks", "unet.mid_block")
    expected = [
        layer.name
        for layer in graph.layers
        if layer.component in ("text_encoder", "vae")
        or layer.name == "objective.noise"
        or layer.name.startswith(locked)
    ]
    assert list(described(graph).frozen_layers) == expected


def test_the_locked_way_up_has_gradients_but_nothing_to_train():
    model = described(tiny_controlled())
    trainable = {p.name for p in model.parameters if p.is_trainable}
    up = [layer for layer in model.layers if layer.name.startswith(("unet.up_blocks", "unet.conv_out"))]
    assert not trainable.intersection(name for layer in up for name in layer.parameters)
    assert set(model.backbone_layers) >= {layer.name for layer in up}
    assert all(model.tensor(layer.writes[0]).needs_gradient for layer in up)
    assert {name.partition(".")[0] for name in trainable} == {"controlnet"}


def test_skip_tensors_and_their_copies_go_straight_to_where_they_are_added():
    model = described(tiny_controlled())
    readers = {spec.name: [layer.name for layer in model.layers if spec.name in layer.reads] for spec in model.tensors}
    names = [layer.name for layer in model.layers]
    zeros = [name for name in names if name.startswith("controlnet.controlnet_")]
    assert zeros == [
        "controlnet.controlnet_mid_block",
        *(f"controlnet.controlnet_down_blocks.{i}" for i in (3, 2, 1, 0)),
    ]
    for zero in zeros:
        (reader,) = readers[zero]
        assert reader.startswith("unet.up_blocks")
        assert names.index(reader) - names.index(zero) <= 2
    assert readers["unet.conv_in"] == ["unet.down_blocks.0.resnets.0", "unet.up_blocks.1.resnets.1"]
    assert readers["controlnet.conv_in"] == [
        "controlnet.down_blocks.0.resnets.0",
        "controlnet.controlnet_down_blocks.0",
    ]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"controlnet_conditioning_channel_order": "bgr"}, "controlnet_conditioning_channel_order = 'bgr'"),
        ({"block_out_channels": (8, 8)}, "block_out_channels (8, 8) is not the U-Net's (8, 16)"),
        ({"in_channels": 3}, "controlnet: in_channels and out_channels (3,)"),
        ({"down_block_types": ("AttnDownBlock2D",) * 2}, "controlnet: block type AttnDownBlock2D"),
    ],
)
def test_what_would_not_run_exactly_is_refused_by_name(config, named):
    with pytest.raises(ModelError) as caught:
        tiny_controlled(controlnet=config)
    assert named in str(caught.value)


def test_a_conditioning_embedding_that_does_not_suit_the_vae_is_refused_before_any_layer_runs():
    with pytest.raises(ModelError, match="conditioning picture 8 times smaller, the VAE makes latents 2 times smaller"):
        tiny_controlled(controlnet={"conditioning_embedding_out_channels": (4, 4, 8, 8)})
