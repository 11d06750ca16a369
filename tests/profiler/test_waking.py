from dataclasses import replace

import pytest
from kit.descriptions import described
from kit.tiny_models import tiny_dit

from diffusionpipe.costs.files import profile_from_text, profile_to_text
from diffusionpipe.profiler import waking
from diffusionpipe.profiler.measured import profile_model
from diffusionpipe.profiler.together import combined


class Clock:
    """A clock that finds forwards slower after a sleep."""

    def __init__(self, monkeypatch):
        self.slept = 0.0
        monkeypatch.setattr(waking.time, "sleep", self.sleep)

    def sleep(self, seconds):
        self.slept = seconds

    def time(self, function):
        slept, self.slept = self.slept, 0.0
        return None, 0.01 + 0.1 * min(slept, 0.02)


class Run:
    def forward(self):
        return ()


def test_forwards_are_compared_with_the_same_without_a_wait(monkeypatch):
    table = waking.time_waking([Run(), Run()], Clock(monkeypatch), 0.02)
    assert [wait for wait, _ in table] == [0.001, 0.005, 0.02, 0.1]
    assert [extra for _, extra in table] == pytest.approx([0.0001, 0.0005, 0.002, 0.002])


def test_long_forwards_are_not_waited_for(monkeypatch):
    assert waking.time_waking([Run()], Clock(monkeypatch), 1.0) == ()


def test_a_profile_of_a_cpu_measures_it_once_and_keeps_it_in_its_file():
    graph = tiny_dit()
    profile = profile_model(graph, described(graph), batch_sizes=(1, 2), repeats=1)
    assert [wait for wait, _ in profile.waking] == [0.001, 0.005, 0.02, 0.1]
    assert all(extra >= 0 for _, extra in profile.waking)
    assert profile_from_text(profile_to_text(profile)) == profile
    twice = replace(profile, waking=tuple((wait, 2 * extra) for wait, extra in profile.waking))
    both = combined([profile, twice]).waking
    assert [extra for _, extra in both] == pytest.approx([1.5 * extra for _, extra in profile.waking])
    assert combined([profile, replace(profile, waking=())]).waking == ()
    with pytest.raises(ValueError, match="waking must be"):
        replace(profile, waking=((0.2, 0.0), (0.1, 0.0)))
