"""Adapters (LoRA) are trained in any layout as in one process: the base weights stay as they are."""

import copy
from functools import cache

import pytest
import torch
from kit.descriptions import described
from kit.layouts import CPU, assert_same_step, feed_rows, merge, planned_step, reference_step, step_in_threads
from kit.tiers import quick_and_slow
from kit.tiny_models import raw_inputs, tiny_flux, tiny_sd3, tiny_sdxl, tiny_stable_diffusion

from diffusionpipe.ir import Range
from diffusionpipe.models.parameters.lora import LoraSettings, adapt, is_adapter, is_second_matrix
from diffusionpipe.models.parameters.lora_targets import Breadth
from diffusionpipe.models.parameters.weights import materialize
from diffusionpipe.passes import PlacedFill
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.planner.search.naming import sizes_of_plan
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.engine.worker import build_worker

BATCH = 8
MODELS = {"stable diffusion": (tiny_stable_diffusion, "unet"), "flux": (tiny_flux, "transformer")}


@cache
def adapted(tiny, trained, size=1.0, **settings):
    """The second matrices are not zero, else the first would have no gradients; their numbers are about `size`.

    Steps compute on copies of the graph, so all tests of a model share it.
    """
    graph = tiny()
    adapt(graph, trained, LoraSettings(rank=2, alpha=3.0, **settings))
    materialize(graph, [layer.name for layer in graph.layers], {}, device="cpu", dtype=torch.float64, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in trained:
            for parameter_name, parameter in graph.components[name].named_parameters():
                if is_second_matrix(parameter_name):
                    parameter.copy_(size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    inputs = raw_inputs(graph, BATCH)
    return graph, described(graph), inputs, reference_step(graph, inputs)


@pytest.fixture(scope="module", params=MODELS)
def prepared(request):
    tiny, trained = MODELS[request.param]
    return adapted(tiny, (trained,))


LAYOUTS = {
    "1f1b": Layout(batch=BATCH, stages=2, microbatches=2),
    "replicas": Layout(batch=BATCH, stages=2, microbatches=2, replicas=(2, 1)),
    "two pipelines": Layout(batch=BATCH, stages=2, microbatches=2, data_parallel=2),
    "zb-h1": Layout(batch=BATCH, stages=2, microbatches=4, schedule="zb-h1"),
    "zb-v, recomputed": Layout(batch=BATCH, stages=2, microbatches=4, schedule="zb-v", checkpointed=("*",)),
}


@pytest.mark.parametrize("layout", quick_and_slow(LAYOUTS, quick=["replicas", "zb-v, recomputed"]))
def test_gradients_of_adapters_are_those_of_one_process(prepared, layout):
    graph, model, inputs, expected = prepared
    assert all(gradient.abs().max() > 0 for gradient in expected.gradients.values())
    assert_same_step(step_in_threads(graph, model, LAYOUTS[layout], inputs), expected)


ENCODERS = {
    "stable diffusion": (tiny_stable_diffusion, ("unet", "text_encoder")),
    "text encoder alone": (tiny_stable_diffusion, ("text_encoder",)),
    "sdxl": (tiny_sdxl, ("unet", "text_encoder", "text_encoder_2")),
    "sd3": (tiny_sd3, ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3")),
    "flux": (tiny_flux, ("transformer", "text_encoder", "text_encoder_2")),
}
WITH_ENCODERS = [(model, layout) for model in ENCODERS for layout in ("1f1b", "two pipelines", "zb-v, recomputed")]
QUICK = [("text encoder alone", "zb-v, recomputed")]


@pytest.mark.parametrize(("model", "layout"), quick_and_slow(WITH_ENCODERS, quick=QUICK))
def test_gradients_of_adapters_of_text_encoders_are_those_of_one_process(model, layout):
    tiny, trained = ENCODERS[model]
    graph, description, inputs, expected = adapted(tiny, trained, size=0.1)
    assert {name.partition(".")[0] for name in expected.gradients} == set(trained)
    assert all(is_adapter(name) and gradient.abs().max() > 0 for name, gradient in expected.gradients.items())
    assert_same_step(step_in_threads(graph, description, LAYOUTS[layout], inputs), expected)


BRANCHES = {
    "sdxl": ("text_encoder_2.text_model.encoder.layers.0", "text_encoder_2.text_states"),
    "flux": ("text_encoder_2.encoder.block.0", "transformer.time_text_embed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", BRANCHES)
def test_encoders_beside_each_other_have_the_gradients_of_one_process(model):
    graph, description, inputs, expected = adapted(*ENCODERS[model], size=0.1)
    layout = Layout(batch=BATCH, stages=3, microbatches=4, schedule="graphpipe", splits=BRANCHES[model])
    plan = build_plan(description, layout)
    assert sizes_of_plan(plan) == "3 stages (2 in a row), 4 micro-batches"
    assert_same_step(planned_step(graph, description, plan, inputs), expected)


@pytest.mark.parametrize("layout", quick_and_slow(LAYOUTS, quick=[]))
def test_gradients_of_norms_are_those_of_one_process(layout):
    _check_norms(layout, ("unet", "text_encoder"), target_modules=Breadth.ALL, exclude=("conv_in", "conv_out"))


def test_gradients_of_norms_of_a_text_encoder_are_those_of_one_process():
    _check_norms("replicas", ("text_encoder",))


def _check_norms(layout, trained, **settings):
    settings = {"size": 0.1, "dora": True, "rank_stabilized": True, **settings}
    graph, description, inputs, expected = adapted(tiny_stable_diffusion, trained, **settings)
    norms = [gradient for name, gradient in expected.gradients.items() if ".lora_magnitude_vector." in name]
    assert len(norms) == len(expected.gradients) / 3
    assert all(gradient.abs().max() > 0 for gradient in norms)
    assert_same_step(step_in_threads(graph, description, LAYOUTS[layout], inputs), expected)


def _in_the_middle(unfilled):
    """Equal shares of the samples, half of the layers at the start of the iteration and half in its middle."""
    schedule, num_layers = unfilled.schedule, len(unfilled.blocks[-1])
    share = schedule.placement.pipelines[0].num_samples // schedule.num_workers
    return {
        worker: [
            PlacedFill(
                position=position, component="", layers=layers, samples=Range(worker * share, worker * share + share)
            )
            for position, layers in (
                (0, Range(0, num_layers // 2)),
                (len(order) // 2, Range(num_layers // 2, num_layers)),
            )
        ]
        for worker, order in enumerate(schedule.orders)
    }


def test_a_step_whose_batch_was_encoded_in_the_one_before_has_the_same_gradients(prepared):
    graph, model, inputs, expected = prepared
    plan = build_plan(model, Layout(batch=BATCH, stages=2, microbatches=2), filler=_in_the_middle)

    def main(rank, transport):
        worker = build_worker(copy.deepcopy(graph), model, plan, rank, transport, device=CPU)
        rows = slice(worker.encoded.start, worker.encoded.stop)
        worker.feed(worker.prologue, {name: value[rows] for name, value in inputs.items()})
        worker.prologue.run()
        feed_rows(worker, inputs)
        worker.reset_gradients()
        outputs = worker.train.run()
        loss = sum(float(output.value.double().sum()) for output in outputs) / plan.batch
        return loss, {name: p.grad.clone() for name, p in worker.parameters.items()}

    assert_same_step(merge(run_threads(plan.mesh.num_ranks, main)), expected)


def test_a_stage_without_adapters_sends_gradients_on_and_has_nothing_to_train(prepared):
    graph, model, inputs, expected = prepared
    if "unet" not in graph.components:
        pytest.skip("every block of a transformer has attention")
    with_adapters = {p.name for p in model.parameters if p.is_trainable}
    backbone = [layer for layer in model.layers if layer.name in model.backbone_layers]
    last = max(i for i, layer in enumerate(backbone) if with_adapters.intersection(layer.parameters))
    layout = Layout(batch=BATCH, stages=2, microbatches=2, splits=(backbone[last + 1].name,))
    assert_same_step(step_in_threads(graph, model, layout, inputs), expected)
