from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kit.tiny_models import raw_inputs, tiny_dit, tiny_stable_diffusion
from torch import Tensor, nn

from diffusionpipe.costs import Backbone, TensorSpec
from diffusionpipe.errors import ConfigError, ModelError
from diffusionpipe.models.cut.sequential import sequential_graph
from diffusionpipe.models.graphs.describe import describe, dtype_name
from diffusionpipe.models.graphs.graph import Layer, LayerGraph
from diffusionpipe.models.graphs.run import run_layers

MODELS = {
    "stable diffusion": tiny_stable_diffusion,
    "stable diffusion with its text encoder": lambda dtype: tiny_stable_diffusion(
        dtype, train=("unet", "text_encoder")
    ),
    "dit": tiny_dit,
}


@pytest.mark.parametrize("tiny", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float64, None), (torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, None)],
    ids=str,
)
def test_shapes_dtypes_and_gradients_are_those_of_a_real_run(tiny, dtype, autocast):
    graph = tiny(dtype)
    model = describe(graph, autocast=autocast)
    inputs = raw_inputs(graph, 3)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        written = run_layers(graph.layers, graph.components, inputs)
    real = {name: (tuple(t.shape[1:]), dtype_name(t.dtype), t.requires_grad) for name, t in (inputs | written).items()}
    assert {t.name: (t.shape, t.dtype, t.needs_gradient) for t in model.tensors} == real


@pytest.mark.parametrize("tiny", MODELS.values(), ids=MODELS)
def test_weights_are_neither_needed_nor_changed(tiny):
    graph = tiny(torch.float32)
    before = {id(p): p.clone() for c in graph.components.values() for p in c.parameters()}
    with_weights = describe(graph)
    after = {id(p): p for c in graph.components.values() for p in c.parameters()}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    for component in graph.components.values():
        for name, parameter in list(component.named_parameters()):
            owner = component.get_submodule(name.rpartition(".")[0])
            meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            setattr(owner, name.rpartition(".")[2], meta)
    assert describe(graph) == with_weights


def test_parameters_have_canonical_names_and_trainability():
    model = describe(tiny_stable_diffusion())
    trainable = {p.name: p.is_trainable for p in model.parameters}
    assert trainable["unet.conv_in.weight"]
    assert not trainable["vae.encoder.conv_in.weight"]
    assert not any(name.startswith("vae.decoder") for name in trainable)


def test_a_tied_parameter_has_one_name_in_both_layers():
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    model = describe(_sequential(nn.Sequential(first, nn.Tanh(), last)))
    assert model.layers[0].parameters == ("model.0.weight", "model.0.bias")
    assert model.layers[2].parameters == ("model.0.weight", "model.2.bias")
    assert [p.name for p in model.parameters] == ["model.0.weight", "model.0.bias", "model.2.bias"]


def test_flops_are_those_of_one_sample():
    model = describe(_sequential(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))), batch=5)
    assert [layer.flops for layer in model.layers[:3]] == [2 * 4 * 6, 0, 2 * 6 * 4]


def test_attention_is_among_the_flops():
    def attend(x):
        return torch.nn.functional.scaled_dot_product_attention(*[x.view(-1, 2, 5, 3)] * 3).flatten(1).sum(1)

    graph = LayerGraph(
        layers=(_layer("a", attend),),
        components={"model": nn.Identity()},
        inputs=(TensorSpec(name="x", shape=(30,)),),
        backbones=(Backbone(prediction=None),),
    )
    assert describe(graph).layers[0].flops == 2 * (2 * 2 * 5 * 5 * 3)


def test_a_model_too_large_for_this_machine_is_described():
    with torch.device("meta"):
        module = nn.Sequential(*[nn.Linear(1 << 20, 1 << 20, bias=False) for _ in range(3)])
    model = describe(_sequential(module, width=1 << 20))
    assert sum(p.num_bytes for p in model.parameters) == 3 * 2**42


def _sequential(module: nn.Sequential, width: int = 4) -> LayerGraph:
    return sequential_graph(module, inputs=(width,), target=(width,), loss=lambda p, t: ((p - t) ** 2).mean(1))


def _graph(*layers: Layer, output: str = "loss", module: nn.Module | None = None) -> LayerGraph:
    return LayerGraph(
        layers=layers,
        components={"model": module or nn.Identity()},
        inputs=(TensorSpec(name="x", shape=(3,)),),
        backbones=(Backbone(loss=output, prediction=None),),
    )


def _layer(name: str, run: Callable[..., Tensor], reads: str = "x", writes: str = "loss", **fields: object) -> Layer:
    return Layer(
        name=name,
        component=str(fields.get("component", "model")),
        reads=(reads,),
        writes=(writes,),
        modules=tuple(fields.get("modules", ())),
        run=lambda _, *tensors: (run(*tensors),),
    )


LOSS = _layer("loss", lambda x: x.sum(1))
WRONG = {
    "reads y, which nothing before it writes": _graph(_layer("a", torch.relu, reads="y", writes="z"), LOSS),
    "two layers have the name loss": _graph(LOSS, replace(LOSS, writes=("other",))),
    "b writes loss, which loss wrote before": _graph(LOSS, replace(LOSS, name="b")),
    "a writes x, which the raw inputs wrote before": _graph(_layer("a", torch.relu, writes="x"), LOSS),
    "no layer writes losses": _graph(LOSS, output="losses"),
    "component encoder, which the graph does not have": _graph(
        _layer("a", torch.relu, writes="y", component="encoder"), LOSS
    ),
    "names model.0, which does not exist": _graph(replace(LOSS, modules=("0",))),
    "weight is trainable, but no layer uses it": _graph(LOSS, module=nn.Linear(3, 3)),
    "dimension 0 of loss is not the batch": _graph(_layer("a", lambda x: x.sum(0))),
    "dimension 0 of y is not the batch: (6,) for 2": _graph(_layer("a", torch.flatten, writes="y"), LOSS),
    "must hold one loss a sample": _graph(_layer("a", torch.relu)),
    "changes in place what it reads: x": _graph(_layer("a", lambda x: x.mul_(2).sum(1))),
    "loss cannot run on x (2, 3)": _graph(_layer("loss", lambda x: x @ x)),
    "returned 1 tensors, but it writes 2 (": _graph(replace(LOSS, writes=("loss", "more"))),
    "dtype complex64": _graph(_layer("a", lambda x: x.to(torch.complex64), writes="y"), LOSS),
}


@pytest.mark.parametrize(("message", "graph"), WRONG.items(), ids=WRONG)
def test_a_graph_that_is_no_model_is_refused(message, graph):
    with pytest.raises(ModelError) as caught:
        describe(graph)
    assert message in str(caught.value)


def test_all_problems_of_names_are_told_at_once():
    with pytest.raises(ModelError) as caught:
        describe(_graph(_layer("a", torch.relu, reads="y", writes="z"), output="losses", module=nn.Linear(3, 3)))
    assert len(str(caught.value).splitlines()) == 5


def test_modules_are_whole_again_after_an_error():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4))
    before = list(module.parameters())
    with pytest.raises(ModelError, match=r"model\.1 cannot run"):
        describe(_sequential(module))
    assert all(a is b for a, b in zip(module.parameters(), before, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_here_is_refused():
    with pytest.raises(ConfigError, match="a machine with cuda"):
        describe(tiny_dit(), device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tiny", MODELS.values(), ids=MODELS)
def test_dtypes_under_autocast_on_a_gpu_are_those_of_a_real_run(tiny):
    graph = tiny(torch.float32)
    model = describe(graph, autocast=torch.bfloat16, device="cuda")
    for component in graph.components.values():
        component.cuda()
    inputs = {name: tensor.cuda() for name, tensor in raw_inputs(graph, 3).items()}
    with torch.autocast("cuda", dtype=torch.bfloat16):
        written = run_layers(graph.layers, graph.components, inputs)
    assert {t.name: t.dtype for t in model.tensors} == {n: dtype_name(t.dtype) for n, t in (inputs | written).items()}
