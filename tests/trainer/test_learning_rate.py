import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusionpipe.errors import RecipeError
from diffusionpipe.trainer.optim.learning_rate import Decay, LearningRateSchedule, learning_rate_at


def schedule(decay=Decay.CONSTANT, *, peak=1.0, warmup=0, total=10, final=0.0):
    return LearningRateSchedule(peak=peak, decay=decay, warmup_steps=warmup, total_steps=total, final_fraction=final)


def rates(chosen, steps):
    return [learning_rate_at(step, chosen) for step in steps]


def test_warm_up_starts_above_zero_and_ends_at_the_peak():
    assert rates(schedule(peak=8.0, warmup=4), range(6)) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_linear_falls_in_equal_steps_to_the_final_fraction_and_stays():
    assert rates(schedule(Decay.LINEAR, warmup=2, total=6, final=0.5), range(2, 9)) == [
        1.0, 0.875, 0.75, 0.625, 0.5, 0.5, 0.5,
    ]  # fmt: skip


def test_cosine_is_halfway_at_half_time_and_stays_at_the_final_fraction():
    chosen = schedule(Decay.COSINE, total=8, final=0.2)
    assert learning_rate_at(0, chosen) == 1.0
    assert math.isclose(learning_rate_at(4, chosen), 0.6)
    assert math.isclose(learning_rate_at(8, chosen), 0.2)
    assert math.isclose(learning_rate_at(80, chosen), 0.2)


@given(st.sampled_from(list(Decay)), st.integers(0, 20), st.integers(21, 60), st.floats(0, 1))
def test_every_schedule_rises_and_then_never_rises_again(decay, warmup, total, final):
    values = rates(schedule(decay, warmup=warmup, total=total, final=final), range(total + 5))
    assert values[:warmup] == sorted(values[:warmup])
    assert all(later <= earlier + 1e-12 for earlier, later in zip(values[warmup:], values[warmup + 1 :], strict=False))
    assert all(0 <= value <= 1 for value in values)


def test_all_wrong_values_are_reported_at_once():
    with pytest.raises(RecipeError) as caught:
        schedule(Decay.LINEAR, peak=-1.0, warmup=12, total=10, final=2.0)
    message = str(caught.value)
    assert all(text in message for text in ("-1.0", "12 warm-up steps", "2.0"))
