import pytest
import torch
from kit.descriptions import described
from kit.tiny_models import (
    randomise_parameters,
    raw_inputs,
    tiny_stable_diffusion,
    tiny_text_encoder,
    tiny_unet,
    tiny_vae,
)

from diffusionpipe.errors import ModelError
from diffusionpipe.models.families.stable_diffusion import stable_diffusion_graph
from diffusionpipe.models.graphs.run import needed_layers, run_layers
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings, Prediction

ATTENTION = {
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
}
PLAIN = {"down_block_types": ("DownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "UpBlock2D")}
THREE = {
    "block_out_channels": (8, 8, 16),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"),
}
UNETS = {
    "two levels": ({}, 8),
    "attention everywhere, two layers a block": ({**ATTENTION, "layers_per_block": 2}, 8),
    "no attention but in the middle": (PLAIN, 8),
    "three levels, unequal blocks": ({**THREE, "layers_per_block": (1, 2, 1)}, 16),
    "sizes that do not halve": (THREE, 10),
    "one-sided padding, sizes that do not halve": ({**THREE, "downsample_padding": 0}, 20),
    "scale and shift, linear projections": (
        {"resnet_time_scale_shift": "scale_shift", "use_linear_projection": True, "transformer_layers_per_block": 2},
        8,
    ),
}


def _denoiser_inputs(graph, batch=3):
    inputs = raw_inputs(graph, batch)
    layers = needed_layers(graph.layers, ["noisy", "timesteps", "text_states"], inputs)
    return run_layers(layers, graph.components, inputs, targets=["noisy", "timesteps", "text_states"])


@pytest.mark.parametrize(("config", "resolution"), UNETS.values(), ids=UNETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_unet_layers_give_bit_for_bit_output_and_gradients_of_the_unet(config, resolution, dtype):
    graph = tiny_stable_diffusion(dtype, unet=config, resolution=resolution)
    unet = graph.components["unet"]
    given = _denoiser_inputs(graph)
    given["text_states"].requires_grad_()

    expected = unet(given["noisy"], given["timesteps"], given["text_states"]).sample
    expected.pow(2).mean().backward()
    gradients = {name: p.grad for name, p in unet.named_parameters()} | {"text": given["text_states"].grad}
    unet.zero_grad()
    given["text_states"].grad = None

    layers = needed_layers(graph.layers, ["prediction"], given)
    prediction = run_layers(layers, graph.components, given, targets=["prediction"])["prediction"]
    prediction.pow(2).mean().backward()

    assert torch.equal(prediction, expected)
    ours = {name: p.grad for name, p in unet.named_parameters()} | {"text": given["text_states"].grad}
    different = [name for name in gradients if not torch.equal(gradients[name], ours[name])]
    assert not different
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())


def test_flow_timesteps_run_through_the_unet_as_floats():
    graph = tiny_stable_diffusion(objective=ObjectiveSettings(prediction=Prediction.FLOW_MATCHING))
    given = _denoiser_inputs(graph)
    layers = needed_layers(graph.layers, ["prediction"], given)
    prediction = run_layers(layers, graph.components, given, targets=["prediction"])["prediction"]
    expected = graph.components["unet"](given["noisy"], given["timesteps"], given["text_states"]).sample
    assert given["timesteps"].dtype == torch.float32
    assert torch.equal(prediction, expected)


@pytest.mark.parametrize("config", [{}, {"hidden_act": "gelu", "num_attention_heads": 1, "num_hidden_layers": 3}])
def test_text_layers_give_bit_for_bit_the_last_hidden_state(config):
    graph = tiny_stable_diffusion()
    text_encoder = tiny_text_encoder(**config).double().eval()
    randomise_parameters(text_encoder)
    graph = stable_diffusion_graph(
        {**graph.components, "text_encoder": text_encoder}, objective=graph.components["objective"], resolution=8
    )
    inputs = raw_inputs(graph, 3)
    layers = needed_layers(graph.layers, ["text_states"], inputs)
    states = run_layers(layers, graph.components, inputs, targets=["text_states"])["text_states"]
    assert torch.equal(states, text_encoder(inputs["input_ids"]).last_hidden_state)


VAES = {
    "two levels": {},
    "three levels, two layers a block": {
        "block_out_channels": (4, 4, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "layers_per_block": 2,
    },
    "no attention, no quant_conv": {"mid_block_add_attention": False, "use_quant_conv": False},
    "shifted latents": {"shift_factor": 0.25},
}


@pytest.mark.parametrize("config", VAES.values(), ids=VAES)
def test_vae_layers_give_bit_for_bit_the_scaled_posterior_sample(config):
    vae = tiny_vae(**config).double()
    randomise_parameters(vae)
    graph = tiny_stable_diffusion()
    graph = stable_diffusion_graph(
        {**graph.components, "vae": vae},
        objective=graph.components["objective"],
        resolution=16,
        dtype="float64",
    )
    inputs = raw_inputs(graph, 3)
    layers = needed_layers(graph.layers, ["latents"], inputs)
    latents = run_layers(layers, graph.components, inputs, targets=["latents"])["latents"]
    posterior = vae.encode(inputs["pixels"]).latent_dist
    sample = posterior.mean + posterior.std * inputs["posterior_noise"]
    assert torch.equal(latents, (sample - (config.get("shift_factor") or 0)) * vae.config.scaling_factor)


def test_exactly_encoders_and_noise_are_frozen():
    graph = tiny_stable_diffusion()
    frozen = described(graph).frozen_layers
    expected = [
        layer.name
        for layer in graph.layers
        if layer.component in ("text_encoder", "vae") or layer.name == "objective.noise"
    ]
    assert list(frozen) == expected


def test_a_trained_text_encoder_is_part_of_the_backbone():
    model = described(tiny_stable_diffusion(train=("unet", "text_encoder")))
    assert "text_encoder.embeddings" in model.backbone_layers
    assert "vae.encoder.conv_in" in model.frozen_layers
    assert model.tensor("text_states").needs_gradient


def test_skip_tensors_go_straight_from_writer_to_reader():
    model = described(tiny_stable_diffusion())
    readers = {name: [layer.name for layer in model.layers if name in layer.reads] for name in ("unet.conv_in", "temb")}
    assert readers["unet.conv_in"] == ["unet.down_blocks.0.resnets.0", "unet.up_blocks.1.resnets.1"]
    assert len(readers["temb"]) == sum("resnets" in layer.name and layer.component == "unet" for layer in model.layers)


def test_frozen_components_are_in_evaluation_mode_and_the_unet_is_not():
    components = tiny_stable_diffusion().components
    assert [components[name].training for name in ("text_encoder", "vae", "unet")] == [False, False, True]
    assert not any(p.requires_grad for name in ("text_encoder", "vae") for p in components[name].parameters())


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"dropout": 0.1}, "dropout = 0.1"),
        ({"class_embed_type": "timestep"}, "class_embed_type = 'timestep'"),
        ({"time_cond_proj_dim": 8}, "time_cond_proj_dim = 8"),
        ({"encoder_hid_dim": 8, "encoder_hid_dim_type": "text_proj"}, "encoder_hid_dim_type = 'text_proj'"),
        ({"mid_block_type": None}, "mid_block_type = None"),
        ({"down_block_types": ("AttnDownBlock2D", "DownBlock2D")}, "AttnDownBlock2D in down_block_types"),
        ({"in_channels": 10}, "in_channels and out_channels (10, 4)"),
        ({"cross_attention_dim": 12}, "cross_attention_dim 12 is not the text encoder's 8"),
    ],
)
def test_what_would_not_run_exactly_is_refused_by_name(config, named):
    with pytest.raises(ModelError, match="unet") as caught:
        tiny_stable_diffusion(unet=config)
    assert named in str(caught.value)


def test_all_problems_are_told_at_once():
    components = {"text_encoder": tiny_text_encoder(), "vae": tiny_vae(latents_mean=[0.0] * 4)}
    components["unet"] = tiny_unet(dropout=0.5, class_embed_type="timestep")
    with pytest.raises(ModelError) as caught:
        stable_diffusion_graph(components, objective=Objective(ObjectiveSettings(), {}), resolution=8)
    assert all(word in str(caught.value) for word in ("latents_mean", "dropout", "class_embed_type"))


@pytest.mark.parametrize("resolution", [0, 7])
def test_a_resolution_that_the_vae_cannot_halve_is_refused(resolution):
    with pytest.raises(
        ModelError, match=f"resolution {resolution} is not a multiple of 2; use e.g. {max(2, resolution // 2 * 2)}"
    ):
        tiny_stable_diffusion(resolution=resolution)


@pytest.mark.parametrize("train", [(), ("vae",), ("unte",)])
def test_only_denoiser_and_text_encoder_can_be_trained(train):
    with pytest.raises(ModelError, match="choose from unet, text_encoder"):
        tiny_stable_diffusion(train=train)
