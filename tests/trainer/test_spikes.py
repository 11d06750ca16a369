"""The rule that calls a step a spike."""

import json
import random

import pytest

from diffusionpipe.trainer.recipe import OnSpike
from diffusionpipe.trainer.step.spikes import LEAST, WINDOW, Spikes, kept_values


def noisy(number, seed=0, spread=0.1):
    source = random.Random(seed)
    return [source.lognormvariate(0, spread) for _ in range(number)]


def fed(values, reaction=OnSpike.SKIP):
    spikes = Spikes(reaction)
    for value in values:
        assert spikes.judge(value, value) is None
    return spikes


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.1, 0.25])
def test_usual_noise_is_no_spike_and_ten_times_the_usual_is_one(spread):
    spikes = fed(noisy(1000, spread=spread))
    assert spikes.judge(1.0, 1.0) is None
    found = spikes.judge(10.0, 1.0)
    assert found is not None
    assert found.startswith("loss=10 is ")
    both = spikes.judge(10.0, 20.0)
    assert both is not None
    assert " and gradient_norm=20 is " in both


def test_small_steps_up_are_no_spikes_even_without_noise():
    assert fed([1.0] * LEAST).judge(1.9, 1.0) is None
    assert fed([1.0] * LEAST).judge(2.1, 1.0) is not None


def test_nothing_is_a_spike_before_there_are_enough_values_or_where_none_is_wanted():
    assert fed([1.0] * (LEAST - 1)).judge(1e6, 1e6) is None
    assert fed([1.0] * WINDOW, OnSpike.NONE).judge(1e6, 1e6) is None


def test_spikes_do_not_become_usual():
    spikes = fed([1.0] * LEAST)
    assert all(spikes.judge(100.0, 1.0) is not None for _ in range(200))


def test_a_checkpoint_keeps_the_values_exactly():
    spikes = fed(noisy(150))
    state = json.loads(json.dumps(spikes.state()))
    again = Spikes(OnSpike.SKIP, kept_values(state))
    assert again.state() == spikes.state() == state
    assert Spikes(OnSpike.NONE).state() == {}
    assert kept_values({"step": 3}) == {}
