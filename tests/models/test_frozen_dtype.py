"""Frozen weights that are stored in bfloat16 give the bits that autocast gives from float32 ones."""

from types import SimpleNamespace

import pytest
import torch
from kit.tiny_described import CLIPS, PIPELINES
from kit.tiny_models import randomise_pipeline, raw_inputs, tiny_dit, tiny_flux, tiny_sd3, tiny_stable_diffusion
from torch import nn

from diffusionpipe.models.graphs.graph import canonical_names
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings, Prediction
from diffusionpipe.models.opening.folder import REGISTRY
from diffusionpipe.models.parameters.lora import LoraSettings, add_lora, is_adapter
from diffusionpipe.models.parameters.stored import stored_weights
from diffusionpipe.models.parameters.weights import factors, materialize


def tiny_wan(dtype):
    """Its VAE has causal convolutions, classes that pad and call torch's own forward."""
    kind = "WanPipeline"
    pipeline = PIPELINES[kind]()
    randomise_pipeline(pipeline)
    components = {name: getattr(pipeline, name).to(dtype) for name in REGISTRY[kind].components}
    objective = Objective(ObjectiveSettings(prediction=Prediction.FLOW_MATCHING), {})
    return REGISTRY[kind].graph(components, objective=objective, dtype="float32", resolution=16, clip=CLIPS[kind])


WITH_ADAPTERS = {
    "Stable Diffusion": (tiny_stable_diffusion, "unet"),
    "Stable Diffusion 3": (tiny_sd3, "transformer"),
    "FLUX": (tiny_flux, "transformer"),
    "Wan": (tiny_wan, "transformer"),
}


def _with_adapters(tiny, trained):
    graph = tiny(torch.float32)
    add_lora(graph.components, trained, LoraSettings(rank=2))
    materialize(graph, [layer.name for layer in graph.layers], {}, device="cpu", dtype=torch.float32, seed=0)
    with torch.no_grad():
        for name, parameter in graph.components[trained].named_parameters():
            if is_adapter(name):
                parameter.fill_(0.1)
    return graph


def _step(graph):
    """The losses and the gradients of one step under autocast."""
    for parameter in canonical_names(graph.components):
        parameter.grad = None
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        losses = run_layers(graph.layers, graph.components, raw_inputs(graph, 2), targets=["loss"])["loss"]
    losses.sum().backward()
    return losses.detach(), {n: p.grad for p, n in canonical_names(graph.components).items() if p.grad is not None}


def _assert_nothing_changes(graph):
    losses, gradients = _step(graph)
    names = factors(graph, is_trained=False)
    for parameter, name in canonical_names(graph.components).items():
        if name in names:
            parameter.data = parameter.data.bfloat16()
    narrow_losses, narrow_gradients = _step(graph)
    assert torch.equal(narrow_losses, losses)
    assert gradients
    assert narrow_gradients.keys() == gradients.keys()
    assert all(torch.equal(narrow_gradients[name], gradient) for name, gradient in gradients.items())
    wide = {n: p for p, n in canonical_names(graph.components).items() if p.ndim > 1 and p.dtype is torch.float32}
    frozen = [name for name, parameter in wide.items() if not parameter.requires_grad]
    norms_and_tables = ("embedding", "shared", "relative_attention", "norm", "scale_shift_table")
    assert [name for name in frozen if not any(part in name for part in norms_and_tables)] == []


@pytest.mark.parametrize(("tiny", "trained"), WITH_ADAPTERS.values(), ids=WITH_ADAPTERS)
def test_beside_adapters_narrow_weights_change_no_bit(tiny, trained):
    graph = _with_adapters(tiny, trained)
    assert any(name.startswith(f"{trained}.") for name in factors(graph, is_trained=False))
    _assert_nothing_changes(graph)


def test_beside_a_whole_component_narrow_weights_change_no_bit():
    graph = tiny_dit(torch.float32)
    trained = {name for p, name in canonical_names(graph.components).items() if p.requires_grad}
    assert not trained & factors(graph, is_trained=False)
    _assert_nothing_changes(graph)


class Padded(nn.Conv2d):
    """Leaves its weight to torch."""

    def forward(self, x):
        return super().forward(nn.functional.pad(x, (1, 1, 1, 1)))


class Standardised(nn.Conv2d):
    """Reads its weight before torch does."""

    def forward(self, x):
        return super().forward(x) / self.weight.std()


class Replaced(nn.Linear):
    """Never calls torch's own forward."""

    def forward(self, x):
        return x


def test_a_weight_is_narrow_where_torch_alone_reads_it():
    kinds = {"plain": nn.Conv2d(1, 1, 3), "padded": Padded(1, 1, 3), "once more": type("Own", (Padded,), {})(1, 1, 3)}
    kinds |= {"standardised": Standardised(1, 1, 3), "replaced": Replaced(1, 1)}
    graph = SimpleNamespace(components={name: part.requires_grad_(False) for name, part in kinds.items()})
    assert {name.partition(".")[0] for name in factors(graph, is_trained=False)} == {"plain", "padded", "once more"}


def test_weights_are_read_into_the_dtype_in_which_they_are_kept(tmp_path):
    stored = tiny_sd3(torch.float32).components["transformer"]
    stored.save_pretrained(tmp_path)
    graph = tiny_sd3(torch.float32)
    graph.components["transformer"].to("meta")
    add_lora(graph.components, "transformer", LoraSettings(rank=2))
    layers = [layer.name for layer in graph.layers if layer.component == "transformer"]
    materialize(
        graph,
        layers,
        {"transformer": stored_weights(tmp_path)},
        device="cpu",
        dtype=torch.float32,
        seed=0,
        frozen_dtype=torch.bfloat16,
    )
    expected = dict(stored.named_parameters())
    names = factors(graph, is_trained=False)
    for name, parameter in graph.components["transformer"].named_parameters():
        is_narrow = f"transformer.{name}" in names
        assert parameter.dtype is (torch.bfloat16 if is_narrow else torch.float32), name
        if not is_adapter(name):
            assert torch.equal(parameter, expected[name.replace(".base_layer", "")].to(parameter.dtype)), name
