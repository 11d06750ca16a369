"""A few settings of `make searches`, and that the harness notices a search that misses something."""

import pickle
from dataclasses import replace

import pytest
from searches import judging, memory_sizes
from searches.enumeration import layouts_of, optimum
from searches.settings import drawn, with_memory

from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.given import Given
from diffusionpipe.planner.search.search import search

FOUND = {
    (0, 9): "unequal replicas",
    (0, 68): "tight memory",
    (8, 36): "copies on unequal devices that share the encoders",
    (8, 62): "memory that the best by estimate misses by a byte: something slower fits",
    (8, 71): "the same, with orders of frozen work that fit",
    (8, 162): "stages in a loop where no chain fits that is as fast",
    (8, 225): "unequal replicas that gain most from a split backward",
    (9, 94): "unequal replicas of few micro-batches, which only a split backward makes fast",
    (9, 174): "a V where memory is short, fast once its cuts have moved",
    (10, 205): "buckets at another number of micro-batches than the best estimate's",
    (10, 241): "an order of its own at another number of micro-batches than the best estimate's",
    (11, 74): "several stages on a device with few micro-batches, whose 1F1B is slow",
    (12, 165): "stages in a loop where no chain fits, which only moved cuts make faster than sharded copies",
    (13, 2): "fewer devices, where encoders on one of them alone fit",
    (13, 71): "unequal replicas of few micro-batches, slow as 1F1B beside the best",
    (13, 225): "what fits of a place, where the cut that looked best holds more than was estimated",
    (15, 223): "fewer devices, where what fits misses the memory by a little in the estimate",
    (15, 229): "the same as 225 of seed 13, at a place that is slow as 1F1B",
    (16, 239): "an order of its own at the third best place",
    (20, 487): "the same, among layers that differ in everything",
    (18, 69): "a cut that fits where one rank encodes for all, and did not fit where all encode",
    (16, 58): "more micro-batches, where the cut that looked best takes longer than was estimated",
}
"""Settings, by seed and number, in which an earlier search missed plans."""
QUICK = ((0, 9), (8, 62), (8, 225), (9, 94), (9, 174), (12, 165), (13, 2), (13, 71), (16, 58), (18, 69))


@pytest.mark.parametrize(
    ("seed", "number"), [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow) for one in FOUND]
)
def test_the_search_finds_what_an_enumeration_finds(seed, number):
    assert judging.judged(drawn(seed, number), number, seed).problems == ()


def test_schedules_whose_estimates_are_equal_because_all_waits_are_filled_are_simulated():
    """Fills do better where there is less to fill: without the one that waits less the step takes 1.477 s."""
    setting = drawn(3, 48).setting
    candidate, proposal = search(setting, filler=filler_of(setting)).winner
    assert candidate.schedule == "zb-2p"
    assert proposal.step < 1.28


@pytest.mark.slow
def test_other_cuts_are_simulated_that_are_estimated_to_be_slower_than_the_best():
    """SDXL in 25.4 GiB: the cuts with the best estimate take 1.618 s, a layer away 1.594."""
    setting = with_memory(memory_sizes.setting_of("sdxl"), round(25.35 * 2**30))
    chains = search(replace(setting, given=Given(schedule="1f1b")), filler=filler_of(setting))
    assert chains.winner[0].starts == (0, 27, 52, 76)
    assert chains.winner[1].step < 1.594


def test_a_verdict_goes_from_process_to_process():
    """`make searches` runs two; a setting that has been planned with holds functions."""
    one = drawn(0, 9)
    found = search(one.setting)
    sent = pickle.loads(pickle.dumps(replace(one, setting=found.judge.setting)))
    assert sent == one
    assert search(sent.setting).winner == found.winner


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
