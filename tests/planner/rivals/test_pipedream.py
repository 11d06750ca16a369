from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner.rivals.vgg16 import GB, vgg16

from diffusionpipe.planner.rivals.pipedream import pipedream


def test_vgg16_on_one_device_takes_all_its_time():
    assert sum(vgg16()[0]) == pytest.approx(0.6725, abs=5e-5)


@pytest.mark.parametrize(
    ("levels", "seconds", "replicas"),
    [
        ([(4, 1 * GB)], 0.20552, (3, 1)),
        ([(8, 1.25 * GB)], 0.10084, (7, 1)),
        ([(16, 1.25 * GB)], 0.05479, (13, 2, 1)),
        ([(16, 30 * GB)], 0.04267, None),
        ([(4, 10 * GB), (4, 1.25 * GB)], 0.06713, None),
        ([(8, 30 * GB), (2, 3.125 * GB)], 0.06577, None),
    ],
)
def test_vgg16_takes_what_pipedreams_own_optimizer_says(levels, seconds, replicas):
    found, stages = pipedream(*vgg16(), levels)
    assert found == pytest.approx(seconds, abs=5.1e-6)
    if replicas:
        assert tuple(count for _, count in stages) == replicas


def brute_force(times, outputs, parameters, units, bandwidth):
    best = float("inf")
    last = len(times) - 1
    for stages in range(1, min(units, len(times)) + 1):
        for replicas in product(range(1, units + 1), repeat=stages):
            if sum(replicas) != units:
                continue
            for cuts in combinations(range(1, len(times)), stages - 1):
                starts, stops = (0, *cuts), (*cuts, len(times))
                value = 0.0
                for s in range(stages):
                    m, weight = replicas[s], sum(parameters[starts[s] : stops[s]])
                    value = max(value, (sum(times[starts[s] : stops[s]]) + 4 * (m - 1) * weight / (bandwidth * m)) / m)
                    if s:
                        value = max(value, 2 * outputs[starts[s] - 1] / (bandwidth * m))
                        if stops[s] - 1 != last:
                            value = max(value, 2 * outputs[stops[s] - 1] / (bandwidth * m))
                best = min(best, value)
    return best


@given(st.data())
def test_one_level_is_the_best_of_all_partitions(data):
    size = data.draw(st.integers(1, 5))
    numbers = st.lists(st.integers(1, 30), min_size=size, max_size=size)
    times, outputs, parameters = data.draw(numbers), data.draw(numbers), data.draw(numbers)
    units, bandwidth = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    seconds, stages = pipedream(times, outputs, parameters, [(units, bandwidth)])
    assert seconds == pytest.approx(brute_force(times, outputs, parameters, units, bandwidth))
    assert stages[0][0] == 0
    assert sum(count for _, count in stages) == units
