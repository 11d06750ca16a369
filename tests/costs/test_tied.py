"""Parameters that several layers train: layouts that would give them copies are refused, and never chosen."""

from dataclasses import replace

import pytest
from planner import synthetic

from diffusionpipe.costs.tied import tied_blocks
from diffusionpipe.errors import ConfigError
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.planner.pricing.given import Given
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.search import search


def tied_chain(*names, size=10**8):
    """A chain of eight layers, two of which have their weight in common."""
    profile = synthetic.chain([0.01] * 8, parameters=[size] * 8)
    own = profile.graph.layer(names[0]).parameters
    layers = tuple(replace(one, parameters=own) if one.name == names[1] else one for one in profile.graph.layers)
    return replace(profile, graph=replace(profile.graph, layers=layers))


def test_parameters_of_one_block_and_frozen_ones_are_not_tied():
    graph = tied_chain("layer0", "layer7").graph
    names = graph.backbone_layers
    assert tied_blocks(graph, [names[:4], names[4:]]) == {"layer0.weight": (0, 1)}
    assert tied_blocks(graph, [names]) == {}
    frozen = tuple(replace(parameter, is_trainable=False) for parameter in graph.parameters)
    assert tied_blocks(replace(graph, parameters=frozen), [names[:4], names[4:]]) == {}


REFUSED = {
    "1f1b": ({}, "layer7"),
    "a loop": ({"schedule": "interleaved"}, "layer7"),
    "beside the fold of a V": ({"schedule": "zb-v"}, "layer2"),
    "data parallel": ({"data_parallel": 2}, "layer7"),
    "replicas": ({"replicas": (2, 2)}, "layer7"),
}


@pytest.mark.parametrize(("sizes", "other"), REFUSED.values(), ids=REFUSED)
def test_a_layout_with_copies_is_refused_and_names_the_parameter_and_both_layers(sizes, other):
    graph = tied_chain("layer0", other).graph
    words = (
        rf"layer0 and {other} train the same parameter layer0.weight.* on worker 0.* on worker 1.*or give each layer"
    )
    with pytest.raises(ConfigError, match=words):
        build_plan(graph, Layout(batch=16, stages=2, microbatches=4, **sizes))


def found(size, **given):
    profile = tied_chain("layer0", "layer7", size=size)
    setting = Setting(
        profile=profile, cluster=synthetic.cluster(4), workload=synthetic.workload(32), given=Given(**given)
    )
    return search(setting)


def test_a_search_finds_layouts_that_put_both_layers_on_one_worker():
    copies = found(10**8).winner[0]
    assert copies.is_copy
    folded = found(10**9).winner[0]  # copies of the whole do not fit
    placement = folded.layout(Setting(
        profile=tied_chain("layer0", "layer7"), cluster=synthetic.cluster(4), workload=synthetic.workload(32)
    )).generated().placement  # fmt: skip
    assert {stage.worker for stage in placement.stages if stage.weights == 0} == {
        stage.worker for stage in placement.stages if stage.weights == len(folded.starts) - 1
    }


def test_a_search_that_may_only_cut_between_them_says_so():
    with pytest.raises(ConfigError, match=r"layer0 and layer7 train the same parameter layer0.weight"):
        found(10**8, stages=4, schedule="1f1b")
