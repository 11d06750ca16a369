from dataclasses import replace
from itertools import product
from math import prod

from hypothesis import given
from hypothesis import strategies as st
from planner import synthetic

from diffusionpipe.costs import ParameterSpec
from diffusionpipe.holding import Ledger, Workload, plain_states
from diffusionpipe.holding.sharding import part_of_parameter


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=40), st.integers(1, 9))
def test_parts_are_at_most_a_third_above_the_mean_and_the_largest(sizes, parts):
    graph = synthetic.chain([1.0] * len(sizes), parameters=sizes).graph
    owner = part_of_parameter(graph, graph.backbone_layers, parts)
    trained = {p.name: prod(p.shape) for p in graph.parameters if p.name in owner}
    assert sum(trained.values()) == sum(sizes)
    loads = [sum(size for name, size in trained.items() if owner[name] == part) for part in range(parts)]
    assert max(loads) <= sum(sizes) / parts + max(sizes)
    least = max(max(sizes), sum(sizes) / parts)
    assert max(loads) <= 2 * least


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.integers(1, 3))
def test_the_heaviest_part_is_at_most_a_third_above_the_least_possible(sizes, parts):
    graph = synthetic.chain([1.0] * len(sizes), parameters=sizes).graph
    owner = part_of_parameter(graph, graph.backbone_layers, parts)
    weights = [prod(p.shape) for p in graph.parameters if p.name in owner]

    def heaviest(part_of):
        return max(sum(w for w, one in zip(weights, part_of, strict=True) if one == part) for part in range(parts))

    least = min(map(heaviest, product(range(parts), repeat=len(weights))))
    assert 3 * parts * heaviest(owner.values()) <= (4 * parts - 1) * least


def test_equal_parameters_are_dealt_in_the_models_order():
    graph = synthetic.chain([1.0] * 5, parameters=[7] * 5).graph
    assert list(part_of_parameter(graph, graph.backbone_layers, 2).values()) == [0, 1, 0, 1, 0]


def test_frozen_parameters_weigh_less_than_trained_ones():
    profile = synthetic.chain([1.0, 1.0], parameters=[10, 10])
    graph = profile.graph
    assert set(part_of_parameter(graph, graph.backbone_layers, 2).values()) == {0, 1}


def test_what_computes_in_bfloat16_is_gathered_in_two_bytes():
    dtypes = ("uint8", "bfloat16", "float32", "float64")
    frozen = [ParameterSpec(name=name, shape=(5,), dtype=name, is_trainable=False) for name in dtypes]
    trained = ParameterSpec(name="trained", shape=(5,), dtype="float32")
    graph = replace(synthetic.chain([1.0]).graph, parameters=(*frozen, trained))
    ledger = Ledger(graph=graph, workload=Workload(batch=1, states=plain_states(parameter=8)))
    assert [ledger.gathered(one, "bfloat16") for one in frozen] == [5, 10, 10, 10]
    assert [ledger.gathered(one, "float32") for one in frozen] == [5, 10, 20, 40]
    assert ledger.gathered(trained, "bfloat16") == 10
    assert ledger.gathered(trained, "float64") == ledger.stored(trained) == 40  # the workload says it
