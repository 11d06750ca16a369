"""DeepFloyd IF in layers: diffusers' U-Net, forward and gradients; what is made of the large picture."""

import pytest
import torch
from diffusers import DDPMScheduler
from kit.descriptions import described
from kit.tiny_deepfloyd import LEVELS, tiny_if, tiny_super_resolution
from kit.tiny_models import randomise_parameters
from torch.nn.functional import interpolate

from diffusionpipe.errors import ModelError
from diffusionpipe.models.base.family import LowResolution
from diffusionpipe.models.families.deepfloyd import deepfloyd_graph, noise_levels
from diffusionpipe.models.graphs.graph import layer_parameters
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings, Prediction

LOW = LowResolution(resolution=8, augmentation=0.3)
SIDES = {"base": 8, "super": 16}
BATCH = 3


def graph_of(name, resolution=None, low=LOW, prediction=Prediction.EPSILON, **unet):
    pipeline = tiny_if(**unet) if name == "base" else tiny_super_resolution(**unet)
    components = {"text_encoder": pipeline.text_encoder.double(), "unet": pipeline.unet.double()}
    for seed, component in enumerate(components.values()):
        randomise_parameters(component, seed)
    if name == "super":
        components["image_noising_scheduler"] = noise_levels(pipeline.image_noising_scheduler.config)
    settings = ObjectiveSettings(prediction=prediction, has_learned_range=True)
    return deepfloyd_graph(
        components,
        objective=Objective(settings, pipeline.scheduler.config),
        resolution=resolution or SIDES[name],
        dtype="float64",
        low=None if name == "base" else low,
    )


def inputs_of(graph):
    generator = torch.Generator().manual_seed(0)
    found = {}
    for spec in graph.inputs:
        shape = (BATCH, *spec.shape)
        if spec.name == "input_ids":
            found[spec.name] = torch.randint(20, shape, generator=generator)
        elif spec.name == "input_mask":
            found[spec.name] = (torch.arange(spec.shape[0]) < torch.tensor([[5], [9], [1]])).long()
        elif spec.name in ("time", "augmentation_level"):
            found[spec.name] = torch.rand(shape, generator=generator)
        else:
            found[spec.name] = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
    return found


@pytest.fixture(scope="module", params=["base", "super"])
def ran(request):
    """The graph, its inputs, and all tensors that its layers write."""
    graph = graph_of(request.param)
    inputs = inputs_of(graph)
    written = run_layers(graph.layers, graph.components, inputs)
    return request.param, graph, inputs, {**inputs, **written}


def test_layers_are_diffusers_unet_forward_and_gradients(ran):
    """Up to rounding: layers write contiguous tensors, of which the next convolution makes other last bits."""
    name, graph, inputs, tensors = ran
    unet = graph.components["unet"]
    encoder = graph.components["text_encoder"]
    states = encoder(inputs["input_ids"], attention_mask=inputs["input_mask"]).last_hidden_state
    assert torch.equal(tensors["text_states"], states)
    read = [tensors["noisy"]] + ([tensors["upsampled"]] if name == "super" else [])
    expected = unet(
        torch.cat(read, dim=1),
        tensors["timesteps"],
        encoder_hidden_states=states,
        class_labels=tensors.get("noise_level"),
    ).sample
    torch.testing.assert_close(tensors["prediction"], expected, rtol=1e-12, atol=1e-12)
    names = [layer.name for layer in graph.layers]
    parameters = {n: p for n, p in layer_parameters(graph, names).items() if p.requires_grad}
    assert len(parameters) == len(list(unet.parameters()))
    weight = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).reshape(expected.shape)
    ours = torch.autograd.grad((tensors["prediction"] * weight).sum(), list(parameters.values()), retain_graph=True)
    theirs = torch.autograd.grad((expected * weight).sum(), list(parameters.values()))
    for own, other, key in zip(ours, theirs, parameters, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12, msg=key)


def test_residual_blocks_and_attentions_are_layers_of_their_own(ran):
    names = {layer.name for layer in ran[1].layers}
    assert {"unet.down_blocks.1.attentions.0", "unet.down_blocks.0.downsamplers.0", "unet.mid_block.resnets.1"} <= names
    assert not any(name.startswith("unet.") for name in described(ran[1]).frozen_layers)


def test_the_small_picture_is_made_of_the_large_one_and_noised_at_the_level_that_the_model_is_told():
    graph = graph_of("super")
    inputs = inputs_of(graph)
    (layer,) = [layer for layer in graph.layers if "upsampled" in layer.writes]
    upsampled, level = layer.run(graph.components[layer.component], *(inputs[name] for name in layer.reads))
    assert level.tolist() == [int(1000 * 0.3 * u) for u in inputs["augmentation_level"].tolist()]
    small = interpolate(inputs["pixels"], size=(8, 8), mode="bilinear", antialias=True)
    large = interpolate(small, size=(16, 16), mode="bilinear", align_corners=True)
    expected = DDPMScheduler(**LEVELS).add_noise(large, inputs["augmentation_noise"], level)
    torch.testing.assert_close(upsampled, expected, rtol=1e-6, atol=1e-6)


REFUSED = {
    "unet: out_channels is 3": {"name": "base", "out_channels": 3},
    "low_resolution: 16 is not below": {"name": "super", "low": LowResolution(resolution=16, augmentation=0.5)},
    "9 is not a multiple of 2": {"name": "base", "resolution": 9},
    "unet: class_embed_type is None; the pipeline needs 'timestep'": {"name": "super", "class_embed_type": None},
    "unet: encoder_hid_dim 24 is not T5's 20": {"name": "base", "encoder_hid_dim": 24},
}


@pytest.mark.parametrize(("says", "options"), REFUSED.items(), ids=list(REFUSED))
def test_configurations_that_do_not_fit_are_refused_with_both_numbers(says, options):
    with pytest.raises(ModelError) as caught:
        graph_of(**options)
    assert says in str(caught.value)
