from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusionpipe.planner.rivals.pipedream import pipedream

GB = 1e9

VGG16 = """
17.972 77070336 0, 46.920 1644167168 7168, 9.999 1644167168 0, 159.531 1644167168 147712, 9.766 1644167168 0,
9.374 411041792 0, 54.803 822083584 295424, 5.097 822083584 0, 75.441 822083584 590336, 5.133 822083584 0,
4.999 205520896 0, 29.149 411041792 1180672, 2.757 411041792 0, 44.481 411041792 2360320, 3.103 411041792 0,
48.133 411041792 2360320, 2.870 411041792 0, 2.682 102760448 0, 23.823 205520896 4720640, 1.722 205520896 0,
37.259 205520896 9439232, 1.527 205520896 0, 40.445 205520896 9439232, 1.523 205520896 0, 1.583 51380224 0,
12.989 51380224 9439232, 1.050 51380224 0, 11.466 51380224 9439232, 0.653 51380224 0, 12.690 51380224 9439232,
0.630 51380224 0, 0.787 12845056 0, 0 12845056 0, 7.050 2097152 411058176, 0.407 2097152 0, 0 2097152 0,
1.443 2097152 67125248, 0.309 2097152 0, 0 2097152 0, 0.941 512000 16388000
"""
"""Forward and backward in ms, output and parameter bytes of each layer: the profile of VGG-16 that PipeDream's
repository publishes (msr-fiddle/pipedream, profiler/image_classification/profiles/vgg16, MIT licence), without the
node that only reads a size."""


def vgg16():
    rows = [line.split() for line in VGG16.replace("\n", " ").split(",")]
    times = [float(row[0]) / 1e3 for row in rows]
    times[0] = 0.0  # reading the input is no work of the pipeline
    return times, [int(row[1]) for row in rows], [int(row[2]) for row in rows]


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
