import pytest
from planner.filling.exact_fill import exact_fill

from diffusionpipe.costs import Costs, StageCosts
from diffusionpipe.errors import ConfigError
from diffusionpipe.passes import insert_fills
from diffusionpipe.planner.filling.fills import FillOptions, FrozenLayers
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.timing.legal import check

pytest.importorskip("scipy")
SCHEDULE = REGISTRY["gpipe"](2, 2, 1)
COSTS = Costs(stages=(StageCosts(forward=1, backward=2),) * 2)


def layers(*seconds, fixed=0.0):
    return FrozenLayers(components=("a",) * len(seconds), forward=lambda i, samples: fixed + seconds[i] * samples)


def test_what_fits_is_free():
    # worker 0 waits 3, worker 1 waits 1 at the beginning and 2 at the end
    plan = exact_fill(SCHEDULE, COSTS, layers(1, 2))
    assert plan.iteration == pytest.approx(9)
    assert plan.shares == (1, 1)
    check(insert_fills(SCHEDULE, plan.fills, block=9, outputs={}))


def test_what_does_not_fit_lengthens_the_iteration_least():
    # pieces of 4: one exceeds worker 0's wait of 3 by 1, the other worker 1's last wait of 2 by 2
    plan = exact_fill(SCHEDULE, COSTS, layers(4))
    assert plan.iteration == pytest.approx(11)


def test_samples_share_the_fixed_time_of_a_call():
    alone = exact_fill(SCHEDULE, COSTS, layers(0.5, fixed=6.0), FillOptions(chunks=(1,)))
    together = exact_fill(SCHEDULE, COSTS, layers(0.5, fixed=6.0))
    assert together.iteration <= alone.iteration
    assert together.frozen <= alone.frozen


def test_times_that_are_not_affine_are_refused():
    curved = FrozenLayers(components=("a",), forward=lambda layer, samples: samples**2)
    schedule = REGISTRY["gpipe"](2, 2, 2)
    with pytest.raises(ConfigError, match="affine"):
        exact_fill(schedule, COSTS, curved)
    with pytest.raises(ConfigError, match="overhead"):
        exact_fill(schedule, COSTS, layers(1), FillOptions(overhead=1.0))
