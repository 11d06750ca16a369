import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusionpipe.costs import Costs, StageCosts
from diffusionpipe.ir import Op
from diffusionpipe.schedules.building.list_scheduling import StageTimes
from diffusionpipe.schedules.building.shapes import linear
from diffusionpipe.schedules.several.opposed import facing, in_turn, opposed, ordered, pipe_of
from diffusionpipe.simulator import activations_in_flight, simulate
from diffusionpipe.timing.legal import check

PLAIN, DEAR, BOTH = StageTimes(), StageTimes(forward=3, backward=6), StageTimes(forward=2, backward=4)
GOLDEN = [
    # p, micro-batches, times, one after the other, together, opposite: an independent event simulation's best orders
    (2, (2, 2), [PLAIN] * 4, 18, 15, 12),
    (4, (4, 4), [PLAIN] * 8, 42, 33, 27),
    (4, (8, 8), [PLAIN] * 8, 66, 57, 52),
    (8, (8, 8), [PLAIN] * 16, 90, 69, 57),
    (8, (16, 16), [PLAIN] * 16, 138, 117, 108),
    (4, (4, 4), [PLAIN] * 4 + [DEAR] * 4, 84, 69, 66),
    (4, (4, 12), [PLAIN] * 8, 66, 57, 54),
    (8, (8, 24), [PLAIN] * 16, 138, 117, 110),
    (4, (4, 4), ([BOTH] + [PLAIN] * 3) * 2, None, 48, 40),
]


def pipes_of(p, microbatches):
    return [
        pipe_of(name, linear(p), (1,) * m, p * k) for k, (name, m) in enumerate(zip("ab", microbatches, strict=True))
    ]


def time_of(schedule, times):
    """What the simulator says, with free communication."""
    stages = tuple(
        StageCosts(
            forward=t.forward, backward=t.backward, input_grad=0, weight_grad=0, activation=0, kept_after_input_grad=0
        )
        for t in times
    )
    return simulate(schedule, Costs(stages=stages, reduces=(0,) * len(stages))).makespan


@pytest.mark.parametrize(("p", "microbatches", "times", "in_a_row", "together", "opposite"), GOLDEN)
def test_no_direction_is_slower_than_the_golden_table(p, microbatches, times, in_a_row, together, opposite):
    pipes = pipes_of(p, microbatches)
    same = [ordered("merged", pipes, times, slack=slack) for slack in range(2)]
    assert min(time_of(one, times) for one in same) <= together
    against = [ordered("opposed", facing(*pipes), times, slack=slack) for slack in range(3)]
    assert min(time_of(one, times) for one in against) <= opposite
    if in_a_row:
        assert time_of(in_turn("in turn", pipes, times), times) == in_a_row


def test_two_workers_with_two_micro_batches_of_each_never_wait():
    schedule = opposed(2, (2, 2))
    assert time_of(schedule, [PLAIN] * 4) == 12
    assert [p.first_sample for p in schedule.placement.pipelines] == [0, 0]


times = st.builds(StageTimes, forward=st.integers(1, 5), backward=st.integers(1, 5))


@given(st.integers(1, 5), st.tuples(st.integers(1, 6), st.integers(1, 6)), st.integers(0, 2), st.data())
def test_every_order_is_legal_and_holds_no_more_than_it_may(p, microbatches, slack, data):
    costs = data.draw(st.lists(times, min_size=2 * p, max_size=2 * p))
    pipes = pipes_of(p, microbatches)
    for schedule in (
        ordered("merged", pipes, costs, slack=slack),
        ordered("opposed", facing(*pipes), costs, slack=slack),
        in_turn("in turn", pipes, costs),
    ):
        check(schedule)
        for number, pipeline in enumerate(schedule.placement.pipelines):
            for position, stage in enumerate(pipeline.stages):
                own = [a.op for order in schedule.orders for a in order if a.stage == stage]
                held = [own[:k].count(Op.F) - own[:k].count(Op.B) for k in range(len(own) + 1)]
                assert max(held) <= min(microbatches[number], p - position + slack)
    assert max(activations_in_flight(schedule)) <= max(microbatches)


@given(st.integers(1, 5), st.tuples(st.integers(1, 6), st.integers(1, 6)), st.data())
def test_no_worker_does_a_second_backbone_before_the_first_is_over_in_turn(p, microbatches, data):
    costs = data.draw(st.lists(times, min_size=2 * p, max_size=2 * p))
    for order in in_turn("in turn", pipes_of(p, microbatches), costs).orders:
        backbones = [action.stage >= p for action in order]
        assert backbones == sorted(backbones)
