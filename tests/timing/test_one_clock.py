"""Whoever says when something ends asks one clock, searches of orders one march: replaced, each answer changes."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from planner import synthetic
from planner.filling.fill_cases import small_case

from diffusionpipe.costs import StageCosts
from diffusionpipe.ir import Sharded
from diffusionpipe.ordering import Goal, HalfStage, Instance, Placing
from diffusionpipe.ordering.evaluation import figures_of
from diffusionpipe.ordering.problem import problem_of
from diffusionpipe.passes import communicate, reduce_gradients
from diffusionpipe.planner import build_plan, predicted_timeline
from diffusionpipe.planner.assembly.build import build_train_schedule
from diffusionpipe.planner.assembly.windows import overlap
from diffusionpipe.planner.correction import transfers
from diffusionpipe.planner.correction.correct import predicted_step
from diffusionpipe.planner.filling import shifting
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.filling.fills import FillOptions, frozen_layers, plan_fills
from diffusionpipe.planner.filling.shares import Case, pack_unshifted
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.collectives import all_reduce
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import costs_of
from diffusionpipe.planner.rivals.copy_times import gathering_time, gradient_times, zero3_times
from diffusionpipe.planner.rivals.simulated import simulated as rivals
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.proposal import pricing_of
from diffusionpipe.schedules import REGISTRY, one_f_one_b
from diffusionpipe.schedules.building.split_work import SplitWork, network_of
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.simulator.steady import steady
from diffusionpipe.timing import clock
from diffusionpipe.timing.march import march
from diffusionpipe.timing.work import Compute
from diffusionpipe.workflows.rehearsing.rehearsal import predict_run

SETTING = Setting(
    profile=synthetic.chain([0.01, 0.02, 0.015, 0.01] * 2, elements=10**6, frozen=1e-3),
    cluster=synthetic.cluster(2, intra_gb=2.0),
    workload=synthetic.workload(8),
)
CANDIDATE = Candidate(
    arrangement=Arrangement(data_parallel=1, units=2), schedule="1f1b", microbatches=4, starts=(0, 4), replicas=(1, 1)
)


def estimated():
    return Judge(setting=SETTING).estimates.timed(CANDIDATE).makespan


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


def of_sharded_copies():
    arrangement = Arrangement(data_parallel=2, units=1)
    copies = replace(CANDIDATE, arrangement=arrangement, starts=(0,), replicas=(1,), buckets=2, sharded=Sharded.ALL)
    return Judge(setting=SETTING).estimates.timed(copies).makespan


def of_a_plan():
    layout = CANDIDATE.layout(SETTING)
    plan = build_plan(SETTING.graph, layout, pricing=pricing_of(SETTING))
    assert (
        predicted_step(SETTING, plan).iteration == predicted_timeline(SETTING.profile, plan, SETTING.cluster).makespan
    )
    return predicted_step(SETTING, plan).iteration


def of_a_rival():
    return rivals(["gpipe"], SETTING)[0].proposal.iteration


def of_data_parallelism():
    return sum(gradient_times(Judge(setting=SETTING), 4.0, all_reduce))


def of_zero3():
    return zero3_times(Judge(setting=SETTING), 4.0)[1] + gathering_time([3.0, 2.0, 1.0], [2.0, 2.0, 2.0])


def of_batches_without_a_flush():
    return float(steady(overlap(2, 2), uniform_costs).period)


def of_a_rehearsal():
    schedule = one_f_one_b(2, 4)
    return predict_run(SimpleNamespace(schedule=schedule, costs=uniform_costs(schedule))).makespan


def replace_everywhere(monkeypatch, name, old, new):
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("diffusionpipe.") and vars(module).get(name) is old:
            monkeypatch.setattr(module, name, new)


DOUBLED = [
    estimated,
    simulated,
    predicted_by_the_filler,
    of_sharded_copies,
    of_a_plan,
    of_a_rival,
    of_data_parallelism,
    of_zero3,
    of_batches_without_a_flush,
    of_a_rehearsal,
]


@pytest.mark.parametrize("answer", DOUBLED)
def test_a_clock_that_doubles_each_duration_doubles_the_answer(monkeypatch, answer):
    ends_of, before = clock.ends_of, answer()

    def doubled(graph, durations, **options):
        return ends_of(graph, [2 * duration for duration in durations], **options)

    replace_everywhere(monkeypatch, "ends_of", ends_of, doubled)
    assert answer() == pytest.approx(2 * before, rel=1e-12)


def test_messages_are_placed_by_the_clock(monkeypatch):
    """As if a stage really took as long as the clock says."""
    schedule, ends_of = one_f_one_b(3, 4), clock.ends_of
    costs = uniform_costs(schedule)

    def placed(costs):
        return communicate(schedule, simulate(schedule, costs))

    slow = replace(costs.stages[1], forward=30 * costs.stages[1].forward, backward=30 * costs.stages[1].backward)
    usual, expected = placed(costs), placed(replace(costs, stages=(costs.stages[0], slow, costs.stages[2])))

    def slowed(graph, durations, **options):
        works = [graph.works[work] for work in graph.work]
        is_slow = [isinstance(work, Compute) and work.stage == 1 for work in works]
        return ends_of(graph, [30 * d if slow else d for slow, d in zip(is_slow, durations, strict=True)], **options)

    replace_everywhere(monkeypatch, "ends_of", ends_of, slowed)
    assert placed(costs) == expected != usual


def test_gradient_sums_are_placed_by_the_clock(monkeypatch):
    """One that runs backwards turns their order, where workers share blocks."""
    ends_of = clock.ends_of

    def last():
        return str(reduce_gradients(REGISTRY["chimera"](4, 4), is_data_parallel=True).orders[0][-1])

    assert last() == "0REDUCE_GRAD"
    replace_everywhere(monkeypatch, "ends_of", ends_of, lambda *given, **more: [-x for x in ends_of(*given, **more)])
    assert last() == "7REDUCE_GRAD"


def test_recorded_gradient_sums_are_explained_by_the_clock(monkeypatch):
    """Sums that begin at 0 and 1 end at 4 if each takes 2; if the clock doubles everything, if each takes 1."""
    ends_of = clock.ends_of

    def doubled(graph, durations, **options):
        return ends_of(graph, [2 * duration for duration in durations], **options)

    assert transfers._solved([0.0, 1.0], [1.0, 1.0], 4.0) == pytest.approx(2)
    replace_everywhere(monkeypatch, "ends_of", ends_of, doubled)
    assert transfers._solved([0.0, 1.0], [1.0, 1.0], 4.0) == pytest.approx(1)


def test_fills_that_delay_compute_are_timed_by_the_clock(monkeypatch):
    made = small_case(3)
    case = Case(graph=made.graph, frozen=made.frozen, options=FillOptions(), batch=made.batch)

    def packed():
        shares = pack_unshifted(case, 1).shares
        return shifting.pack_shifted(case, shares, 1, shifting.USUAL[0], case.graph.makespan).makespan

    ends_with_rooms, before = clock.ends_with_rooms, packed()

    def doubled(graph, durations, decide, **options):
        return ends_with_rooms(graph, [2 * duration for duration in durations], decide, **options)

    replace_everywhere(monkeypatch, "ends_with_rooms", ends_with_rooms, doubled)
    assert packed() > 1.5 * before


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
        objective=Goal.MAKESPAN,
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
    replace_everywhere(monkeypatch, "march", march, doubled)
    assert answer() == 2 * before
