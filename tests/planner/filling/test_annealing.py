from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.filling.fill_cases import FillCase, random_case

from diffusionpipe.passes import insert_fills
from diffusionpipe.planner.filling.annealing import annealed
from diffusionpipe.planner.filling.fills import FillOptions, case_of, fill_costs, plan_of
from diffusionpipe.planner.filling.shares import pack_unshifted
from diffusionpipe.simulator import simulate
from diffusionpipe.timing.legal import check


def start(case: FillCase, options: FillOptions, chunk: int):
    made = case_of(case.schedule, case.costs, case.frozen, options)
    return made, pack_unshifted(made, chunk)


@given(st.integers(0, 10_000), st.sampled_from([1, 2, 8]), st.sampled_from([0, 0.3]))
@settings(max_examples=25, deadline=None)
def test_a_search_makes_no_iteration_longer_and_its_fills_take_what_it_says(seed, chunk, overhead):
    case = random_case(seed, max_workers=5, max_samples=40)
    speeds = tuple(1.0 + worker % 2 for worker in range(case.schedule.num_workers))
    made, packing = start(case, FillOptions(speeds=speeds, overhead=overhead), chunk)
    found = annealed(made, packing, visits=50_000, enough=0)
    assert found.makespan <= packing.makespan
    plan = plan_of(made, found)
    schedule = insert_fills(case.schedule, plan.fills, block=99, outputs={0: ("latents",)})
    check(schedule)
    assert sum(plan.shares) == case.batch
    assert max(len(fill.samples) for fills in plan.fills.values() for fill in fills) <= chunk
    assert simulate(schedule, fill_costs(case.costs, plan)).makespan == pytest.approx(plan.iteration, rel=1e-9)


def test_a_search_ends_once_the_iteration_is_short_enough():
    made, packing = start(random_case(540, fixed=(0,)), FillOptions(), 2)
    enough = packing.makespan * 0.97
    found = annealed(made, packing, visits=1_000_000, enough=enough)
    longer = annealed(made, packing, visits=1_000_000, enough=0)
    assert longer.makespan < found.makespan <= enough
    assert annealed(made, packing, visits=1_000_000, enough=packing.makespan) is packing


def test_workers_without_the_frozen_layers_get_no_samples():
    case = random_case(540, fixed=(0,))
    made, packing = start(case, FillOptions(workers=(0, 2, 3)), 2)
    found = annealed(made, packing, visits=200_000, enough=0)
    assert found.makespan < packing.makespan
    assert {worker for worker, share in enumerate(found.shares) if share} <= {0, 2, 3}


def test_no_more_samples_are_unfinished_at_a_time_than_open_chunks_hold():
    case = random_case(671, fixed=(0,))
    made, packing = start(case, FillOptions(chunks=(1,), open_chunks=3), 1)
    found = annealed(made, packing, visits=500_000, enough=0)
    assert found.makespan < packing.makespan
    for pieces in found.pieces:
        begun = [sample for _, first, _, a, b in pieces for sample in range(a, b) if first == 0]
        unfinished: set[int] = set()
        for _, first, stop, a, b in pieces:
            unfinished |= set(range(a, b)) if first == 0 else set()
            assert len(unfinished) <= 3
            unfinished -= set(range(a, b)) if stop == case.frozen.num_layers else set()
        assert len(begun) == len(set(begun))


def test_equal_cases_have_equal_results():
    made, packing = start(random_case(858, fixed=(0,)), FillOptions(), 4)
    assert annealed(made, packing, visits=100_000, enough=0) == annealed(
        made, replace(packing), visits=100_000, enough=0
    )
