from hypothesis import given
from hypothesis import strategies as st
from schedules.measures import makespan

from diffusionpipe.schedules.families.sequential import sequential
from diffusionpipe.simulator import activations_in_flight

sizes = st.integers(1, 8)


@given(sizes, sizes)
def test_a_worker_holds_one_microbatch_at_most(num_workers, num_microbatches):
    assert activations_in_flight(sequential(num_workers, num_microbatches)) == (1,) * num_workers


@given(sizes, sizes, st.integers(1, 5), st.integers(1, 5))
def test_the_time_is_that_of_one_worker_that_does_everything(p, m, forward, backward):
    assert makespan(sequential(p, m), forward=forward, backward=backward) == m * p * (forward + backward)
