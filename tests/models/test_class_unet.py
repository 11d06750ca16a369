"""Class-conditional U-Nets in layers: diffusers' UNet2DModel, forward and gradients."""

import pytest
import torch
from kit.layouts import CPU, assert_same_step, merge, reference_step, run_step
from kit.tiny_class_unet import NUM_CLASSES, tiny_class_unet
from kit.tiny_models import randomise_parameters

from diffusionpipe.errors import ModelError
from diffusionpipe.models.base.family import LowResolution
from diffusionpipe.models.families.class_unet import class_unet_graph
from diffusionpipe.models.families.deepfloyd import noise_levels
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.models.graphs.graph import layer_parameters
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.engine.worker import build_worker
from diffusionpipe.trainer.inference.conditions import null_label

LOW = LowResolution(resolution=8, augmentation=0.3)
BATCH = 2


def graph_of(*, is_super=False, resolution=None, low=LOW, **unet):
    model = tiny_class_unet(is_super=is_super, **unet).double()
    randomise_parameters(model, 0)
    return class_unet_graph(
        {"unet": model, "scheduler": noise_levels({})},
        objective=Objective(ObjectiveSettings(), {}),
        resolution=resolution or (16 if is_super else 8),
        dtype="float64",
        low=low if is_super else None,
    )


def inputs_of(graph):
    torch.manual_seed(0)
    inputs = {spec.name: torch.rand(BATCH, *spec.shape, dtype=torch.float64) for spec in graph.inputs}
    return inputs | {"labels": torch.tensor([3, NUM_CLASSES])}


@pytest.mark.parametrize("is_super", [False, True], ids=["base", "super-resolution"])
def test_layers_are_diffusers_unet_forward_and_gradients(is_super):
    graph = graph_of(is_super=is_super)
    inputs = inputs_of(graph)
    tensors = run_layers(graph.layers, graph.components, inputs)
    read = torch.cat([tensors[name] for name in ("noisy", "upsampled") if name in tensors], dim=1)
    unet = graph.components["unet"]
    expected = unet(read, tensors["timesteps"], class_labels=inputs["labels"]).sample
    torch.testing.assert_close(tensors["prediction"], expected, rtol=1e-12, atol=1e-12)
    found = layer_parameters(graph, [layer.name for layer in graph.layers])
    parameters = {name: parameter for name, parameter in found.items() if parameter.requires_grad}
    assert len(parameters) == len(list(unet.parameters()))
    weight = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).reshape(expected.shape)
    ours = torch.autograd.grad((tensors["prediction"] * weight).sum(), list(parameters.values()))
    theirs = torch.autograd.grad((expected * weight).sum(), list(parameters.values()))
    for own, other, name in zip(ours, theirs, parameters, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_over_ranks_has_the_loss_and_gradients_of_one_process(stages):
    graphs = [graph_of(is_super=True) for _ in range(stages)]  # equal weights; what is traced cannot be copied
    inputs, model = inputs_of(graphs[0]), describe(graphs[0])
    layout = Layout(batch=BATCH, stages=stages, microbatches=2, schedule="1f1b", encode_chunk=1)
    plan = build_plan(model, layout)

    def main(rank, transport):
        return run_step(build_worker(graphs[rank], model, plan, rank, transport, device=CPU), inputs)

    found = merge(run_threads(stages, main))
    assert_same_step(found, reference_step(graph_of(is_super=True), inputs))


def test_nothing_of_the_unet_is_frozen_and_its_blocks_are_layers_of_their_own():
    graph = graph_of(is_super=True)
    assert set(describe(graph).frozen_layers) == {"scheduler.upsampled", "objective.noise"}
    names = {layer.name for layer in graph.layers}
    assert {"unet.down_blocks.1.attentions.0", "unet.mid_block.resnets.1", "unet.up_blocks.0.resnets.1"} <= names


def test_the_last_row_of_the_class_embedding_stands_for_no_class():
    assert null_label(graph_of()) == NUM_CLASSES


REFUSED = {
    "unet: num_class_embeds is None": {"num_class_embeds": None},
    "unet: in_channels is 4; with out_channels 3 it must be 3": {"in_channels": 4},
    "low_resolution: 16 is not below": {"is_super": True, "low": LowResolution(resolution=16, augmentation=0.5)},
    "unet: time_embedding_type = 'fourier' is not supported": {"time_embedding_type": "fourier"},
}


@pytest.mark.parametrize(("says", "options"), REFUSED.items(), ids=list(REFUSED))
def test_configurations_that_would_not_run_exactly_are_refused(says, options):
    with pytest.raises(ModelError) as caught:
        graph_of(**options)
    assert says in str(caught.value)
