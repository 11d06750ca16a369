import random
import weakref

import pytest
import torch
from kit.descriptions import described
from kit.tiny_models import raw_inputs, tiny_dit, tiny_stable_diffusion
from torch import nn

from diffusionpipe.models.graphs.graph import Layer, layer_parameters, parameter_names
from diffusionpipe.models.graphs.run import needed_layers, run_layers

MODELS = {"stable diffusion": tiny_stable_diffusion, "dit": tiny_dit}


def _gradients(graph):
    return {
        name: parameter.grad.clone()
        for name, parameter in layer_parameters(graph, [layer.name for layer in graph.layers]).items()
        if parameter.requires_grad
    }


def _run_cut(graph, inputs, blocks):
    """Blocks of layers that see each other's tensors as leaves, as stages on different ranks do."""
    model = described(graph)
    tensors, sent = dict(inputs), []
    for block in blocks:
        layers = [layer for layer in graph.layers if layer.name in block]
        given = {}
        for name in model.reads_of(block):
            given[name] = tensors[name].detach().requires_grad_(model.tensor(name).needs_gradient)
        written = run_layers(layers, graph.components, given)
        tensors |= written
        sent.append((given, written))
    arrived = {"loss": torch.ones_like(tensors["loss"])}
    for given, written in reversed(sent):
        outputs = [name for name in written if name in arrived]
        torch.autograd.backward([written[name] for name in outputs], [arrived[name] for name in outputs])
        for name, tensor in given.items():
            if tensor.grad is not None:
                arrived[name] = arrived[name] + tensor.grad if name in arrived else tensor.grad
    return tensors["loss"]


@pytest.mark.parametrize("tiny", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_any_cut_into_blocks_gives_the_gradients_of_the_whole(tiny, seed):
    graph = tiny()
    inputs = raw_inputs(graph, 3, seed)
    whole = run_layers(graph.layers, graph.components, inputs, targets=["loss"])["loss"]
    whole.sum().backward()
    expected = _gradients(graph)
    for component in graph.components.values():
        component.zero_grad()

    names = [layer.name for layer in graph.layers]
    cuts = sorted(random.Random(seed).sample(range(1, len(names)), 1 + 3 * seed))
    loss = _run_cut(graph, inputs, [names[a:b] for a, b in zip([0, *cuts], [*cuts, len(names)], strict=True)])

    assert torch.equal(loss, whole)
    norm = sum(gradient.square().sum() for gradient in expected.values()) ** 0.5
    gradients = _gradients(graph)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-12 * norm, name


def test_without_targets_everything_written_is_returned():
    graph = tiny_dit()
    written = run_layers(graph.layers, graph.components, raw_inputs(graph, 2))
    assert list(written) == [name for layer in graph.layers for name in layer.writes]


def test_a_tensor_is_dropped_after_its_last_reader():
    alive = []

    def run(component, x):
        alive.append(sum(ref() is not None for ref in refs))
        y = x + 1
        refs.append(weakref.ref(y))
        return (y,)

    refs = []
    layers = [Layer(name=str(i), component="", reads=(str(i),), writes=(str(i + 1),), run=run) for i in range(4)]
    result = run_layers(layers, {"": nn.Identity()}, {"0": torch.zeros(1)}, targets=["4"])
    assert list(result) == ["4"]
    assert alive == [0, 1, 1, 1]


def test_given_targets_are_returned_though_nothing_reads_them():
    graph = tiny_dit()
    inputs = raw_inputs(graph, 2)
    result = run_layers(graph.layers, graph.components, inputs, targets=["loss", "latents", "noise"])
    assert set(result) == {"loss", "latents", "noise"}


def test_only_layers_that_the_targets_need_are_needed():
    graph = tiny_stable_diffusion()
    inputs = [spec.name for spec in graph.inputs]
    assert {layer.component for layer in needed_layers(graph.layers, ["text_states"], inputs)} == {"text_encoder"}
    assert [layer.name for layer in needed_layers(graph.layers, ["target"], [*inputs, "latents"])] == [
        "objective.noise"
    ]
    assert needed_layers(graph.layers, ["loss"], inputs) == graph.layers


def test_parameters_of_layers_are_named_from_the_component_on():
    graph = tiny_dit()
    assert parameter_names(graph, ["transformer.pos_embed"]) == (
        "transformer.pos_embed.proj.weight",
        "transformer.pos_embed.proj.bias",
    )
