from hypothesis import given
from hypothesis import strategies as st

from diffusionpipe.ir import Op, Phase, Span, Timeline, parse_action
from diffusionpipe.passes import communicate
from diffusionpipe.schedules import one_f_one_b
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.viz.waits import END, HOST, SUMS, TRANSFER, UPDATE, WORK, times_of_ranks

sizes = st.integers(1, 5)


def timed(stages, microbatches, comm=0):
    plain = one_f_one_b(stages, microbatches)
    schedule = communicate(plain, simulate(plain, uniform_costs(plain)))
    return simulate(schedule, uniform_costs(schedule, latency=comm)), schedule


@given(sizes, sizes, st.integers(0, 2))
def test_computing_and_waiting_of_a_rank_add_up_to_the_step(stages, microbatches, comm):
    timeline, schedule = timed(stages, microbatches, comm)
    for rank in times_of_ranks(timeline, schedule):
        spent = sum(rank.computing.values()) + sum(rank.by_cause().values())
        assert abs(spent - timeline.step) < 1e-9
        assert abs(sum(rank.computing.values()) - timeline.busy(rank.worker)) < 1e-9


def test_the_last_rank_waits_for_the_work_of_the_ranks_before_it_and_then_for_the_end():
    timeline, schedule = timed(3, 1)
    first, _, last = times_of_ranks(timeline, schedule)
    assert [(wait.cause, wait.before, wait.sender) for wait in last.waits] == [(WORK, "2F0", 1), (END, "", None)]
    assert [(wait.cause, wait.before, wait.sender) for wait in first.waits] == [(WORK, "0B0", 1)]
    assert last.by_cause() == {WORK: 2, END: 4}  # two forwards before it, two backwards of two after it


def test_a_message_on_its_way_is_a_transfer():
    timeline, schedule = timed(2, 1, comm=3)
    waits = times_of_ranks(timeline, schedule)[1].waits
    assert [(wait.cause, wait.seconds) for wait in waits[:2]] == [(WORK, 1), (TRANSFER, 3)]


def test_a_wait_without_a_message_is_the_host_and_a_sum_of_gradients_is_named():
    _, schedule = timed(1, 2)
    spans = [(0, 1, "0F0"), (3, 4, "0B0"), (4, 5, "0F1"), (5, 6, "0B1"), (6, 8, "0REDUCE_GRAD")]
    timeline = Timeline(
        num_workers=1,
        spans=tuple(Span(worker=0, action=parse_action(text), start=a, end=b) for a, b, text in spans),
        update=(Phase(worker=0, name="optimizer", start=9, end=10),),
    )
    (rank,) = times_of_ranks(timeline, schedule)
    assert rank.by_cause() == {HOST: 2, SUMS: 2, END: 1}
    assert rank.computing[UPDATE] == 1
    assert Op.REDUCE_GRAD in {span.action.op for span in timeline.spans}
