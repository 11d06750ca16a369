"""What W keeps of published blocks at true size: counted layer by layer, and as benchmarks/split counts it."""

from dataclasses import replace

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.split.measure import bytes_of
from benchmarks.split.stages import WAYS, stage_in
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.opening.configured import configured_graph
from diffusionpipe.profiler.counted import count_layers
from diffusionpipe.profiler.substitution import fake_weights

BLOCKS = [
    ("sd-2.1", 512, "unet.down_blocks.1.resnets.0", 3),
    ("sd-2.1", 512, "unet.up_blocks.2.resnets.0", 3),
    ("sdxl", 1024, "unet.down_blocks.1.resnets.1", 2),
    ("flux.1-dev", 1024, "transformer.transformer_blocks.7", 2),
    ("flux.1-dev", 1024, "transformer.single_transformer_blocks.7", 2),
]


def counted(graph: LayerGraph, model, names, samples):
    """Beside what the blocks read, as a profile says it."""
    layers = [layer for layer in graph.layers if layer.name in names]
    written = {name for layer in layers for name in layer.writes}
    given = [model.tensor(n) for n in dict.fromkeys(n for layer in layers for n in layer.reads) if n not in written]
    part = replace(graph, layers=tuple(layers), inputs=tuple(given), fed_back=())
    found = count_layers(part, model, samples, precision="float32", device_type="cuda", step=lambda: None)
    inside = {name for count in found.values() for name in count.kept_reads if name in written}
    return sum(count.kept for count in found.values()) + samples * sum(model.tensor(n).num_bytes for n in inside)


def held(graph: LayerGraph, model, names, samples, way):
    """As the benchmark counts it: live after I, without what is still live after W."""
    with FakeTensorMode(allow_non_fake_inputs=True), fake_weights(graph):
        stage = stage_in(graph, model, names, samples=samples, checkpointed=way == "recomputed")
        forward, backward = WAYS["split"](stage)
        for part in (forward, *backward):
            part()
        stage.forget()
        (_, after_input_gradient, after_weight_gradient), _ = bytes_of(stage, "split")
    return after_input_gradient - after_weight_gradient


@pytest.mark.slow
@pytest.mark.parametrize("way", ["kept", "recomputed"])
@pytest.mark.parametrize(("name", "resolution", "first", "count"), BLOCKS)
def test_what_weight_gradients_need_at_true_size_is_what_the_benchmark_counts(name, resolution, first, count, way):
    graph = configured_graph(name, resolution=resolution)
    model = describe(graph)
    start = model.backbone_layers.index(first)
    names = model.backbone_layers[start : start + count]
    assert counted(graph, model, names, 2) == pytest.approx(held(graph, model, names, 2, way), rel=0.05)
