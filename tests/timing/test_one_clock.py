"""Estimate, simulator and fills ask one clock, searches of orders one march: replaced, it changes each answer."""

import sys

import pytest
from planner import synthetic

from diffusionpipe.costs import StageCosts
from diffusionpipe.ordering import HalfStage, Instance, Objective, Placing
from diffusionpipe.ordering.evaluation import figures_of
from diffusionpipe.ordering.problem import problem_of
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
from diffusionpipe.schedules.split_work import SplitWork, network_of
from diffusionpipe.simulator import simulate
from diffusionpipe.timing import clock
from diffusionpipe.timing.march import march

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


ORDERS = (0, 0, 1, 2, 1, 2), (3, 4, 5) * 2


def of_the_order_search():
    """The makespan of two ranks."""
    instance = Instance(
        ranks=2,
        microbatches=2,
        placement=Placing.LINEAR,
        stages=(HalfStage(forward=2, input_grad=3, weight_grad=1, activation=1, kept_after_input_grad=1),) * 4,
        comm=1,
        memory_limit=(4, 4),
        objective=Objective.MAKESPAN,
        seconds=0.1,
    )
    figures = figures_of(problem_of(instance, Placing.LINEAR), ORDERS)
    assert figures is not None
    return figures.makespan


def of_split_work():
    """When the last action of two workers ends."""
    costs = (StageCosts(forward=2, input_grad=3, weight_grad=1),) * 2
    network = network_of(SplitWork(workers=(0, 1), num_microbatches=2, costs=costs, limits=(2, 2), latency=1))
    numbers = [[letter * 2 + order[:i].count(letter) for i, letter in enumerate(order)] for order in ORDERS]
    starts = network.starts(numbers)
    return max(start + network.durations[number // 2] for number, start in enumerate(starts))


@pytest.mark.parametrize("answer", [of_the_order_search, of_split_work])
def test_a_march_that_takes_twice_as_long_gives_twice_the_answer(monkeypatch, answer):
    def doubled(*arguments):
        ends = march(*arguments)
        return None if ends is None else [[2 * end for end in row] for row in ends]

    before = answer()
    for name, module in list(sys.modules.items()):
        if name.startswith("diffusionpipe.") and vars(module).get("march") is march:
            monkeypatch.setattr(module, "march", doubled)
    assert answer() == 2 * before
