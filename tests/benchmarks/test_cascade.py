from planner import synthetic

from benchmarks.cascade import __main__ as cascade
from benchmarks.cascade.__main__ import Way, ways
from benchmarks.cascade.models import class_conditional_pair, without_encoders
from diffusionpipe.costs.joining import joined_profile


def test_with_few_samples_two_directions_beat_the_same_direction_and_all_copies():
    steps = {}
    for way in ways("512 + 512 px", 8, 1):
        if way.fits:
            steps[way.name] = min(way.step, steps.get(way.name, float("inf")))
    assert steps["opposed"] <= 1.001 * min(steps.values())  # divided devices are as good
    assert 1.2 < steps["DDP"] / steps["opposed"] < 1.3
    assert 1.1 < steps["sharded data parallel"] / steps["opposed"] < 1.2
    assert steps["together"] / steps["opposed"] > 1.25
    assert steps["in turn"] / steps["opposed"] > 1.5


def test_the_class_conditional_pair_has_nothing_to_fill():
    pair = class_conditional_pair()
    assert pair.graph.frozen_layers == ()
    assert {backbone.name for backbone in pair.graph.backbones} == {"base", "super_resolution"}
    assert any(name.endswith("labels") for name in pair.graph.inputs)


def test_without_encoders_nothing_is_frozen_and_both_backbones_stay():
    chain = synthetic.chain([0.1] * 3, frozen=0.1)
    whole = joined_profile({"base": chain, "super_resolution": chain})
    assert whole.graph.frozen_layers
    trained = without_encoders(whole)
    assert trained.graph.frozen_layers == ()
    assert trained.graph.backbone_layers == whole.graph.backbone_layers


def test_a_kept_cell_is_read_and_not_computed_again(tmp_path, monkeypatch):
    way = Way(
        model="512 + 512 px", devices=8, per_device=1, name="opposed", layout="2 stages", is_filled=True,
        step=0.25, bubble=0.5, fits=True,
    )  # fmt: skip
    monkeypatch.setattr(cascade, "ways", lambda *_: iter([way]))
    assert cascade.kept_ways(tmp_path, way.model, 8, 1) == [way]
    monkeypatch.setattr(cascade, "ways", None)
    assert cascade.kept_ways(tmp_path, way.model, 8, 1) == [way]
    assert [file.name for file in tmp_path.iterdir()] == ["8x1 512-512-px.json"]
