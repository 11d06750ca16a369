from math import inf
from time import perf_counter

import pytest

from diffusionpipe.costs.actions import NO_HOST
from diffusionpipe.profiler.passes import LayerTimes, alone
from diffusionpipe.profiler.sweeps import MOST_SWEEPS, SizeColumn, joined, sweep


def column(seconds, *, waking=(), took=0.0, forward_only=None):
    times = LayerTimes(
        forward=seconds,
        forward_spread=0.001,
        backward_spread=0.0,
        input_grad=seconds,
        weight_grad=0.0,
        cast=0.0,
        host=NO_HOST,
        forward_only=forward_only,
    )
    return SizeColumn(
        times={"layer": times},
        activation={},
        workspace={},
        drawing={},
        kept={},
        kept_reads={},
        copies={},
        waking=waking,
        took=took,
    )


def swept(found, *, agree=alone, end=inf, first_took=0.0):
    """Batch size -> times, sweep by sweep; and those sizes that were measured again, in order."""
    left, asked = {size: list(times) for size, times in found.items()}, []
    first = {size: column(times.pop(0), took=first_took) for size, times in left.items()}

    def again(size):
        asked.append(size)
        return column(left[size].pop(0))

    return sweep(first, again, agree, end), asked


def test_what_is_steady_is_measured_twice_and_what_changes_again():
    found, asked = swept({1: [1.0, 1.01], 2: [2.0, 3.0, 2.2, 2.21]})
    assert asked == [1, 2, 2, 2]
    assert found[1].times["layer"].forward == pytest.approx(1.005)
    assert found[2].times["layer"].forward == pytest.approx(2.205)
    assert found[2].times["layer"].forward_spread == pytest.approx(0.5)
    assert found[1].times["layer"].forward_spread == pytest.approx(0.005)


def test_forwards_without_gradients_are_medians_of_the_sweeps_too():
    found = joined([column(1.0, forward_only=seconds) for seconds in (0.5, 0.9, 0.6)])
    assert found.times["layer"].forward_only == 0.6
    assert joined([column(1.0)]).times["layer"].forward_only is None


def test_what_never_gets_steady_is_measured_a_few_times():
    _, asked = swept({1: [1.0, 2.0, 3.0, 4.0, 5.0]})
    assert asked == [1] * (MOST_SWEEPS - 1)


def test_no_sweep_begins_that_would_take_longer_than_there_is_time():
    assert swept({1: [1.0, 2.0]}, end=perf_counter() + 5, first_took=10.0)[1] == []


def test_a_rank_measures_again_what_changes_on_another():
    _, asked = swept({1: [1.0] * 4}, agree=lambda value: max(value, 0.1) if value >= 0 else value)
    assert asked == [1] * (MOST_SWEEPS - 1)
