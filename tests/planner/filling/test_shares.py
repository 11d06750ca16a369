import pytest

from diffusionpipe.planner.filling.shares import idle_level


@pytest.mark.parametrize(("work", "level"), [(0, 10), (12, 10), (15, 11), (21, 13)])
def test_idle_time_takes_in_as_much_work_as_its_device_is_fast(work, level):
    assert idle_level(10, (4, 10), work, {0: 2, 1: 1}) == level
