"""Estimate, simulator and fills ask one clock: where it is replaced, the answer of each changes."""

import pytest
from planner import synthetic

from diffusionpipe.planner.assembly.build import build_train_schedule
from diffusionpipe.planner.filling import compute_graph
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.filling.fills import FillOptions, frozen_layers, plan_fills
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import costs_of
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.proposal import pricing_of
from diffusionpipe.simulator import simulate
from diffusionpipe.timing import clock

SETTING = Setting(
    profile=synthetic.chain([0.01, 0.02, 0.015, 0.01] * 2, elements=10**6, frozen=1e-3),
    cluster=synthetic.cluster(2, intra_gb=2.0),
    workload=synthetic.workload(8),
)
CANDIDATE = Candidate(
    arrangement=Arrangement(data_parallel=1, units=2), schedule="1f1b", microbatches=4, starts=(0, 4), replicas=(1, 1)
)


def estimated():
    return Judge(setting=SETTING).estimates.estimate(CANDIDATE).pipeline


def simulated():
    layout = CANDIDATE.layout(SETTING)
    schedule, blocks = build_train_schedule(SETTING.graph, layout)
    return simulate(schedule, costs_of(schedule, blocks, layout.mesh, SETTING)).makespan


def predicted_by_the_filler():
    asked = []

    def filler(unfilled):
        asked.append(unfilled)
        return filler_of(SETTING)(unfilled)

    build_train_schedule(SETTING.graph, CANDIDATE.layout(SETTING), pricing=pricing_of(SETTING), filler=filler)
    (unfilled,) = asked
    return plan_fills(unfilled.schedule, unfilled.costs, frozen_layers(SETTING.profile), FillOptions()).unfilled


@pytest.mark.parametrize("answer", [estimated, simulated, predicted_by_the_filler])
def test_a_clock_that_doubles_each_duration_doubles_the_answer(monkeypatch, answer):
    ends_of, before = clock.ends_of, answer()

    def doubled(graph, durations, **options):
        return ends_of(graph, [2 * duration for duration in durations], **options)

    for module in (clock, compute_graph):
        monkeypatch.setattr(module, "ends_of", doubled)
    assert answer() == pytest.approx(2 * before, rel=1e-12)
