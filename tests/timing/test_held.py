"""There is one count of what is held: who changes it changes the answer of everybody."""

import sys

import pytest
from planner import synthetic

from diffusionpipe.costs import StageCosts
from diffusionpipe.ir import Op
from diffusionpipe.ordering import Goal, HalfStage, Instance, Placing
from diffusionpipe.ordering.construction import Builder
from diffusionpipe.ordering.evaluation import figures_of, fits
from diffusionpipe.ordering.problem import problem_of
from diffusionpipe.planner import Layout
from diffusionpipe.planner.assembly.windows import overlap
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.proposal import propose
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.schedules.building.split_work import SplitWork, network_of, peaks
from diffusionpipe.simulator import activations_in_flight, simulate, uniform_costs
from diffusionpipe.simulator.comparison import WorkerCosts, measure
from diffusionpipe.timing import held

ORIGINAL = held.changes_of


def a_unit_more(ops, activation, kept):
    """Every forward takes a unit more, which the last op gives back."""
    return ORIGINAL(ops, activation + 1, kept + 1)


def of_a_simulation():
    schedule = REGISTRY["1f1b"](3, 4)
    return [simulate(schedule, uniform_costs(schedule, activation=5)).peak_memory(worker) for worker in range(3)]


def setting():
    return Setting(profile=synthetic.chain([1.0] * 4), cluster=synthetic.cluster(2), workload=synthetic.workload(8))


def of_a_plan():
    layout = Layout(batch=8, stages=2, microbatches=4, schedule="gpipe")
    return [use.activations for use in propose(setting(), layout).memory]


def of_the_planners_footprint():
    candidate = Candidate(
        arrangement=Arrangement(data_parallel=1, units=2),
        schedule="1f1b",
        microbatches=4,
        starts=(0, 2),
        replicas=(1, 1),
    )
    return [use.activations for use in Judge(setting=setting()).footprint.uses(candidate)]


def of_orders_with_split_backwards():
    orders = [[a for a in order if a.op in (Op.F, Op.I, Op.W)] for order in REGISTRY["zb-h1"](3, 4).orders]
    return peaks([StageCosts(activation=5, kept_after_input_grad=2)] * 3, orders)


def of_the_network_of_split_work():
    costs = (StageCosts(activation=5, kept_after_input_grad=2),) * 2
    network = network_of(SplitWork(workers=(0, 1), num_microbatches=2, costs=costs, limits=(20, 20)))
    return network.acquires, network.releases


def of_the_order_search():
    """Peaks of two ranks that may hold four units, and whether that is within their limits."""
    stage = HalfStage(forward=2, input_grad=2, weight_grad=2, activation=1, kept_after_input_grad=1)
    instance = Instance(
        ranks=2,
        microbatches=3,
        placement=Placing.LINEAR,
        stages=(stage,) * 4,
        comm=1,
        memory_limit=(4, 4),
        objective=Goal.MAKESPAN,
        seconds=0.1,
    )
    problem = problem_of(instance, Placing.LINEAR)
    orders = (0, 0, 1, 2, 0, 1, 2, 1, 2), (3, 4, 5) * 3
    figures = figures_of(problem, orders)
    return figures.peaks, fits(problem, orders)


def of_the_micro_batches_in_flight():
    return activations_in_flight(REGISTRY["1f1b"](3, 4))


def of_batches_without_a_flush():
    return held.forwards_held(overlap(3, 2))


def of_a_comparison_of_families():
    return measure("1f1b", REGISTRY["1f1b"](3, 4), WorkerCosts()).peaks


def of_orders_made_action_by_action():
    """What F, I and W of two stages change while an order is made."""
    stage = HalfStage(forward=1, input_grad=1, weight_grad=1, activation=1, kept_after_input_grad=1)
    instance = Instance(
        ranks=2,
        microbatches=1,
        placement=Placing.LINEAR,
        stages=(stage,) * 4,
        comm=0,
        memory_limit=(4, 4),
        objective=Goal.MAKESPAN,
        seconds=0.1,
    )
    return Builder(problem_of(instance, Placing.LINEAR))._changes


ANSWERS = {
    of_a_simulation: ([15, 10, 5], [18, 12, 6]),
    of_a_plan: ([1280, 1600], [1284, 1604]),
    of_the_planners_footprint: ([640, 400], [1280, 800]),  # it counts micro-batches: each is two then
    of_orders_with_split_backwards: ([15, 12, 9], [18, 15, 12]),
    of_the_network_of_split_work: (
        ((5, 0, 0, 5, 0, 0), (0, 3, 2, 0, 3, 2)),
        ((6, 0, 0, 6, 0, 0), (0, 3, 3, 0, 3, 3)),
    ),
    of_the_micro_batches_in_flight: ((3, 2, 1), (6, 4, 2)),
    of_batches_without_a_flush: ((3, 2, 1), (6, 4, 2)),
    of_a_comparison_of_families: ((3, 2, 1), (6, 4, 2)),
    of_orders_made_action_by_action: ([2, 0, -2] * 2, [3, 0, -3] * 2),
    of_the_order_search: (((4, 2), True), ((6, 3), False)),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_who_changes_the_count_changes_the_answer(monkeypatch, answer):
    right, wrong = ANSWERS[answer]
    assert answer() == right
    for name, module in list(sys.modules.items()):
        if name.startswith("diffusionpipe.") and vars(module).get("changes_of") is ORIGINAL:
            monkeypatch.setattr(module, "changes_of", a_unit_more)
    assert answer() == wrong
