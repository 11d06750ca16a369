"""The questions of the paper's benchmark, on small made-up models."""

from dataclasses import replace

import pytest
from planner import synthetic

from benchmarks.paper import gains
from benchmarks.paper.cells import Case
from benchmarks.paper.claims import RECALLED, assumptions
from benchmarks.paper.contests import Best, Contest, contest
from benchmarks.paper.contests import draw as draw_contests
from benchmarks.paper.fill import fill_of
from benchmarks.paper.gains import Gain, gain
from benchmarks.paper.gains import draw as draw_gains
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.search import search

CASE = Case(model="SD 2.1, 512 px", devices=2, per_device=8)


def setting(*, memory=80.0, intra_gb=100.0):
    profile = synthetic.chain([0.01, 0.03, 0.02, 0.02], parameters=[10**7] * 4, frozen=0.004)
    cluster = synthetic.cluster(2, memory=memory, intra_gb=intra_gb)
    return Setting(profile=profile, cluster=cluster, workload=synthetic.workload(16))


def test_slow_links_favour_the_pipeline_and_fast_ones_data_parallelism():
    slow, fast = (contest("", gb, [setting(intra_gb=gb)]) for gb in (0.05, 1.0))
    assert slow.ratio > 1 > fast.ratio
    assert fast.copies.layout.startswith("data parallel, 2 copies")
    assert "stages" in fast.pipeline.layout


@pytest.mark.slow
def test_of_several_settings_the_faster_counts_and_where_nothing_fits_there_is_no_ratio():
    recomputed = replace(setting(), workload=replace(setting().workload, checkpointed=("*",)))
    both = contest("", 0, [recomputed, setting()])
    assert both == contest("", 0, [setting()])
    nothing = contest("", 0, [setting(memory=0.01)])
    assert (nothing.copies, nothing.pipeline, nothing.ratio) == (None, None, None)


def test_filling_gains_less_over_the_best_unfilled_layout_than_over_the_same_one(monkeypatch, tmp_path):
    monkeypatch.setattr(gains, "setting_of", lambda _: setting(intra_gb=1.0))
    found = [gain(CASE, kind) for kind in gains.KINDS]
    assert all(one.over_same >= one.over_best >= 1 for one in found)
    assert found[0].over_best > 1.01
    draw_gains(found, tmp_path / "gains.png")
    draw_contests(
        [Contest(group="8 devices", at=1.0, copies=Best(layout="", step=2.0), pipeline=Best(layout="", step=1.0))],
        tmp_path / "contest.png",
        "title",
        "GB/s",
    )
    assert all((tmp_path / name).stat().st_size > 0 for name in ("gains.png", "contest.png"))


def test_a_fill_is_that_of_the_plan_and_never_below_its_bound():
    own = setting(intra_gb=1.0)
    candidate, proposal = search(own, filler=filler_of(own), units=(2,)).winner
    found = fill_of(own, candidate.layout(own))
    assert found.iteration == pytest.approx(proposal.iteration)
    assert found.bubble == pytest.approx(proposal.timeline.bubble)
    assert found.iteration >= found.bound >= found.unfilled


def test_a_gain_is_a_ratio_of_steps():
    one = Gain(case=CASE, kind="pipeline", layout="", filled=2.0, same=3.0, other="", unfilled=2.5)
    assert (one.over_same, one.over_best) == (1.5, 1.25)


@pytest.mark.parametrize("name", ["paper's share 0.38", "share 0.6", "rates +25%"])
def test_an_assumption_changes_the_share_or_all_layers(name):
    own, changed = setting(), assumptions(CASE)[name](setting())
    shares = []
    for tables in (Judge(setting=one).tables for one in (own, changed)):
        sums = tables.table.sums(CASE.per_device)
        shares.append((tables.frozen_seconds, sums.forward[-1] + sums.backward[-1]))
    (encoders, trained), (encoders_then, trained_then) = shares
    if name.startswith("rates"):
        assert encoders_then == pytest.approx(encoders / 1.25)
        assert trained_then == pytest.approx(trained / 1.25)
    else:
        assert trained_then == trained
        assert encoders_then / trained_then == pytest.approx(float(name.split()[-1]))
    assert RECALLED[CASE.per_device] == 0.38
