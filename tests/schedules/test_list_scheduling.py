from hypothesis import given
from hypothesis import strategies as st
from schedules.measures import makespan

from diffusionpipe.ir import Op
from diffusionpipe.schedules import gpipe, one_f_one_b
from diffusionpipe.schedules.building.list_scheduling import UNIT_TIMES, StageTimes, list_schedule
from diffusionpipe.schedules.building.shapes import SPLIT, TRAIN, Pipe, linear, loop, schedule_of, wave
from diffusionpipe.simulator import activations_in_flight
from diffusionpipe.timing.legal import check

sizes = st.integers(1, 6)
durations = st.integers(1, 5)
shapes = st.sampled_from([loop, wave])


def backward_first(action):
    return (int(action.op is Op.F), action.microbatch)


def forward_first(action):
    return (int(action.op is not Op.F), action.microbatch)


@given(sizes, st.integers(1, 3), sizes, shapes, st.sampled_from([TRAIN, SPLIT]), st.data())
def test_the_orders_are_legal_and_take_the_time_it_says(p, chunks, m, shape, ops, data):
    pipe = Pipe(workers=shape(p, chunks), microbatches=(1,) * m, ops=ops)
    names = ("forward", "backward", "input_grad", "weight_grad", "latency")
    times = {name: data.draw(durations) for name in names}
    urgencies = {}
    stages = p * chunks
    found = list_schedule(
        [pipe],
        lambda action: urgencies.setdefault(action, (data.draw(st.integers(0, 3)),)),
        times=[StageTimes(**times)] * stages,
        limits=data.draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages)),
    )
    schedule = schedule_of("list", [pipe], found.orders)
    check(schedule)
    assert makespan(schedule, **times) == found.makespan


@given(sizes, sizes)
def test_forwards_first_is_gpipe(p, m):
    pipe = Pipe(workers=linear(p), microbatches=(1,) * m)
    times = [StageTimes(forward=9, backward=9)] * p
    found = schedule_of("list", [pipe], list_schedule([pipe], forward_first, times=times, limits=[m] * p).orders)
    assert makespan(found, forward=9, backward=9) == makespan(gpipe(p, m), forward=9, backward=9)


@given(sizes, sizes)
def test_backwards_first_with_as_many_in_flight_as_workers_takes_the_time_of_1f1b(p, m):
    pipe = Pipe(workers=linear(p), microbatches=(1,) * m)
    found = list_schedule([pipe], backward_first, times=[UNIT_TIMES] * p, limits=range(p, 0, -1))
    assert found.makespan == makespan(one_f_one_b(p, m))
    assert max(activations_in_flight(schedule_of("list", [pipe], found.orders))) <= p
