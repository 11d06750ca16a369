"""A few settings of `make searches`, and that the harness notices a search that misses something."""

import pytest
from searches import judging
from searches.enumeration import layouts_of, optimum
from searches.settings import drawn

FOUND = (9, 68)
"""Settings in which an earlier search missed plans: unequal replicas, and tight memory."""


@pytest.mark.parametrize("number", FOUND)
def test_the_search_finds_what_an_enumeration_finds(number):
    assert judging.judged(drawn(0, number), number, 0).problems == ()


def test_a_search_that_finds_nothing_is_noticed(monkeypatch):
    monkeypatch.setattr(judging, "best_choice", lambda setting: None)
    (problem,) = judging.judged(drawn(0, 3), 3, 0).problems
    assert "the search found nothing" in problem


def test_the_enumeration_lists_every_layout_once():
    setting = drawn(0, 3).setting
    layouts = [one.layout for one in layouts_of(setting)]
    assert len(set(layouts)) == len(layouts)
    best = optimum(setting)
    assert best.num_layouts == len(layouts)
    assert best.num_simulated < len(layouts)
