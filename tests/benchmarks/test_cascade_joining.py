from dataclasses import replace

import pytest
from planner.synthetic import chain, unet, with_forward_only

from benchmarks.cascade.joining import joined_profile
from diffusionpipe.errors import ConfigError


def test_an_encoder_that_both_have_alike_exists_once():
    first, second = unet(forward_ms=10), unet(forward_ms=30)
    graph = joined_profile({"base": first, "large": second}).graph
    components = {layer.component for layer in graph.layers}
    assert components == {"vae", "text_encoder", "base/unet", "large/unet", "base/objective", "large/objective"}
    assert "tokens" in graph.inputs
    assert len(graph.backbone_layers) == 2 * len(first.graph.backbone_layers)
    encoders = [name for name in graph.frozen_layers if not name.endswith("/noise")]
    assert len(encoders) == len(first.graph.frozen_layers) - 1


def test_encoders_that_differ_exist_twice():
    first = unet(text_ms=3)
    second = replace(
        first,
        graph=replace(
            first.graph,
            parameters=tuple(
                replace(p, shape=(1,)) if p.name.startswith("text") else p for p in first.graph.parameters
            ),
        ),
    )
    components = {layer.component for layer in joined_profile({"a": first, "b": second}).graph.layers}
    assert {"a/text_encoder", "b/text_encoder", "vae"} <= components


def test_every_layer_costs_what_it_costs_alone():
    first, second = chain([1e-3, 2e-3]), chain([3e-3, 4e-3])
    joined = joined_profile({"a": first, "b": second})
    for name, part in (("a", first), ("b", second)):
        for layer in part.graph.backbone_layers:
            for batch in (1, 3, 64):
                assert joined.forward(f"{name}/{layer}", batch) == part.forward(layer, batch)
                assert joined.weight_grad(f"{name}/{layer}", batch) == part.weight_grad(layer, batch)
    backbones = joined.graph.backbones
    assert [joined.graph.layers_of(b) for b in backbones] == [("a/layer0", "a/layer1"), ("b/layer0", "b/layer1")]


def test_a_backbone_that_reads_its_own_estimate_still_does():
    part = chain([1e-3, 2e-3])
    (backbone,) = part.graph.backbones
    reading = replace(backbone, estimate="x0", self_conditioning=0.5)
    graph = replace(part.graph, backbones=(reading,))
    a, b = joined_profile({"a": replace(part, graph=graph), "b": part}).graph.backbones
    assert (a.estimate, a.self_conditioning) == ("a/x0", 0.5)
    assert (b.estimate, b.self_conditioning) == (None, 0.0)


def test_the_longest_update_counts_whichever_backbone_has_it():
    short, long = (replace(chain([1e-3]), update=seconds) for seconds in (2e-3, 5e-3))
    for parts in ({"a": short, "b": long}, {"a": long, "b": short}):
        assert joined_profile(parts).update == 5e-3


def test_forwards_without_gradients_are_those_of_the_batch_sizes_that_all_have():
    first = with_forward_only(chain([1e-3]), 0.5)
    second = replace(chain([1e-3]), batch_sizes=(1, 2, 4, 8, 16, 32, 65))
    joined = joined_profile({"a": first, "b": second})
    assert len(joined.batch_sizes) == 6
    assert joined.forward_only("a/layer0", 32) == 0.5 * joined.forward("a/layer0", 32)
    assert joined.forward_only("b/layer0", 32) == joined.forward("b/layer0", 32)


def test_profiles_of_other_devices_and_sizes_are_refused_together():
    first = chain([1e-3])
    second = replace(chain([1e-3]), device="other", batch_sizes=(3, 5, 7, 9, 11, 13, 15))
    with pytest.raises(ConfigError, match=r"differ in their device: a synthetic, b other.*\n.*no batch size in common"):
        joined_profile({"a": first, "b": second})
