import subprocess
import sys
from functools import cache

import pytest
import torch
from golden.plans import recorded_profile
from kit.tiers import quick_and_slow
from torch import nn

from diffusionpipe.errors import ModelError
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.models.opening.configured import configured_graph, configured_models, configured_parts
from diffusionpipe.models.opening.meta import module_on_meta

MILLIONS = {
    "sd-2.1": {"text_encoder": 340.4, "vae": 83.65, "unet": 865.9},
    "sd-1.5": {"text_encoder": 123.1, "vae": 83.65, "unet": 859.5},
    "controlnet-sd-1.5": {"text_encoder": 123.1, "vae": 83.65, "unet": 859.5, "controlnet": 361.3},
    "sdxl": {"text_encoder": 123.1, "text_encoder_2": 694.7, "vae": 83.65, "unet": 2567},
    "sd3-medium": {"text_encoder": 123.65, "text_encoder_2": 694.7, "text_encoder_3": 4762, "transformer": 2028},
    "flux.1-dev": {"text_encoder": 123.1, "text_encoder_2": 4762, "transformer": 11901},
}
"""As published, or as the files on the hub hold."""
LARGE = {
    "flux.2-dev": {"text_encoder": 24011, "transformer": 32223},
    "qwen-image": {"text_encoder": 8292, "vae": 126.9, "transformer": 20430},
    "sd3.5-medium": {"text_encoder_3": 4762, "transformer": 2243},
    "sd3.5-large": {"text_encoder_3": 4762, "transformer": 8057},
    "chroma": {"text_encoder": 4762, "transformer": 8900},
    "z-image": {"text_encoder": 4022, "transformer": 6155},
    "wan-2.1-1.3b": {"text_encoder": 5681, "vae": 126.9, "transformer": 1419},
    "krea-2": {"text_encoder": 4438, "vae": 126.9, "transformer": 12820},
    "wan-2.1-14b": {"text_encoder": 5681, "vae": 126.9, "transformer": 14288},
}
"""The same of models whose transformers are exported, which takes half a minute each."""
DIT_GIGAMACS = {"dit-xl-2-256": 118.6, "dit-xl-2-512": 524.6}
"""Peebles & Xie, section 5; they count a multiplication and an addition as one operation."""

pytestmark = pytest.mark.xdist_group("test_configured")  # so that each model is made once

QUICK = ("sd-2.1", "dit-xl-2-256", "flux.1-dev")
"""Those whose graphs `make test` makes; the others in `make test-all`."""

graph_of = cache(configured_graph)


@cache
def model_of(name):
    return describe(graph_of(name), batch=1)


def _millions(module):
    return sum(p.numel() for p in module.parameters()) / 1e6


@pytest.mark.parametrize(("name", "component"), [(n, c) for n, parts in MILLIONS.items() for c in parts])
def test_parameters_are_as_many_as_published(name, component):
    assert _millions(graph_of(name).components[component]) == pytest.approx(MILLIONS[name][component], rel=0.005)


@pytest.mark.parametrize("name", LARGE)
def test_large_models_have_as_many_parameters_as_published(name):
    parts = configured_parts(name)
    for component, millions in LARGE[name].items():
        assert _millions(parts[component]) == pytest.approx(millions, rel=0.001)


@pytest.mark.parametrize("name", DIT_GIGAMACS)
def test_dit_is_as_large_as_published_but_for_diffusers_copies_of_the_embedding(name):
    transformer = graph_of(name).components["transformer"]
    copies = sum(_millions(block.norm1.emb) for block in transformer.transformer_blocks[1:])
    assert _millions(transformer) - copies == pytest.approx(675, rel=0.005)


@pytest.mark.parametrize("name", quick_and_slow(DIT_GIGAMACS, QUICK))
def test_dit_computes_as_much_as_published(name):
    flops = sum(layer.flops for layer in model_of(name).layers if layer.component == "transformer")
    assert flops / 2e9 == pytest.approx(DIT_GIGAMACS[name], rel=0.005)


@pytest.mark.parametrize("name", quick_and_slow([name for name in configured_models() if name not in LARGE], QUICK))
def test_nothing_has_weights_and_all_can_be_described(name):
    graph, model = graph_of(name), model_of(name)
    assert all(p.is_meta for component in graph.components.values() for p in component.parameters())
    assert not any(b.is_meta for component in graph.components.values() for b in component.buffers())
    assert model.frozen_layers
    trainable = sum(p.num_bytes for p in model.parameters if p.is_trainable)
    assert trainable == sum(p.nbytes for c in graph.components.values() for p in c.parameters() if p.requires_grad)


OPENED = """
import re
from pathlib import Path
from diffusionpipe.models.opening.configured import configured_graph
from diffusionpipe.models.graphs.describe import describe

model = describe(configured_graph("qwen-image"))
blocks = [name for name in model.backbone_layers if name.startswith("transformer.transformer_blocks")]
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 2**10, len(blocks))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_qwen_image_is_opened_at_real_size_in_less_than_a_gibibyte():
    ended = subprocess.run([sys.executable, "-c", OPENED], capture_output=True, text=True, timeout=300, check=True)
    memory, blocks = map(int, ended.stdout.split())
    assert memory < 1024, "MiB, of 116 GB of weights"
    assert blocks == 60


ADDRESSES = """
import resource
from diffusionpipe.models.opening.configured import configured_graph
from diffusionpipe.runtime.machine.heap import disable_malloc_trim

def pages():
    return int(open("/proc/self/statm").read().split()[0])

configured_graph("dit-xl-2-256")
disable_malloc_trim()
before = pages()
configured_graph("flux.1-dev")
print((pages() - before) * resource.getpagesize() // 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_model_reserves_no_memory_while_it_is_made():
    ended = subprocess.run([sys.executable, "-c", ADDRESSES], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 1024, "MiB, of 67 GB of weights"


SHAPES = {"sd-2.1": (4, 64, 64), "sdxl": (4, 128, 128), "flux.1-dev": (16, 128, 128), "dit-xl-2-256": (4, 32, 32)}


@pytest.mark.parametrize(
    ("name", "shape"), quick_and_slow(SHAPES.items(), [item for item in SHAPES.items() if item[0] in QUICK])
)
def test_models_have_the_resolution_of_their_publication(name, shape):
    assert model_of(name).tensor("prediction").shape == shape


RECORDED = {"flux.1-dev": "flux.1-dev-rtx4090", "sd3-medium": "sd3-medium-l40s"}
"""Models that an earlier version cut by hand, and a profile of theirs that it made."""


@pytest.mark.parametrize("name", quick_and_slow(RECORDED, QUICK))
def test_layers_and_tensors_are_those_of_the_earlier_version_so_its_plans_and_profiles_open(name):
    old, new = recorded_profile(RECORDED[name]).graph, model_of(name)
    assert new.layers == old.layers
    assert [(t.name, t.shape, t.needs_gradient) for t in new.tensors] == [
        (t.name, t.shape, t.needs_gradient) for t in old.tensors
    ]
    assert [p.name for p in new.parameters if p.is_trainable] == [p.name for p in old.parameters if p.is_trainable]


def test_another_resolution_can_be_asked_for():
    graph = configured_graph("dit-xl-2-256", resolution=128)
    assert {spec.name: spec.shape for spec in graph.inputs}["pixels"] == (3, 128, 128)


@pytest.mark.slow
def test_of_flux_with_adapters_only_the_adapters_train():
    trainable = [p for p in model_of("flux.1-dev-lora").parameters if p.is_trainable]
    assert all(".lora_" in p.name for p in trainable)
    assert sum(p.num_bytes for p in trainable) < 0.01 * sum(p.num_bytes for p in model_of("flux.1-dev").parameters)


def test_the_locked_half_of_controlnet_to_the_middle_is_frozen():
    model = model_of("controlnet-sd-1.5")
    frozen = {name for name in model.frozen_layers if name.startswith("unet.")}
    assert {name.split(".")[1] for name in frozen} == {"time_embedding", "conv_in", "down_blocks", "mid_block"}
    assert "unet.up_blocks.0.resnets.0" in model.backbone_layers


def test_tied_embeddings_are_one_parameter_on_the_meta_device():
    config = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 9}
    t5 = module_on_meta("T5EncoderModel", config, source="the test")
    assert isinstance(t5.shared, nn.Embedding)
    assert t5.shared.weight is t5.encoder.embed_tokens.weight
    assert t5.shared.weight.device == torch.device("meta")


def test_an_unknown_model_is_refused_with_those_that_are_known():
    with pytest.raises(ModelError, match=r"no configuration 'sd-9'; choose from chroma, controlnet-sd-1\.5"):
        configured_graph("sd-9")
