"""Adapters on stored weights are trained in any layout as in one process, and stored encoders run from anywhere."""

import copy
from types import SimpleNamespace

import pytest
import torch
from kit.covering import covering
from kit.descriptions import described
from kit.layout_cases import scattered, searched
from kit.layouts import CPU, assert_same_step, reference_step, step_in_threads, steps_ahead
from kit.opened_family import Opened
from kit.tiers import quick_and_slow
from kit.tiny_models import raw_inputs, tiny_flux, tiny_sd3

from diffusionpipe.costs.forms import Form, stored_bytes
from diffusionpipe.holding import Ledger, Workload
from diffusionpipe.ir import Sharded
from diffusionpipe.models.graphs.graph import canonical_names, layer_parameters
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.models.parameters.lora import LoraSettings, adapt, is_second_matrix
from diffusionpipe.models.parameters.stored_linear import store, stored_layers
from diffusionpipe.models.parameters.weights import materialize
from diffusionpipe.ordering import Placing
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.runtime.comm.places import trained_blocks
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.compute.stage import Precision
from diffusionpipe.runtime.engine.sharder import Sharder
from diffusionpipe.runtime.weights.host_weights import HostWeights

BATCH = 8
MODELS = {"flux": tiny_flux, "sd3": tiny_sd3}
FORMS = {"int8": Form.INT8, "nf4": Form.NF4, "float8": Form.FLOAT8}
SIZES = {"batch": BATCH, "stages": 2, "microbatches": 4}
LAYOUTS = {
    "1f1b": Layout(**SIZES),
    "zb-h1": Layout(**SIZES, schedule="zb-h1"),
    "zb-v, recomputed": Layout(**SIZES, schedule="zb-v", checkpointed=("*",)),
    "two copies": Layout(**SIZES | {"microbatches": 2}, data_parallel=2),
    "sharded": Layout(**SIZES | {"microbatches": 2}, data_parallel=2, sharded=Sharded.ALL),
    "states in parts": Layout(**SIZES | {"microbatches": 2}, data_parallel=2, sharded=Sharded.OPTIMIZER),
    "encoders on the host": Layout(**SIZES, encoders="host", encode_chunk=3),
    "replicas": Layout(**SIZES, replicas=(2, 1)),
    "two directions": Layout(**SIZES, schedule="chimera"),
    "buckets": Layout(**SIZES | {"microbatches": 2}, data_parallel=2, buckets=2),
    "searched orders": Layout(**SIZES, orders=searched(Placing.LINEAR)),
}


def _with_adapters(graph, form, dtype=torch.float64, frozen_dtype=None):
    """Adapters of the transformer, whose outputs are not zero, on a stored base; encoders are stored too."""
    adapt(graph, ["transformer"], LoraSettings(rank=2, alpha=3.0))
    store(graph, lambda component: form if component != "vae" else None)
    materialize(
        graph, [layer.name for layer in graph.layers], {}, device="cpu", dtype=dtype, seed=0, frozen_dtype=frozen_dtype
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in graph.components["transformer"].named_parameters():
            if is_second_matrix(name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return graph


_PREPARED = {}


def prepared(model, form):
    if (model, form) not in _PREPARED:
        graph = _with_adapters(MODELS[model](), FORMS[form])
        inputs = raw_inputs(graph, BATCH)
        _PREPARED[model, form] = graph, described(graph), inputs, reference_step(graph, inputs)
    return _PREPARED[model, form]


QUICK = [("flux", "nf4", "zb-v, recomputed"), ("flux", "nf4", "sharded")]
BUCKETS = [("sd3", form, "buckets") for form in FORMS]  # its stages have a layer each
CASES = covering(tuple(MODELS), tuple(FORMS), tuple(LAYOUTS), first=QUICK, without=BUCKETS)


@pytest.mark.parametrize(("model", "form", "layout"), quick_and_slow(CASES, quick=QUICK))
def test_gradients_of_adapters_on_stored_weights_are_those_of_one_process(model, form, layout):
    graph, description, inputs, expected = prepared(model, form)
    assert all(gradient.abs().max() > 0 for gradient in expected.gradients.values())
    assert_same_step(step_in_threads(graph, description, LAYOUTS[layout], inputs), expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1f1b", "zb-v, recomputed"])
def test_those_of_adapters_of_text_encoders_on_stored_weights_are_too(layout):
    graph = tiny_sd3()
    adapt(graph, ["transformer", "text_encoder", "text_encoder_3"], LoraSettings(rank=2))
    store(graph, lambda component: Form.INT8 if component != "vae" else None)
    materialize(graph, [one.name for one in graph.layers], {}, device="cpu", dtype=torch.float64, seed=0)
    generator = torch.Generator().manual_seed(0)
    for parameter, name in canonical_names(graph.components).items():
        if is_second_matrix(name):
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    inputs = raw_inputs(graph, BATCH)
    expected = reference_step(graph, inputs)
    assert {name.partition(".")[0] for name in expected.gradients} == {"transformer", "text_encoder", "text_encoder_3"}
    assert_same_step(step_in_threads(graph, described(graph), LAYOUTS[layout], inputs), expected)


@pytest.mark.slow
def test_filled_with_stored_encoders_they_are_too():
    graph, description, inputs, expected = prepared("flux", "nf4")
    plan = build_plan(description, Layout(**SIZES, encode_chunk=3), filler=scattered(1))
    first, second = steps_ahead(graph, description, plan, [inputs, inputs, inputs])
    assert_same_step(first, expected)
    assert_same_step(second, expected)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_those_of_wan_are_too(monkeypatch, form, tmp_path):
    # Its norms compute in float32, where sums over other numbers of samples round otherwise.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    opened = Opened("WanPipeline", tmp_path)
    graph, inputs = _with_adapters(opened.graph, FORMS[form]), opened.batch(4)
    description, expected = described(graph), reference_step(graph, inputs)
    for schedule in ("1f1b", "zb-h1"):
        layout = Layout(batch=4, stages=2, microbatches=2, schedule=schedule)
        assert_same_step(step_in_threads(graph, description, layout, inputs), expected)


def test_layouts_with_the_same_micro_batches_have_the_same_losses_bit_for_bit():
    graph, description, inputs, _ = prepared("flux", "nf4")
    layouts = [Layout(**SIZES), Layout(**SIZES, schedule="zb-h1"), Layout(**SIZES, encoders="host")]
    losses = {step_in_threads(graph, description, layout, inputs, again=False).loss for layout in layouts}
    assert len(losses) == 1


def test_a_stored_model_computes_something_else_than_a_wide_one():
    graph, _, inputs, _ = prepared("flux", "nf4")
    plain = _with_adapters(tiny_flux(), None)
    stored = reference_step(graph, inputs).loss
    wide = reference_step(plain, inputs).loss
    assert stored != wide
    assert stored == pytest.approx(wide, rel=0.3)


@pytest.mark.parametrize("form", quick_and_slow(FORMS, quick=["nf4"]))
def test_the_description_has_the_bytes_of_the_forms(form):
    graph, description, _, _ = prepared("flux", form)
    by_hand = sum(
        stored_bytes(FORMS[form], layer.out_features, layer.in_features)
        for component in graph.components.values()
        for layer in stored_layers(component).values()
    )
    described_bytes = sum(p.num_bytes for p in description.parameters if p.name.endswith((".codes", ".scales")))
    used = {name for layer in description.layers for name in layer.parameters}
    unused = sum(p.nbytes for p, n in canonical_names(graph.components).items() if "scales" in n or "codes" in n
                 if n not in used)  # fmt: skip
    assert described_bytes == by_hand - unused > 0


@pytest.mark.parametrize("form", FORMS)
def test_sharded_copies_send_the_bytes_that_are_planned(form):
    """To the byte for a tiny SD3, whose norms have no weights: codes and scales as they are, adapters in two bytes."""
    graph = _with_adapters(tiny_sd3(torch.float32), FORMS[form], torch.float32, torch.bfloat16)
    model = described(graph, autocast=torch.bfloat16)
    plan = build_plan(model, LAYOUTS["sharded"])
    ledger, specs = Ledger(graph=model, workload=Workload(batch=BATCH)), {p.name: p for p in model.parameters}

    def main(rank, transport):
        noted = []
        sharder = Sharder(
            graph=copy.deepcopy(graph),
            model=model,
            plan=plan,
            rank=rank,
            transport=SimpleNamespace(broadcast=lambda sent, *_: noted.append(sent.nbytes)),
            precision=Precision(autocast=torch.bfloat16),
        )
        found = {}
        for block in trained_blocks(plan, rank):
            layers = layer_parameters(sharder.graph, plan.blocks[block])
            sharded = sharder.shard(block)
            sharded.prepare()
            found |= {name: sharded.copies.get(one, one).nbytes for name, one in layers.items()}
        return found, sum(noted)

    for sent, noted in run_threads(plan.mesh.num_ranks, main):
        assert sent == {name: ledger.gathered(specs[name], "bfloat16") for name in sent}
        assert {name.rpartition(".")[2] for name in sent} >= {"codes", "scales", "weight"}
        assert sum(sent.values()) <= noted <= sum(sent.values()) + 64 * len(sent)


def test_a_stored_encoder_reads_what_was_copied_to_the_device_and_nothing_else_is_copied():
    graph = _with_adapters(tiny_flux(), Form.NF4)
    frozen = [layer for layer in graph.layers if layer.component in ("text_encoder", "text_encoder_2")]
    inputs = raw_inputs(graph, 2)
    layer = next(one for one in frozen if any(name in inputs for name in one.reads))
    following = frozen[frozen.index(layer) + 1]
    tensors = run_layers([layer], graph.components, inputs)
    expected = following.run(graph.components[following.component], *(tensors[name] for name in following.reads))
    parameters = layer_parameters(graph, [following.name])
    size = sum(parameter.nbytes for parameter in parameters.values())
    codes = sum(p.nbytes for n, p in parameters.items() if n.endswith((".codes", ".scales")))
    rest = sum(p.nbytes for n, p in parameters.items() if not n.endswith((".codes", ".scales")))
    assert (size, codes > 0) == (codes + rest, True)
    weights = HostWeights(frozen, graph.components, CPU)
    copied = []
    views = weights._views_of
    weights._views_of = lambda name, end: copied.append((name, views(name, end))) or copied[-1][1]
    component = graph.components[following.component]
    weights[following.name].present()
    found = following.run(component, *(tensors[name] for name in following.reads))
    assert torch.equal(found[0], expected[0])
    for parameter in layer_parameters(graph, [following.name]).values():
        if parameter.dtype is torch.uint8:
            parameter.data.fill_(17)
    poisoned = following.run(component, *(tensors[name] for name in following.reads))
    assert not torch.equal(poisoned[0], expected[0])
    assert {name: sum(view.nbytes for view in views) for name, views in copied}[following.name] == size


def test_copies_of_a_stored_model_compute_by_themselves():
    graph, _, inputs, expected = prepared("flux", "nf4")
    twin = copy.deepcopy(graph.components)
    for layer in stored_layers(graph.components["transformer"]).values():
        assert layer.codes.dtype is torch.uint8
    for layer in stored_layers(twin["transformer"]).values():
        layer.codes.data.fill_(17)
    assert reference_step(graph, inputs).loss == expected.loss
