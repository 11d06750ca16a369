"""`diffusionpipe plan` for a profile of two backbones."""

import pytest
from kit.screen_files import assert_screen
from planner import synthetic

from benchmarks.cascade.joining import joined_profile
from diffusionpipe.cli import main
from diffusionpipe.costs.files import write_cluster, write_profile
from diffusionpipe.ir.files import read_plan
from diffusionpipe.timing.legal import check


@pytest.fixture
def files(tmp_path):
    part = synthetic.chain([0.01] * 8, parameters=[60_000_000] * 8, elements=10_000, frozen=0.01)
    write_profile(joined_profile({"base": part, "large": part}), tmp_path / "profile.json")
    write_cluster(synthetic.cluster(4, per_node=2, bus_gb=0.5, intra_gb=2.0), tmp_path / "cluster.json")
    return tmp_path


def plan_of(files, *more):
    names = ["--profile", files / "profile.json", "--cluster", files / "cluster.json", "--batch", 4]
    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in ("plan", *names, "--all", "--checkpoint", "none", *more)])
    return exit_info.value.code or 0


@pytest.mark.parametrize("width", [80, 160])
def test_the_screen_compares_the_ways_to_run_both(files, width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    assert plan_of(files) == 0
    assert_screen(f"plan_cascade_{width}", capsys.readouterr().out)


def test_the_plan_file_trains_validates_and_samples_both(files):
    assert plan_of(files, "--out", files / "plan.json") == 0
    plan = read_plan(files / "plan.json")
    for schedule in (plan.train, plan.validate, *plan.sample):
        check(schedule)
    trained = [pipeline for pipeline in plan.train.placement.pipelines if "B" in pipeline.ops]
    assert [pipeline.model for pipeline in trained] == ["base", "large"]
    workers = [[plan.train.placement.stages[stage].worker for stage in p.stages] for p in trained]
    assert workers[0] == workers[1][::-1]
    assert len(plan.sample) == 2


def test_other_planners_are_refused_with_a_reason(files, capsys):
    assert plan_of(files, "--compare", "all") == 2
    assert "these planners cut one backbone" in capsys.readouterr().err
