"""The trend of noisy numbers: the chances of white noise, and curves that fall."""

from itertools import permutations
from random import Random

import pytest

from diffusionpipe.workflows.report.metrics import FEW_STEPS, FEW_VALIDATIONS, Metrics, learning_of
from diffusionpipe.workflows.report.trend import MOST_CHANCE, _chance, trend


def run_of(losses, validations=()):
    rows = [{"step": float(step), "loss": loss} for step, loss in enumerate(losses, 1)]
    return Metrics(rows + [{"step": 10.0 * n, "validation_loss": loss} for n, loss in enumerate(validations, 1)])


def word_of(losses, validations=()):
    return learning_of(run_of(losses, validations))["word"]


@pytest.mark.parametrize("count", range(2, 8))
def test_the_chance_is_that_of_all_orders(count):
    balances = [
        sum((b > a) - (b < a) for i, a in enumerate(order) for b in order[i + 1 :])
        for order in permutations(range(count))
    ]
    for balance in set(map(abs, balances)) - {0}:
        assert _chance(balance, count) == pytest.approx(sum(abs(b) >= balance for b in balances) / len(balances))


@pytest.mark.parametrize("steps", [15, 100, 1000])
def test_white_noise_is_called_learning_or_not_in_less_than_one_run_of_a_hundred(steps):
    random = Random(steps)
    runs = 300 if steps == 1000 else 1000
    drawn = (random.gauss, lambda mean, spread: mean + spread * random.expovariate(1.0))
    words = [word_of([drawn[run % 2](1.0, 0.1) for _ in range(steps)]) for run in range(runs)]
    said = [word for word in words if word not in ("It cannot be seen", "Too early to say")]
    assert len(said) < 0.01 * runs
    assert steps >= FEW_STEPS or set(words) == {"Too early to say"}


def test_white_noise_of_validations_is_not_called_learning_either():
    random = Random(5)
    for count in (2, FEW_VALIDATIONS, 12, 40):
        runs = [[random.gauss(1.0, 0.1) for _ in range(count)] for _ in range(1000)]
        words = [word_of([1.0] * FEW_STEPS, held_out) for held_out in runs]
        assert sum(word not in ("It cannot be seen", "Too early to say") for word in words) < 10


@pytest.mark.parametrize("steps", [30, 100, 1000])
@pytest.mark.parametrize("shape", ["line", "half-life of a fifth", "power law"])
def test_a_loss_that_falls_is_seen(steps, shape):
    random = Random(7)
    curve = {"line": lambda x: 1 - 0.3 * x, "half-life of a fifth": lambda x: 0.7 + 0.3 * 0.5 ** (5 * x),
             "power law": lambda x: 0.3 + 0.7 / (1 + 20 * x) ** 0.5}[shape]  # fmt: skip
    for _ in range(50):
        losses = [curve(step / steps) + random.gauss(0, 0.1 if steps == 1000 else 0.05) for step in range(steps)]
        assert word_of(losses) in ("Yes", "It has"), losses


def test_a_loss_that_rises_and_one_that_rises_again_are_seen():
    random = Random(11)
    noise = [random.gauss(0, 0.05) for _ in range(200)]
    assert word_of([1 + step / 200 + one for step, one in enumerate(noise)]) == "No"
    assert word_of([1 + abs(step - 70) / 100 + one for step, one in enumerate(noise)]) in ("It was", "No")
    assert word_of([1 + abs(step - 140) / 100 + one for step, one in enumerate(noise)]) == "It was"


def test_few_steps_are_counted():
    found = learning_of(run_of([1.047 - step / 2000 for step in range(15)]))
    assert found["word"] == "Too early to say"
    assert "15 steps" in "".join(part if isinstance(part, str) else part["text"] for part in found["text"])


def test_equal_losses_have_no_trend_and_many_are_read_fast():
    assert trend([1.0] * 100) == trend([]) == trend([1.0]) == 0
    assert trend([1 - 1e-9 * step for step in range(100_000)]) == -1
    assert 0 < MOST_CHANCE < 0.01
