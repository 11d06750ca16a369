import pytest
import torch
from kit.descriptions import described
from kit.tiny_models import raw_inputs, tiny_dit, tiny_stable_diffusion
from torch import nn

from diffusionpipe.models.cut.sequential import sequential_graph
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.profiler.counted_memory import run_for_memory
from diffusionpipe.profiler.layer_run import layer_run, release, weight_keys
from diffusionpipe.profiler.memory import KeptBytes, LiveBytes, SavedStorages
from diffusionpipe.runtime.machine.buffers import storage_of


def test_live_bytes_follow_what_operations_make_and_drop():
    x = torch.zeros(100)
    with LiveBytes() as live:
        y = x + 1
        assert live.live == 400
        z = y * 2
        del y
        assert (live.live, live.peak) == (400, 800)
        live.restart_peak()
        assert live.peak == 400
        del z
    assert live.live == 0


def test_views_and_tensors_from_before_take_no_bytes():
    x = torch.zeros(10, 10)
    with LiveBytes() as live:
        x.t().reshape(10, 10)[2:].add_(1)
    assert live.peak == 0


def test_a_storage_saved_twice_is_kept_once():
    x = torch.ones(100, requires_grad=True)
    kept = SavedStorages()
    with kept:
        (x.exp().exp() * x).sum()
    assert sum(kept.storages.values()) == 3 * 400  # x and both exponentials


def backbone_kept(graph, model, inputs):
    """Bytes of all storages that a run of the backbone as one stage keeps, and of those that it read from outside."""
    frozen = set(model.frozen_layers)
    with torch.no_grad():
        first = [layer for layer in graph.layers if layer.name in frozen]
        tensors = inputs | run_layers(first, graph.components, inputs)
    rest = [layer for layer in graph.layers if layer.name not in frozen]
    weights = {storage_of(t) for c in graph.components.values() for t in (*c.parameters(), *c.buffers())}
    outside = {storage_of(tensor) for tensor in tensors.values()}
    kept = SavedStorages()
    with kept:
        written = run_layers(rest, graph.components, tensors)
    assert written["loss"].requires_grad
    return sum(size for key, size in kept.storages.items() if key not in weights | outside)


@pytest.mark.parametrize("tiny", [tiny_stable_diffusion, tiny_dit])
@pytest.mark.parametrize("batch", [1, 3])
def test_layers_alone_keep_what_the_whole_stage_keeps(tiny, batch):
    graph = tiny(torch.float32)
    model = described(graph)
    tensors = raw_inputs(graph, batch)
    ledger = KeptBytes(model)
    for layer in graph.layers:
        run = layer_run(graph, model, layer, tensors, torch.enable_grad)
        memory = run_for_memory(run, LiveBytes())
        written = dict(zip(layer.writes, memory.written, strict=True))
        ledger.add(layer, memory.kept, run.reads, written, weight_keys(run))
        tensors.update(written)
        release(run)
    totals = ledger.totals()
    assert sum(totals.values()) == backbone_kept(graph, model, raw_inputs(graph, batch))
    assert all(totals[name] == 0 for name in model.frozen_layers)


def test_workspace_is_what_a_forward_needs_beyond_its_results():
    class Wide(nn.Module):
        def forward(self, x):
            return (x.repeat(1, 10) * 2).sum(1, keepdim=True)

    graph = sequential_graph(
        nn.Sequential(Wide(), nn.Linear(1, 1)), inputs=(10,), target=(1,), loss=lambda p, t: ((p - t) ** 2).sum(1)
    )
    model = described(graph)
    run = layer_run(graph, model, graph.layers[0], raw_inputs(graph, 2), torch.enable_grad)
    assert (
        run_for_memory(run, LiveBytes()).workspace == 2 * (2 * 100 * 4) - 2 * 4
    )  # the copies and twice their values, less the output
