from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ordering.instances import instances, least_memory, value_of

from diffusionpipe.ir import Op
from diffusionpipe.ordering import Placing, search
from diffusionpipe.ordering.blocks import block_orders
from diffusionpipe.ordering.candidates import best_candidate, families_of
from diffusionpipe.ordering.construction import Builder
from diffusionpipe.ordering.evaluation import figures_of, fits
from diffusionpipe.ordering.levels import levels
from diffusionpipe.ordering.problem import problem_of
from diffusionpipe.ordering.pulling import pulled
from diffusionpipe.ordering.templates import rule_of, templates_of
from diffusionpipe.schedules.building.building_block import V_PERIOD, v_block, v_shapes

some_examples = settings(deadline=None, max_examples=15)


def objective_of(problem, orders):
    figures = figures_of(problem, orders)
    return figures.window if problem.is_window else figures.makespan


@given(instance=instances())
@some_examples
def test_an_order_is_given_up_only_if_it_is_not_below_the_value(instance):
    problem = problem_of(instance, instance.placement)
    builder = Builder(problem)
    for template in templates_of(problem)[:5]:
        rule = rule_of(problem, template)
        built = builder.build(rule)
        assert built.value == objective_of(problem, built.orders)
        assert builder.build(rule, below=built.value) is None
        assert builder.build(rule, below=built.value + 1) == built


@given(instance=instances())
@some_examples
def test_squeezed_orders_are_legal_fit_into_memory_and_are_no_longer(instance):
    problem = problem_of(instance, instance.placement)
    for template in templates_of(problem)[:3]:
        built = Builder(problem).build(rule_of(problem, template))
        value, orders = pulled(problem, built.orders)
        assert value == objective_of(problem, orders) <= built.value
        assert fits(problem, orders)
        assert [sorted(order) for order in orders] == [sorted(order) for order in built.orders]


@given(instance=instances())
@some_examples
def test_the_best_candidate_of_a_large_problem_is_no_worse_than_a_family_that_fits(instance):
    problem = problem_of(instance, instance.placement)
    families = families_of(problem)
    best = best_candidate(problem, lambda: families)
    assert best.value == objective_of(problem, best.orders)
    assert fits(problem, best.orders)
    assert all(best.value <= family.value for family in families if fits(problem, family.orders))


def with_whole_microbatches(instance, room):
    """The instance with room for so many micro-batches on every rank."""
    needs = least_memory(instance.stages, instance.placement, instance.ranks)
    return replace(instance, memory_limit=tuple(room * need for need in needs))


def enlarged(instance, draw):
    """The instance with more memory on some ranks."""
    needs = least_memory(instance.stages, instance.placement, instance.ranks)
    more = [draw(st.integers(0, 3 * need)) for need in needs]
    return replace(instance, memory_limit=tuple(x + y for x, y in zip(instance.memory_limit, more, strict=True)))


@given(data=st.data(), instance=instances(max_ranks=6, max_microbatches=14))
@some_examples
def test_more_memory_has_all_levels_of_whole_microbatches(data, instance):
    is_small = instance.ranks <= 4
    steps = range(1, 9) if is_small else (1, (instance.ranks + 1) // 2, instance.ranks)
    room = data.draw(st.sampled_from([step for step in steps if step <= instance.microbatches]))
    less = with_whole_microbatches(instance, room)
    more = enlarged(less, data.draw)
    placing = instance.placement
    found = [{level.limits for level in levels(one, problem_of(one, placing))} for one in (less, more)]
    assert found[0] <= found[1]


@given(data=st.data(), instance=instances(max_ranks=4, max_microbatches=8))
@settings(deadline=None, max_examples=8)
def test_more_memory_than_room_for_whole_microbatches_never_makes_it_longer(data, instance):
    less = with_whole_microbatches(instance, data.draw(st.integers(1, instance.microbatches)))
    more = enlarged(less, data.draw)
    assert value_of(more, search(more)) <= value_of(less, search(less))


@pytest.mark.slow
@given(data=st.data(), instance=instances(max_ranks=4, max_microbatches=8))
@settings(deadline=None, max_examples=60)
def test_more_memory_anywhere_hardly_ever_makes_it_longer_and_then_by_little(data, instance):
    if instance.memory_limit is not None:
        more = enlarged(instance, data.draw)
        assert value_of(more, search(more)) <= 1.05 * value_of(instance, search(instance))


@given(num_workers=st.integers(1, 12), data=st.data())
@some_examples
def test_shapes_of_building_blocks_never_collide_and_know_their_lifespan(num_workers, data):
    shape = data.draw(st.sampled_from(v_shapes(num_workers)))
    block = v_block(num_workers, hops=shape.hops, waits=shape.waits)
    for worker in block:
        assert len({slot % V_PERIOD for slot in worker.values()}) == 4
    assert shape.lifespan == max(
        sum(slot if op is Op.I else -slot for (_, op), slot in worker.items()) for worker in block
    )


@given(instance=instances())
@some_examples
def test_orders_of_building_blocks_are_complete_and_fit_into_memory(instance):
    problem = problem_of(instance, Placing.V)
    every = [sorted(order) for order in Builder(problem).build(rule_of(problem, templates_of(problem)[0])).orders]
    for orders in block_orders(problem):
        assert [sorted(order) for order in orders] == every
        assert fits(problem, orders)
        assert figures_of(problem, orders) is not None
