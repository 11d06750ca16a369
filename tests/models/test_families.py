"""What must hold for the graph of every family."""

import pytest
import torch
from kit.tiers import quick_and_slow
from kit.tiny_models import raw_inputs, tiny_controlled, tiny_dit, tiny_flux, tiny_sd3, tiny_sdxl, tiny_stable_diffusion
from torch import nn

from diffusionpipe.models.graphs.describe import describe, dtype_name
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.models.parameters.stored import stored_weights
from diffusionpipe.models.parameters.weights import materialize

FAMILIES = {
    "Stable Diffusion": tiny_stable_diffusion,
    "DiT": tiny_dit,
    "SDXL": tiny_sdxl,
    "ControlNet": tiny_controlled,
    "Stable Diffusion 3": tiny_sd3,
    "FLUX": tiny_flux,
}
every_family = pytest.mark.parametrize("tiny", FAMILIES.values(), ids=FAMILIES)


@every_family
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    quick_and_slow(
        [(torch.float64, None), (torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, None)],
        quick=[(torch.float32, torch.bfloat16)],
    ),
)
def test_the_description_is_that_of_a_real_run(tiny, dtype, autocast):
    graph = tiny(dtype)
    model = describe(graph, autocast=autocast)
    inputs = raw_inputs(graph, 3)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        written = run_layers(graph.layers, graph.components, inputs)
    real = {name: (tuple(t.shape[1:]), dtype_name(t.dtype), t.requires_grad) for name, t in (inputs | written).items()}
    assert {t.name: (t.shape, t.dtype, t.needs_gradient) for t in model.tensors} == real
    assert written["loss"].isfinite().all()


@every_family
def test_training_never_reads_the_global_generator(tiny):
    graph = tiny()
    before = torch.get_rng_state()
    losses = [run_layers(graph.layers, graph.components, raw_inputs(graph, 2), targets=["loss"])["loss"] for _ in "ab"]
    assert torch.equal(*losses)
    assert torch.equal(torch.get_rng_state(), before)


@every_family
def test_samples_do_not_see_each_other(tiny):
    graph = tiny()
    inputs = raw_inputs(graph, 3)
    alone = {name: tensor[1:2] for name, tensor in inputs.items()}
    losses = [run_layers(graph.layers, graph.components, x, targets=["loss"])["loss"] for x in (inputs, alone)]
    assert torch.allclose(losses[0][1:2], losses[1], rtol=1e-10, atol=0)


@every_family
def test_layers_filled_each_alone_run_like_the_whole(tiny, tmp_path):
    """No layer uses a parameter or buffer that it does not name."""
    graph = tiny(torch.float32)
    inputs = raw_inputs(graph, 2)
    expected = run_layers(graph.layers, graph.components, inputs)
    sources = {}
    for name, component in graph.components.items():
        if name != "objective":
            component.save_pretrained(tmp_path / name)
            sources[name] = stored_weights(tmp_path / name)
    for layer in graph.layers:
        _to_meta(graph)
        materialize(graph, [layer.name], sources, device="cpu", dtype=torch.float32, seed=0)
        written = run_layers([layer], graph.components, inputs | expected)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in written.items()), layer.name


def _to_meta(graph):
    """Parameters on the meta device; tied ones stay tied."""
    for component in graph.components.values():
        metas = {}
        for module in component.modules():
            for name, old in list(module.named_parameters(recurse=False)):
                meta = nn.Parameter(old.detach().to("meta"), requires_grad=old.requires_grad)
                module._parameters[name] = metas.setdefault(id(old), meta)
