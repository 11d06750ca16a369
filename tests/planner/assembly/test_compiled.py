import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import chains, costs_of, edges

from diffusionpipe.costs import Costs, Link, StageCosts
from diffusionpipe.ir import Edge
from diffusionpipe.passes import communicate, connect, reduce_gradients, replicate
from diffusionpipe.planner.assembly.buckets import subdivide
from diffusionpipe.planner.assembly.compiled import compiled
from diffusionpipe.schedules import gpipe, one_f_one_b
from diffusionpipe.simulator import simulate


@st.composite
def trained_schedules(draw):
    stages, microbatches, parts = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    replicas = draw(st.lists(st.integers(1, 2), min_size=stages, max_size=stages))
    schedule = subdivide(draw(chains)(stages, microbatches, 2), parts)
    schedule = connect(schedule, draw(edges(stages * parts)))
    schedule = replicate(schedule, [count for count in replicas for _ in range(parts)])
    return reduce_gradients(schedule, draw(st.booleans()))


def times_of(schedule, costs):
    stages = [(c.forward, c.backward, c.input_grad, c.weight_grad) for c in costs.stages]
    edge = (costs.link.latency, costs.link.latency)
    num_edges = sum(len(p.edges) for p in schedule.placement.pipelines)
    return stages, [edge] * num_edges, costs.reduces or (0,) * len(stages)


@given(st.data())
def test_the_makespan_is_the_simulators(data):
    schedule = data.draw(trained_schedules())
    costs = data.draw(costs_of(schedule))
    assert compiled(schedule).makespan(*times_of(schedule, costs)) == simulate(schedule, costs).makespan


@given(st.data())
def test_queues_never_make_it_faster(data):
    schedule = data.draw(trained_schedules())
    times = times_of(schedule, data.draw(costs_of(schedule)))
    structure = compiled(schedule)
    assert structure.queued(*times) >= structure.makespan(*times)


@given(st.data())
def test_queues_are_those_of_the_communicated_schedule(data):
    schedule = data.draw(trained_schedules())
    costs = data.draw(costs_of(schedule))
    full = simulate(communicate(schedule, simulate(schedule, costs)), costs).makespan
    # Actions that end together may be ordered otherwise; such ties abound with small integers.
    assert compiled(schedule).queued(*times_of(schedule, costs)) == pytest.approx(full, rel=0.35)


@pytest.mark.parametrize("generator", [gpipe, one_f_one_b])
@pytest.mark.parametrize("latency", [0.0, 0.2, 1.1, 3.3])
@pytest.mark.parametrize("skips", [(), ((0, 3), (1, 2))])
def test_without_ties_they_are_exactly_those(generator, latency, skips):
    pairs = [(0, 1), (1, 2), (2, 3), *(pair for pair in skips if pair not in {(1, 2)})]
    edges = [Edge(producer=a, consumer=b) for a, b in pairs]
    schedule = reduce_gradients(connect(generator(4, 8), edges), is_data_parallel=True)
    stages = tuple(
        StageCosts(forward=f, backward=b) for f, b in ((1.01, 2.13), (1.07, 1.97), (0.93, 2.29), (0.89, 2.41))
    )
    costs = Costs(stages=stages, reduces=(1.5,) * 4, link=Link(latency))
    full = simulate(communicate(schedule, simulate(schedule, costs)), costs).makespan
    assert compiled(schedule).queued(*times_of(schedule, costs)) == pytest.approx(full, rel=1e-9)
