"""Several models become one graph, whose backbones share no trained layer and no parameter."""

from dataclasses import replace

import pytest
import torch
from kit.cascades import MEMBERS, cascade
from kit.descriptions import described
from kit.tiny_models import tiny_dit, tiny_sdxl

from diffusionpipe.costs import Backbone
from diffusionpipe.errors import ConfigError, ModelError
from diffusionpipe.models.compose.cascade import cascade_graph
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.planner.assembly.layout import BackboneLayout
from diffusionpipe.schedules.building.list_scheduling import StageTimes
from diffusionpipe.schedules.several.opposed import in_turn, pipe_of


def test_each_backbone_has_the_layers_that_the_model_has_alone():
    model = described(cascade())
    for backbone in model.backbones:
        alone = described(MEMBERS[backbone.name]())
        assert model.layers_of(backbone) == tuple(f"{backbone.name}/{name}" for name in alone.backbone_layers)
        assert set(model.alone(backbone).backbone_layers) == set(model.layers_of(backbone))
    assert model.backbone_layers == tuple(name for one in model.backbones for name in model.layers_of(one))
    assert not set(model.backbone_layers) & set(model.frozen_layers)


def test_the_largest_pictures_are_read_and_reduced_for_the_others():
    graph = cascade()
    assert [spec.shape for spec in graph.inputs if spec.name.endswith("pixels")] == [(3, 16, 16)]
    pixels = torch.rand(2, 3, 16, 16)
    (reduced,) = graph.layers[0].run(graph.components["data"], pixels)
    assert graph.layers[0].writes == ("base/pixels",)
    assert reduced.shape == (2, 3, 8, 8)
    torch.testing.assert_close(reduced.mean((2, 3)), pixels.mean((2, 3)), atol=0.02, rtol=0)


def test_a_trained_layer_of_two_backbones_is_refused_with_both_names():
    graph = tiny_dit()
    copied = replace(graph.layers[-1], name="objective.second", writes=("second",))
    both = (Backbone(name="one"), Backbone(name="two", loss="second"))
    with pytest.raises(ModelError, match=r"the backbones one and two both train transformer.* make them one backbone"):
        described(replace(graph, layers=(*graph.layers, copied), backbones=both))


def test_a_parameter_of_two_backbones_is_refused_with_its_name():
    first, second = tiny_dit(), tiny_dit()
    second.components["transformer"].pos_embed.proj.weight = first.components["transformer"].pos_embed.proj.weight
    with pytest.raises(ModelError, match=r"one and two both train the parameter one/transformer.pos_embed.proj.w"):
        described(cascade_graph({"one": first, "two": second}))


def test_a_trained_layer_of_no_backbone_is_refused():
    graph = cascade()
    with pytest.raises(ModelError, match="is trained, but none of base/loss, base/loss depends on it"):
        described(replace(graph, backbones=(graph.backbones[0], replace(graph.backbones[0], name="again"))))


def test_models_without_common_pictures_are_refused():
    graph = tiny_dit()
    blind = replace(graph, inputs=tuple(spec for spec in graph.inputs if spec.name != "pixels"))
    with pytest.raises(ModelError, match="two reads no pictures"):
        cascade_graph({"one": graph, "two": blind})


def test_a_model_that_reads_the_sizes_of_its_pictures_is_refused():
    with pytest.raises(ModelError, match="two reads the sizes of its pictures"):
        cascade_graph({"one": tiny_dit(), "two": tiny_sdxl(resolution=16)})


def test_sizes_must_be_given_for_every_backbone():
    model = described(cascade())
    with pytest.raises(ConfigError, match="the model has the backbones base, super, but the layout gives sizes for"):
        build_plan(model, Layout(batch=8, stages=2, microbatches=2))
    own = tuple(BackboneLayout(name=name, microbatches=3) for name in MEMBERS)
    with pytest.raises(ConfigError, match="a batch of 8 cannot be cut into 3 equal micro-batches"):
        build_plan(model, Layout(batch=8, stages=2, microbatches=3, backbones=own))


def test_each_backbone_has_its_own_schedule_for_drawing():
    model = described(cascade())
    own = tuple(BackboneLayout(name=name, microbatches=2) for name in MEMBERS)
    plan = build_plan(model, Layout(batch=8, stages=2, microbatches=2, schedule="opposed", backbones=own))
    assert list(plan.phases) == ["train", "validate", "sample/base", "sample/super"]
    assert [one.placement.workers() for one in plan.sample] == [(0, 1), (1, 0)]
    blocks = [{plan.train.placement.stages[s].weights for s in p.stages} for p in plan.train.placement.pipelines[:2]]
    assert blocks == [{stage.weights for stage in one.placement.stages} for one in plan.sample] == [{0, 1}, {2, 3}]


@pytest.mark.parametrize("replicas", [(1, 1), (1, 2), (2, 1)])
def test_a_backbone_draws_where_it_trains_if_each_has_devices_of_its_own(replicas):
    model = described(cascade())
    own = tuple(BackboneLayout(name=name, microbatches=2) for name in MEMBERS)
    pipes = [
        pipe_of("base", (0,), (2, 2), first_block=0),
        pipe_of("super", (1,), (2, 2), first_block=1),
    ]
    orders = in_turn("divided", pipes, [StageTimes()] * 2)
    plan = build_plan(model, Layout(batch=8, stages=2, microbatches=2, orders=orders, backbones=own, replicas=replicas))
    trained = {(stage.weights, stage.worker) for stage in plan.train.placement.stages}
    for schedule in plan.sample:
        assert schedule.num_workers == plan.mesh.pipeline == sum(replicas)
        assert {(stage.weights, stage.worker) for stage in schedule.placement.stages} < trained
