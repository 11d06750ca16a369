"""The batch from which pipelines of copies win, against a search over all batches; what is not known yet."""

import random

import pytest

from diffusionpipe.costs.noise import (
    LEAST_MEASUREMENTS,
    measurements_of,
    noise_scale,
    samples_with,
    steps_with,
    switch_batch,
)
from diffusionpipe.planner.choosing.quality import switch_in

MOST = 4000


def searched(scale, stages, rate_of_pipelines, rate_of_copies):
    """The first batch of all from 1 on after which E(B) / rate is always less than that of M times the batch."""
    wins = [
        (1 + batch / scale) / rate_of_pipelines(batch) < (1 + stages * batch / scale) / rate_of_copies(stages * batch)
        for batch in range(1, MOST + 1)
    ]
    losses = [batch for batch, is_won in enumerate(wins, start=1) if not is_won]
    last = losses[-1] if losses else 0
    return None if last == MOST else last + 1


@pytest.mark.parametrize("seed", range(20))
def test_the_switch_is_the_one_that_a_search_over_all_batches_finds(seed):
    rng = random.Random(seed)
    scale, stages = rng.uniform(5, 300), rng.choice([2, 3, 4, 8])
    speedup = rng.uniform(0.2, 1.2)
    found = searched(scale, stages, lambda batch: 100.0 * speedup, lambda batch: 100.0)
    switch = switch_batch(scale, stages, speedup)
    if switch is None or switch > MOST:
        assert found is None
    else:
        assert found == int(switch) + 1
    # The same with throughputs that rise with the batch, as a table of rates.
    half, rate = rng.uniform(5, 200), rng.uniform(0.5, 1.0)
    copies = {batch: 100 * batch / (batch + half * stages) for batch in range(1, stages * MOST + 1)}
    pipelines = {batch: 100 * rate * batch / (batch + half) for batch in range(1, MOST + 1)}
    assert switch_in(pipelines, copies, stages, scale) == searched(
        scale, stages, pipelines.__getitem__, copies.__getitem__
    )


def test_some_cases_switch_at_once_some_later_and_some_never():
    found = {searched(50, 2, lambda _, r=r: r, lambda _: 1.0) for r in (1.1, 0.7, 0.4)}
    assert found == {1, 38, None}  # 50 x 0.3 / 0.4 = 37.5


def test_few_or_negative_measurements_are_not_known():
    assert noise_scale([(1.0, 8.0)] * LEAST_MEASUREMENTS) == 8.0
    assert noise_scale([(1.0, 8.0)] * (LEAST_MEASUREMENTS - 1)) is None
    assert noise_scale([(-1.0, 8.0)] * 100) is None
    assert noise_scale([(1.0, -8.0)] * 100) is None
    assert noise_scale([(-1.0, 8.0), (3.0, 8.0)] * 50) == 8.0  # both are averaged before the division


def test_steps_and_samples_are_two_forms_of_one_curve():
    for batch in (1, 16, 300):
        assert steps_with(batch, 40.0) * batch == pytest.approx(40.0 * samples_with(batch, 40.0))


def test_only_lines_with_both_numbers_are_measurements():
    rows = [{"loss": 1.0}, {"noise/gradient_square": 1.0, "noise/trace": 2.0}, {"noise/gradient_square": None}]
    assert measurements_of(rows) == [(1.0, 2.0)]
