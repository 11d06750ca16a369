"""Parameters in parts give the loss and gradients of one process, and no rank holds more than its part for long."""

import copy
from dataclasses import replace

import pytest
import torch
from kit.descriptions import described
from kit.layouts import CPU, Step, assert_same_step, merge, reference_step, run_step, step_in_threads
from kit.tiers import quick_and_slow
from kit.tiny_models import (
    raw_inputs,
    tiny_controlled,
    tiny_dit,
    tiny_flux,
    tiny_sd3,
    tiny_sdxl,
    tiny_stable_diffusion,
)
from torch import nn

from diffusionpipe.ir import Sharded
from diffusionpipe.models.graphs.graph import canonical_names, layer_parameters
from diffusionpipe.models.parameters.lora import LoraSettings, add_lora
from diffusionpipe.models.parameters.weights import materialize
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.compute.stage import Precision
from diffusionpipe.runtime.engine.sharder import Sharder
from diffusionpipe.runtime.engine.worker import build_worker
from diffusionpipe.runtime.weights.sharding import narrow_modules

BATCH = 12
MODELS = {"stable diffusion": tiny_stable_diffusion, "dit": tiny_dit}


@pytest.fixture(scope="module", params=MODELS)
def prepared(request):
    graph = MODELS[request.param]()
    inputs = raw_inputs(graph, BATCH)
    return graph, described(graph), inputs, reference_step(graph, inputs)


def sharded(**sizes) -> Layout:
    base = {"batch": BATCH, "stages": 1, "microbatches": 1, "data_parallel": 2, "buckets": 4, "encode_chunk": 3}
    return Layout(**base | sizes, sharded=Sharded.ALL)


LAYOUTS = {
    "two ranks": sharded(),
    "three ranks": sharded(data_parallel=3),
    "one block": sharded(buckets=1),
    "accumulated one after the other": sharded(microbatches=3),
    "accumulated block by block": sharded(microbatches=3, schedule="gpipe"),
    "recomputed": sharded(microbatches=2, checkpointed=("*",)),
    "some recomputed": sharded(checkpointed=("*.transformer_blocks.0", "unet.down*")),
    "two stages": sharded(stages=2, microbatches=3, buckets=2),
    "split backward": sharded(stages=2, microbatches=3, buckets=2, schedule="zb-h1"),
    "a V": sharded(stages=2, microbatches=3, buckets=1, schedule="zb-v"),
    "zeropp": sharded(stages=2, microbatches=3, buckets=1, schedule="zeropp"),
}


QUICK = ("three ranks", "accumulated block by block", "recomputed", "split backward", "a V")


@pytest.mark.parametrize("layout", quick_and_slow(LAYOUTS, QUICK))
def test_gradients_are_those_of_one_process(prepared, layout):
    graph, model, inputs, expected = prepared
    assert_same_step(step_in_threads(graph, model, LAYOUTS[layout], inputs), expected)


def with_adapters(dtype=torch.float64):
    """FLUX.1 of which adapters alone are trained: frozen weights are in parts as well."""
    graph = tiny_flux(dtype)
    add_lora(graph.components, "transformer", LoraSettings(rank=2))
    materialize(graph, [layer.name for layer in graph.layers], {}, device="cpu", dtype=dtype, seed=0)
    return graph


OTHERS = (tiny_sdxl, tiny_controlled, tiny_sd3, tiny_flux, with_adapters)


@pytest.mark.parametrize("build", quick_and_slow(OTHERS, quick=[tiny_controlled, with_adapters]))
def test_gradients_of_other_models_are_those_of_one_process(build):
    graph = build()
    inputs = raw_inputs(graph, BATCH)
    layout = sharded(microbatches=2, buckets=0, checkpointed=("*.single*",))
    assert_same_step(step_in_threads(graph, described(graph), layout, inputs), reference_step(graph, inputs))


def test_at_rest_a_rank_holds_its_part_alone_and_two_blocks_at_most_while_it_trains(prepared):
    graph, model, inputs, _ = prepared
    plan = build_plan(model, sharded(buckets=4, microbatches=2))

    def main(rank, transport):
        own = copy.deepcopy(graph)
        worker = build_worker(own, model, plan, rank, transport, device=CPU)
        blocks = [list(layer_parameters(own, block).values()) for block in plan.blocks[:-1]]
        sizes = [sum(p.numel() for p in block) for block in blocks]
        most = 0
        program = worker.train._programs[0].instructions()
        for wait, run in list(program):
            original = run

            def watched(original=original):
                nonlocal most
                original()
                most = max(most, sum(_is_whole(block) for block in blocks))

            program[program.index((wait, run))] = (wait, watched)
        run_step(worker, inputs)
        held = sum(p.numel() for block in blocks for p in block if p.untyped_storage().size())
        gradients = sum(p.numel() for block in blocks for p in block if p.grad is not None)
        owned = sum(p.numel() for p in worker.parameters.values())
        return held, gradients, owned, sum(sizes), most

    results = run_threads(2, main)
    total = results[0][3]
    assert sum(owned for _, _, owned, _, _ in results) == total
    for held, gradients, owned, _, most in results:
        assert held == gradients == owned
        assert 0.4 * total < owned < 0.6 * total
        assert most == 2


def _is_whole(block) -> bool:
    return bool(block) and all(p.untyped_storage().size() for p in block)


def test_float32_adamw_over_three_ranks_learns_what_one_process_learns():
    graph = tiny_dit(torch.float32)
    model = described(graph)
    plan = build_plan(model, sharded(data_parallel=3, microbatches=2))
    batches = [raw_inputs(graph, BATCH, seed) for seed in range(10)]
    alone = copy.deepcopy(graph)
    trained = [p for p in canonical_names(alone.components) if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    expected = []
    for inputs in batches:
        step = reference_step(alone, inputs)
        expected.append(step.loss)
        names = {name: p for p, name in canonical_names(alone.components).items()}
        for name, gradient in step.gradients.items():
            names[name].grad = gradient
        optimizer.step()

    def main(rank, transport):
        worker = build_worker(copy.deepcopy(graph), model, plan, rank, transport, device=CPU)
        optimizer = torch.optim.AdamW(list(worker.parameters.values()), lr=1e-3)
        losses = []
        for inputs in batches:
            losses.append(run_step(worker, inputs)[0])
            optimizer.step()
        return losses

    found = torch.tensor(run_threads(3, main)).sum(0)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=0)


def test_a_sharded_block_gives_the_losses_of_one_process_where_nothing_is_trained(prepared):
    graph, model, inputs, expected = prepared
    plan = build_plan(model, sharded())

    def main(rank, transport):
        worker = build_worker(copy.deepcopy(graph), model, plan, rank, transport, device=CPU)
        rows = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
        worker.feed(worker.validate, {name: value[rows] for name, value in inputs.items()})
        return sum(float(output.value.sum()) for output in worker.validate.run())

    assert sum(run_threads(2, main)) / BATCH == pytest.approx(expected.loss, rel=1e-12)


BFLOAT16 = Precision(autocast=torch.bfloat16)


def _bfloat16_step(graph, layout, inputs):
    """Loss and gradients of one step under autocast."""
    model = described(graph, autocast=torch.bfloat16)
    plan = build_plan(model, layout)

    def main(rank, transport):
        worker = build_worker(copy.deepcopy(graph), model, plan, rank, transport, device=CPU, precision=BFLOAT16)
        run_step(worker, inputs)
        return run_step(worker, inputs)

    return merge(run_threads(plan.mesh.num_ranks, main))


def _halves(graph, layout, inputs) -> Step:
    """The same on whole weights, each rank's samples after the other's: threads would share one cache of casts."""
    alone = replace(layout, sharded=Sharded.NONE, data_parallel=1, batch=BATCH // 2)
    parts = [slice(0, BATCH // 2), slice(BATCH // 2, BATCH)]
    steps = [_bfloat16_step(graph, alone, {name: value[part] for name, value in inputs.items()}) for part in parts]
    gradients = {name: sum(step.gradients[name] / 2 for step in steps) for name in steps[0].gradients}
    return Step(sum(step.loss for step in steps) / 2, gradients)


@pytest.mark.parametrize("build", quick_and_slow([*MODELS.values(), *OTHERS], quick=[tiny_dit, with_adapters]))
def test_under_autocast_gathered_copies_give_the_bits_of_whole_weights(build):
    graph = build(torch.float32)
    inputs = raw_inputs(graph, BATCH)
    layout = sharded(microbatches=2, buckets=3)
    found = _bfloat16_step(graph, layout, inputs)
    expected = _halves(graph, layout, inputs)
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("build", quick_and_slow(MODELS.values(), quick=[tiny_dit]))
def test_under_autocast_recomputed_layers_read_copies_too(build):
    """A weight of two layers: their gradients are added before they are widened, or after it; so not the same bits."""
    graph = build(torch.float32)
    inputs = raw_inputs(graph, BATCH)
    layout = sharded(microbatches=2, checkpointed=("*",))
    found = _bfloat16_step(graph, layout, inputs)
    expected = _bfloat16_step(graph, replace(layout, sharded=Sharded.NONE), inputs)
    assert found.loss == expected.loss
    for name, gradient in expected.gradients.items():
        assert (found.gradients[name] - gradient).norm() <= 1e-2 * gradient.norm(), name


def test_under_autocast_what_travels_and_what_is_whole_is_narrow():
    graph = tiny_dit(torch.float32)
    model = described(graph, autocast=torch.bfloat16)
    plan = build_plan(model, sharded(buckets=3))

    def main(rank, transport):
        own = copy.deepcopy(graph)
        sharder = Sharder(graph=own, model=model, plan=plan, rank=rank, transport=transport, precision=BFLOAT16)
        whole = sum(p.numel() for p in layer_parameters(own, plan.blocks[1]).values())
        block = sharder.shard(1)
        copies = sum(p.numel() for p in block.copies)
        block.prepare()
        block.present()
        held = {c.untyped_storage().data_ptr(): c.untyped_storage().size() for c in block.copies.values()}
        owned = set(block.owned.values())
        others = [p for p in block.copies if p not in owned]
        empty = all(p.untyped_storage().size() == 0 for p in others)
        block.release()
        left = sum(c.untyped_storage().size() for c in block.copies.values())
        return whole, copies, sum(held.values()), empty, left

    for whole, copies, held, empty, left in run_threads(2, main):
        assert copies > 0.9 * whole
        assert 2 * copies <= held <= 2 * copies + 2 * 64 * 40
        assert empty
        assert left == 0


def test_a_weight_that_more_than_its_own_forward_reads_is_gathered_as_it_is():
    attention = nn.MultiheadAttention(8, 2)
    tied, other = nn.Linear(8, 8, bias=False), nn.Embedding(8, 8)
    tied.weight = other.weight
    free = nn.Linear(8, 8)
    modules = [*attention.modules(), tied, other, free, nn.LayerNorm(8)]
    assert narrow_modules(modules) == (free,)
