from hypothesis import given
from hypothesis import strategies as st

from diffusionpipe.schedules import one_f_one_b
from diffusionpipe.schedules.building.branches import branched, depths
from diffusionpipe.simulator import activations_in_flight, simulate, uniform_costs
from diffusionpipe.timing.legal import check


@st.composite
def stage_graphs(draw: st.DrawFn) -> tuple[set[tuple[int, int]], int]:
    """Any graph of stages whose edges lead to later ones, and their number."""
    count = draw(st.integers(1, 7))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    return draw(st.sets(st.sampled_from(pairs)) if pairs else st.just(set())), count


@given(stage_graphs(), st.integers(1, 6))
def test_any_graph_of_stages_has_a_legal_order(graph, m):
    check(branched(*graph, m))


@given(stage_graphs(), st.integers(1, 6))
def test_a_stage_holds_a_micro_batch_for_each_stage_on_its_longest_path(graph, m):
    held = activations_in_flight(branched(*graph, m))
    assert held == tuple(min(depth, m) for depth in depths(*graph))


@given(st.integers(1, 6), st.integers(1, 8))
def test_a_chain_has_the_orders_of_1f1b(p, m):
    assert branched([(stage, stage + 1) for stage in range(p - 1)], p, m).orders == one_f_one_b(p, m).orders


@given(st.integers(1, 3), st.integers(1, 3), st.integers(4, 8))
def test_two_towers_with_a_join_take_what_a_chain_as_long_as_one_of_them_takes(tower, rest, m):
    p = 2 * tower + rest
    edges = [(stage, stage + 1) for stage in range(p - 1) if stage != tower - 1] + [(tower - 1, 2 * tower)]
    beside, short, chain = branched(edges, p, m), one_f_one_b(tower + rest, m), one_f_one_b(p, m)
    spans = [simulate(one, uniform_costs(one)).makespan for one in (beside, short, chain)]
    assert spans[0] == spans[1]
    assert spans[2] - spans[0] == tower * (spans[2] / (m + p - 1))


def test_two_towers_of_equal_time_are_a_fifth_faster_than_a_chain_with_four_micro_batches():
    beside, chain = branched([(0, 2), (1, 2)], 3, 4), one_f_one_b(3, 4)
    spans = [simulate(one, uniform_costs(one)).makespan for one in (chain, beside)]
    assert (max(depths([(0, 2), (1, 2)], 3)), max(depths([(0, 1), (1, 2)], 3))) == (2, 3)
    assert spans[0] / spans[1] == 6 / 5
    assert (activations_in_flight(beside), activations_in_flight(chain)) == ((2, 2, 1), (3, 2, 1))
