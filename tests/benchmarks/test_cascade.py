from planner import synthetic

from benchmarks.cascade import ways as cascade
from benchmarks.cascade.joining import joined_profile
from benchmarks.cascade.models import class_conditional_pair, without_encoders
from benchmarks.cascade.ways import Cell, Way, computed_cell, kept_cell


def test_with_few_samples_two_directions_beat_the_same_direction_and_all_copies():
    cell = computed_cell("512 + 512 px", 8, 1)
    steps = {name: way.step for name, way in cell.best.items()}
    divided = min(step for name, step in steps.items() if "divided" in name)
    assert abs(steps["opposed"] / divided - 1) < 0.01  # backbones of equal work on halves of the devices are as good
    assert 1.2 < steps["DDP"] / steps["opposed"] < 1.3
    assert 1.1 < steps["sharded data parallel"] / steps["opposed"] < 1.2
    assert 1.02 < steps["together"] / steps["opposed"] < 1.1
    assert 1.3 < steps["in turn"] / steps["opposed"] < 1.5


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


def way_of(name, step, **changes):
    given = {"layout": "2 stages", "is_filled": True, "bubble": 0.5, "fits": True, "waits": 0.1, "frozen": 0.2}
    return Way(name=name, step=step, **given | changes)


CELL = Cell(
    model="512 + 512 px",
    devices=8,
    per_device=1,
    seconds=1.5,
    ways=(
        way_of("opposed", 0.25),
        way_of("opposed", 0.5, is_filled=False, frozen=0.0),
        way_of("together", 0.2, fits=False),
        way_of("DDP", 0.125, is_filled=False),
        way_of("in turn", 0.75, frozen=0.05),
    ),
)


def test_ratios_are_of_the_fastest_that_fits_to_the_fastest_of_ours():
    assert CELL.ratios() == CELL.ratios("opposed") == {"DDP": 0.5, "opposed": 1.0, "in turn": 3.0}
    assert CELL.ratios("in turn")["opposed"] == 1 / 3


def test_a_way_is_full_if_its_frozen_work_exceeds_its_waits():
    assert [way.is_full for way in CELL.ways] == [True, False, True, False, False]


def test_a_kept_cell_is_read_and_not_computed_again(tmp_path, monkeypatch):
    monkeypatch.setattr(cascade, "computed_cell", lambda *_: CELL)
    assert kept_cell(tmp_path, CELL.model, 8, 1) == CELL
    monkeypatch.setattr(cascade, "computed_cell", None)
    assert kept_cell(tmp_path, CELL.model, 8, 1) == CELL
    assert [file.name for file in tmp_path.iterdir()] == ["8x1 512-512-px.json"]
