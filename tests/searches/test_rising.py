"""More memory never makes a plan slower: seeded settings, real models at night, and that a rise is noticed."""

from dataclasses import dataclass

import pytest
from searches import memory_sizes, rising
from searches.settings import with_memory

from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.search.search import search

FOUND = {
    (0, 6): "states in parts: the largest parameter is whole at one copy, which hid leaner cuts",
    (0, 31): "the same, with replicas",
    (1, 38): "cuts of 1F1B with which a schedule that holds more did not fit",
    (2, 18): "fills that lacked memory, where smaller ones did not",
}
"""Settings, by seed and number, in which an earlier search was slower with more memory."""
PAIR = (1_070_000_000, 1_104_000_000)
"""Sizes between which the step of case 31 rose by 1.2 %."""


def test_more_memory_makes_a_plan_no_slower_where_it_once_did():
    found = list(rising.planned(rising.setting_of(0, 31), PAIR))
    assert [one.rise for one in found] == [0.0, 0.0]
    assert found[0].step < 1.9, "with states in parts"


def test_a_schedule_that_holds_more_than_1f1b_gets_other_cuts():
    """Of three equally fast cuts of 1F1B, more memory gave the one with which ZB-1p does not fit: 3.12 s, not 3.006."""
    setting = with_memory(rising.setting_of(1, 38), 2_008_000_000)
    candidate, proposal = search(setting, filler=filler_of(setting)).winner
    assert candidate.schedule == "zb-1p"
    assert proposal.step == pytest.approx(3.00616, abs=1e-5)


@pytest.mark.parametrize(("seed", "number"), FOUND)
def test_the_fastest_step_never_rises_with_memory(seed, number):
    assert rising.rises(seed, number, 10) == []


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", memory_sizes.QUESTIONS)
def test_the_fastest_step_of_a_real_model_never_rises_over_45_sizes_of_memory(name):
    assert memory_sizes.rises(name, 45) == 0


@dataclass(frozen=True)
class Step:
    """As much of a choice as is asked about."""

    step: float
    sizes: str = "1f1b"

    @property
    def fastest(self):
        return self


def test_a_step_that_rises_is_noticed(monkeypatch):
    steps = iter([None, Step(2.0), Step(3.0), Step(2.5), Step(1.0), Step(1.001)])
    monkeypatch.setattr(rising, "best_choice", lambda setting: next(steps))
    found = [one.rise for one in rising.planned(rising.setting_of(0, 1), range(1, 7))]
    assert found == pytest.approx([0, 0, 0.5, 0.25, 0, 0.001])
    assert sum(rise > rising.ALLOWED for rise in found) == 2


def test_sizes_reach_from_one_in_which_nothing_fits():
    setting = rising.setting_of(0, 1)
    sizes = rising.sizes_of(setting, rising.Random(0), 8)
    assert sizes == sorted(set(sizes))
    (first,) = rising.planned(setting, sizes[:1])
    assert first.sizes == "nothing fits"
