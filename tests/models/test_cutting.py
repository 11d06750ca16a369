"""Transformers of diffusers, cut by one adapter, give over two stages what they give whole."""

import diffusers
import pytest
import torch
from kit.cut_cases import CASES, REFUSED, Case, inputs_of
from kit.tiers import quick_and_slow
from kit.tiny_models import randomise_parameters
from torch import nn

from diffusionpipe.errors import ModelError
from diffusionpipe.models.cut.cutting import cut
from diffusionpipe.models.graphs.run import run_layers

QUICK = ["Flux2Transformer2DModel", "WanTransformer3DModel"]
LAYOUT_OF_MEMORY_DIFFERS = {"AceStepTransformer1DModel", "Flux3Transformer2DModel", "LongCatAudioDiTTransformer"}
"""Their blocks get transposed or expanded tensors. Between layers tensors are contiguous, and the kernels of some
processors then round otherwise."""


def _model(name, case: Case):
    model = getattr(diffusers, name)(**case.config).train()
    randomise_parameters(model)

    def forward(transformer, **tensors):
        output = transformer(**tensors, **case.fixed, return_dict=False)[0]
        return torch.stack(output) if isinstance(output, list) else output

    return model, forward


def _over_two_stages(layers, model, inputs):
    """The prediction and, in the model, the gradients of its squares; tensors between the halves are leaves."""
    half = len(layers) // 2
    first = run_layers(layers[:half], {"transformer": model}, inputs)
    crossing = {name for layer in layers[half:] for name in layer.reads if name in first}
    leaves = {name: first[name].detach().requires_grad_() for name in crossing}
    output = run_layers(layers[half:], {"transformer": model}, inputs | leaves, targets=["prediction"])["prediction"]
    output.pow(2).mean().backward()
    torch.autograd.backward([first[name] for name in crossing], [leaves[name].grad for name in crossing])
    return output


def _taken_gradients(model: nn.Module):
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return gradients


@pytest.mark.parametrize("name", quick_and_slow(list(CASES), quick=QUICK))
def test_output_and_every_gradient_over_two_stages_are_those_of_the_class(name):
    case = CASES[name]
    model, forward = _model(name, case)
    inputs = inputs_of(case, 2)
    expected = forward(model, **inputs)
    expected.pow(2).mean().backward()
    gradients = _taken_gradients(model)

    layers = cut(model, forward, inputs)
    found = _over_two_stages(layers, model, inputs)

    tolerance = {"rtol": 1e-4, "atol": 1e-6} if name in LAYOUT_OF_MEMORY_DIFFERS else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(found, expected, **tolerance)
    is_trained = {parameter: weight.requires_grad for parameter, weight in model.named_parameters()}
    ours = _taken_gradients(model)
    for parameter, gradient in gradients.items():
        assert (gradient is None) == (ours[parameter] is None) == (not is_trained[parameter]), parameter
        if gradient is not None:
            torch.testing.assert_close(ours[parameter], gradient, **tolerance, msg=parameter)
    randomise_parameters(model, 1)  # as an optimizer step does: in place
    with torch.no_grad():
        found = run_layers(layers, {"transformer": model}, inputs, targets=["prediction"])["prediction"]
        torch.testing.assert_close(found, forward(model, **inputs), **tolerance)


@pytest.mark.parametrize("name", quick_and_slow(list(REFUSED), quick=["Lumina2Transformer2DModel"]))
def test_a_class_that_cannot_be_cut_is_refused_with_its_reason(name):
    case = REFUSED[name]
    model, forward = _model(name, case)
    with pytest.raises(ModelError, match=name if name != "DiTTransformer2DModel" else "random numbers"):
        cut(model, forward, inputs_of(case, 2))


def test_layers_are_the_same_for_every_batch_size():
    name = "QwenImageTransformer2DModel"
    model, forward = _model(name, CASES[name])
    layers = cut(model, forward, inputs_of(CASES[name], 2))
    for batch in (1, 5):
        inputs = inputs_of(CASES[name], batch)
        found = run_layers(layers, {"transformer": model}, inputs, targets=["prediction"])["prediction"]
        assert torch.equal(found, forward(model, **inputs))


def test_cutting_leaves_the_model_as_it_was():
    name = "QwenImageTransformer2DModel"
    model, forward = _model(name, CASES[name])
    inputs = inputs_of(CASES[name], 2)
    before, attributes = forward(model, **inputs), [set(vars(module)) for module in model.modules()]
    cut(model, forward, inputs)
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert torch.equal(forward(model, **inputs), before)
