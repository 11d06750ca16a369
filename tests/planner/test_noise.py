"""An error in one measured number moves a plan's figures by no more than that number is off."""

from dataclasses import replace
from random import Random

import pytest
from planner import synthetic

from diffusionpipe.errors import ConfigError
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.proposal import propose

SIZES = (1, 2, 4)
NOISE = 1.02


def measured(random: Random):
    """A profile of five layers with fixed costs and noise, some of whose times fall at larger sizes."""
    known = synthetic.chain([1.0] * 5, frozen=random.choice((0.2, 2.0)), elements=10**6)

    def times(values):
        fixed, slope = random.choice((0.1, 1.0, 5.0)), random.random()
        return tuple(random.uniform(0.95, 1.05) * (fixed + slope * n) if any(values) else 0.0 for n in SIZES)

    layers = tuple(
        replace(
            layer,
            forward=times(layer.forward),
            input_grad=times(layer.input_grad),
            weight_grad=times(layer.weight_grad),
            activation=tuple(random.randint(8, 12) * 10**6 * n for n in SIZES),
            workspace=tuple(random.randint(1, 9) * 10**6 for _ in SIZES),
            kept=(),
        )
        for layer in known.layers
    )
    return replace(known, batch_sizes=SIZES, layers=layers)


def with_noise(profile, random: Random, columns):
    """The profile with one number of these columns 2 % off."""
    place, column, size = random.randrange(len(profile.layers)), random.choice(columns), random.randrange(len(SIZES))
    layer, factor = profile.layers[place], random.choice((NOISE, 1 / NOISE))
    values = list(getattr(layer, column))
    values[size] = type(values[size])(values[size] * factor)
    layers = list(profile.layers)
    layers[place] = replace(layer, **{column: tuple(values)})
    return replace(profile, layers=tuple(layers))


@pytest.mark.parametrize("seed", range(6))
def test_two_percent_in_one_time_move_the_step_by_at_most_three(seed):
    """Up to batches of eight times the largest size that was measured."""
    random = Random(seed)
    profile = measured(random)
    setting = Setting(
        profile=profile,
        cluster=synthetic.cluster(random.choice((1, 2, 3))),
        workload=synthetic.workload(random.choice((6, 12, 8 * SIZES[-1]))),
    )
    step = choose(setting).fastest.step
    for _ in range(2):
        noisy = with_noise(profile, random, ("forward", "input_grad", "weight_grad"))
        assert choose(replace(setting, profile=noisy)).fastest.step == pytest.approx(step, rel=0.03)


@pytest.mark.parametrize("seed", range(8))
def test_two_percent_in_one_number_of_bytes_move_the_peak_by_at_most_as_much(seed):
    random = Random(seed)
    profile, count = measured(random), random.choice((1, 2, 4))
    setting = Setting(profile=profile, cluster=synthetic.cluster(2), workload=synthetic.workload(8 * SIZES[-1]))
    candidate = Candidate(
        arrangement=Arrangement(data_parallel=1, units=2),
        schedule="1f1b",
        microbatches=count,
        starts=(0, random.randint(1, 4)),
        replicas=(1, 1),
    )
    layout = candidate.layout(setting)
    known = propose(setting, layout).memory
    noisy = propose(replace(setting, profile=with_noise(profile, random, ("activation", "workspace"))), layout).memory
    for one, other in zip(known, noisy, strict=True):
        assert other.total == pytest.approx(one.total, rel=0.02)


@pytest.mark.parametrize("seed", range(4))
def test_two_percent_in_one_number_of_bytes_cost_no_more_than_two_percent_of_the_memory(seed):
    random = Random(seed)
    profile, workload = measured(random), synthetic.workload(12)
    ample = Setting(profile=profile, cluster=synthetic.cluster(2), workload=workload)
    room = max(use.total for use in choose(ample).proposal.memory) * random.choice((0.8, 0.9, 1.01))
    noisy = with_noise(profile, random, ("activation", "workspace"))
    smaller, same = (synthetic.cluster(2, memory=memory / 1e9) for memory in (room / NOISE, room))
    try:
        enough = choose(replace(ample, cluster=smaller)).fastest.step
    except ConfigError:  # then nothing has to fit
        return
    assert choose(replace(ample, profile=noisy, cluster=same)).fastest.step <= 1.015 * enough
