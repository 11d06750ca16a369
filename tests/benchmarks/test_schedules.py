import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.schedules.costs import LATENCIES, PART, PROFILES, STAGES_TOLD, Cell
from benchmarks.schedules.delays import WAIT, Delays, delays_of, predicted
from benchmarks.schedules.measured import costs_of, measure
from benchmarks.schedules.simulated import LIMITS, Family, Found, Searched, run_cell, run_family
from benchmarks.schedules.summary import of_families, of_limits, violations
from benchmarks.schedules.torch_stages import FAMILIES, WaitingModule
from benchmarks.throughput.chains import our_schedule
from diffusionpipe.ir import Span
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.simulator.comparison import WorkerCosts
from diffusionpipe.simulator.comparison import measure as simulated

TINY = Cell(ranks=2, microbatches=4, profile="equal", latency="0")


@pytest.fixture(scope="module")
def tiny() -> Found:
    return run_cell(TINY)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32])
def test_every_profile_is_the_same_amount_of_model(ranks, profile):
    cell = replace(TINY, ranks=ranks, profile=profile)
    assert sum(cell.halves) == ranks * PART
    assert sum(cost.forward for cost in cell.stage_costs(ranks)) == ranks * PART
    assert cell.halves == cell.halves[::-1]


def test_the_uneven_model_is_twice_as_dear_in_its_middle():
    halves = Cell(ranks=4, microbatches=4, profile="uneven", latency="0").halves
    assert halves == (40, 53, 67, 80, 80, 67, 53, 40)


def test_generators_that_can_be_told_costs_are():
    able = {name for name, generate in REGISTRY.items() if "latency" in inspect.signature(generate).parameters}
    assert able == set(STAGES_TOLD)
    late = replace(TINY, ranks=4, microbatches=8, latency="0.1 F")
    untold = simulated("zb-v", REGISTRY["zb-v"](4, 8), WorkerCosts(latency=0.1))
    assert run_family("zb-v", late).makespan < untold.makespan


@pytest.mark.parametrize("name", REGISTRY)
def test_equal_costs_give_what_the_comparison_of_the_simulator_gives(name):
    cell = Cell(ranks=4, microbatches=8, profile="equal", latency="0")
    here, there = run_family(name, cell), simulated(name, REGISTRY[name](4, 8), WorkerCosts())
    assert (here.makespan, here.window, here.peak, here.weights) == (
        there.makespan,
        there.window,
        there.peak,
        there.weights,
    )
    assert here.window_bubble == pytest.approx(there.window_bubble)


def test_a_cell_has_all_families_and_the_search_within_its_limits(tiny):
    assert {family.name for family in tiny.families} == set(REGISTRY)
    assert set(tiny.searched) == {"1/2", "1", "2", "none"}  # a third of two micro-batches is less than one
    for limit, found in tiny.searched.items():
        assert found.peak <= TINY.limit(LIMITS[limit]) / 2
        assert found.bound <= found.makespan
    assert not violations([tiny])


def test_the_best_family_fits_and_has_one_copy(tiny):
    assert [family.name for family in tiny.best("1/2")] == ["sequential"]
    assert "zb-v" in {family.name for family in tiny.best("1")}
    assert tiny.best("2")[0].makespan == 12.5  # DualPipe's 12 needs the weights twice


def family(name: str, makespan: float, peak: float, weights: float = 1) -> Family:
    figures = {"window": makespan, "bubble": 0.0, "window_bubble": 0.0, "seconds": 0.0}
    return Family(name=name, makespan=makespan, peak=peak, weights=weights, **figures)


def found_with(*families: Family) -> Found:
    figures = {"window": 10.0, "bubble": 0.0, "window_bubble": 0.0, "seconds": 0.0, "is_optimal": False}
    answer = Searched(name="search", makespan=10.0, peak=2, limit="1", placement="v", bound=8.0, **figures)
    return Found(cell=TINY, objective="makespan", families=families, undefined={}, searched={"1": answer})


def test_the_search_is_beaten_only_by_what_fits_and_has_one_copy():
    too_large, doubled, beaten = family("a", 9, 3), family("b", 9, 2, weights=2), family("c", 9, 2)
    assert not violations([found_with(too_large, doubled, family("d", 10, 2))])
    assert [v.family for v in violations([found_with(too_large, doubled, beaten)])] == ["c"]


def test_summaries_count_ties_for_all_and_take_the_bound_at_the_limit():
    cells = [found_with(family("a", 10, 2), family("b", 10, 1), family("c", 12, 1))]
    one = next(limit for limit in of_limits(cells) if limit.limit == "1")
    assert dict(one.wins) == {"a": 1, "b": 1}
    assert (one.over_bound, one.best_over_search) == (0.25, 0.0)
    assert {each.name: each.over_bound for each in of_families(cells)} == {"a": 0.25, "b": 0.25, "c": 0.5}


def test_latencies_are_whole_ticks():
    assert all(isinstance(ticks, int) for ticks in LATENCIES.values())


def test_delays_lengthen_the_prediction_by_what_lies_on_the_longest_path():
    schedule = our_schedule("gpipe", 2, 2)
    exact = predicted(schedule, costs_of(schedule, 1.0), Delays(actions=(0.0,), messages=(0.0,)), num_draws=1)
    late = predicted(schedule, costs_of(schedule, 1.0), Delays(actions=(0.01,), messages=(0.1,)), num_draws=1)
    assert exact == 9
    assert late == pytest.approx(9 + 6 * 0.01 + 2 * 0.1)


def test_delays_are_what_a_trace_has_beyond_its_waits_and_messages_count_from_when_the_sender_is_ready():
    schedule = our_schedule("1f1b", 2, 1)
    ends = (
        {"0F0": (0, 21), "0SEND_F0>0": (21, 22), "0RECV_B0>1": (22, 23), "0B0": (74, 94)},
        {"1RECV_F0>0": (0, 1), "1F0": (26, 46), "1B0": (46, 67), "1SEND_B0>1": (67, 69)},
    )
    iteration = [
        [
            Span(
                worker=worker,
                action=action,
                start=ends[worker][str(action)][0] / 1e3,
                end=ends[worker][str(action)][1] / 1e3,
            )
            for action in order
        ]
        for worker, order in enumerate(schedule.orders)
    ]
    delays = delays_of(schedule, [iteration])
    assert WAIT == 0.020
    assert sorted(delays.actions) == pytest.approx([0, 0, 0.003, 0.003])
    assert delays.messages == pytest.approx((0.003, 0.005))


def pauses_of(*, is_split: bool) -> list[str]:
    """What torch's ways through a backward wait for."""
    from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight

    log: list[str] = []
    module = WaitingModule(1.0, lambda seconds: log.append(step.name))
    step = SimpleNamespace(name="F")
    hidden = torch.zeros(1, 2, requires_grad=True)
    output = module(hidden)
    step.name = "I"
    if is_split:
        weights = list(module.parameters())
        _, groups = stage_backward_input([output], [torch.ones(1, 2)], [hidden], iter(weights))
        step.name = "W"
        stage_backward_weight(iter(weights), groups)
    else:
        stage_backward(output, torch.ones(1, 2), [hidden])
    return log


def test_torchs_stages_wait_once_for_each_part_of_a_backward():
    assert pauses_of(is_split=True) == ["F", "I", "W"]
    assert pauses_of(is_split=False) == ["F", "I", "I"]


def test_processes_run_ours_and_torchs_split_and_whole():
    names = ("1f1b", "zb-v", "dualpipe")
    run = measure(names, 2, num_rounds=1, part=0.002, repeats=1)
    assert [case.family for case in run.cases] == list(names)
    assert all(case.predicted > 0 and case.ours > case.ideal for case in run.cases)
    assert [case.torch is not None for case in run.cases] == [name in FAMILIES for name in names]
    assert run.message >= 0  # a median: 0 where most ranks wait for something else
