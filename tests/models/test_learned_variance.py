"""The variances of denoising steps: diffusers' formula, and the variational bound against one written out."""

from math import exp, log, log2, sqrt

import pytest
import torch
from diffusers import DDPMScheduler
from scipy.stats import norm

from diffusionpipe.models.objectives.learned_variance import Noised, log_variance, variance_loss
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings, Prediction

STEPS = 50
SCHEDULER = DDPMScheduler(
    num_train_timesteps=STEPS, beta_schedule="squaredcos_cap_v2", variance_type="learned_range", clip_sample=False
)
ALPHAS = SCHEDULER.alphas_cumprod.double()


def test_variances_are_those_that_diffusers_draws_with():
    values = torch.linspace(-1.2, 1.2, 5).reshape(5, 1)
    for t in range(STEPS):
        ours = log_variance(values.double(), SCHEDULER.alphas_cumprod, torch.full((5,), t))
        theirs = SCHEDULER._get_variance(t, predicted_variance=values)
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-5, atol=1e-5)


def bound_of(x, noisy, noise, value, t):
    """Of one number, in bits, after Ho et al. (2020), equations 5 to 8 and 13."""
    now, before = float(ALPHAS[t]), float(ALPHAS[t - 1]) if t else 1.0
    beta = 1 - now / before
    tilde = max((1 - before) / (1 - now) * beta, 1e-20)
    clean = (noisy - sqrt(1 - now) * noise) / sqrt(now)
    mean, true = (
        sqrt(before) * beta / (1 - now) * start + sqrt(now / before) * (1 - before) / (1 - now) * noisy
        for start in (clean, x)
    )
    share = (value + 1) / 2
    variance = exp(share * log(beta) + (1 - share) * log(tilde))
    if t == 0:
        spread = norm(mean, sqrt(variance))
        upper = 1 if x > 0.999 else spread.cdf(x + 1 / 255)
        lower = 0 if x < -0.999 else spread.cdf(x - 1 / 255)
        return -log2(max(upper - lower, 1e-12))
    return (log(variance / tilde) + (tilde + (true - mean) ** 2) / variance - 1) / 2 / log(2)


@pytest.mark.parametrize("t", [0, 1, 25, STEPS - 1])
def test_the_bound_is_the_formula_written_out(t):
    generator = torch.Generator().manual_seed(t)
    pixels, noisy, noise, values = torch.rand((4, 2, 1, 3, 1), generator=generator, dtype=torch.float64) * 2 - 1
    pixels[0, 0, 0], pixels[1, 0, 0] = -1, 1  # the outermost levels
    noised = Noised(pixels=pixels, noisy=noisy, noise=noise, timesteps=torch.tensor([t, t]))
    found = variance_loss(values, noised, SCHEDULER.alphas_cumprod)
    for row in range(2):
        columns = (part[row].flatten().tolist() for part in (pixels, noisy, noise, values))
        bits = [bound_of(*numbers, t) for numbers in zip(*columns, strict=True)]
        assert float(found[row]) == pytest.approx(1e-3 * STEPS * sum(bits) / 3, rel=1e-9)


@pytest.mark.parametrize("kind", [Prediction.EPSILON, Prediction.V_PREDICTION])
def test_the_bound_moves_the_variances_alone(kind):
    settings = ObjectiveSettings(prediction=kind, has_learned_range=True)
    objective, plain = Objective(settings, SCHEDULER.config), Objective(ObjectiveSettings(prediction=kind), {})
    generator = torch.Generator().manual_seed(0)
    pixels, noise = torch.rand((2, 2, 3, 4, 4), generator=generator, dtype=torch.float64) * 2 - 1
    noisy, timesteps, target, weight = objective.add_noise(pixels, noise, torch.tensor([0.3, 0.8]))
    prediction = torch.rand((2, 6, 4, 4), generator=generator, dtype=torch.float64, requires_grad=True)
    (whole,) = torch.autograd.grad(
        objective.hybrid_loss(prediction, target, weight, pixels, noisy, timesteps).sum(), prediction
    )
    (simple,) = torch.autograd.grad(plain.loss(prediction, target, weight).sum(), prediction)
    assert torch.equal(whole[:, :3], simple[:, :3])
    assert not simple[:, 3:].any()
    assert whole[:, 3:].abs().min() > 0


@pytest.mark.parametrize("kind", [Prediction.EPSILON, Prediction.V_PREDICTION])
def test_a_true_prediction_with_the_true_variance_costs_nothing(kind):
    """Then the predicted step is the true one."""
    objective = Objective(ObjectiveSettings(prediction=kind, has_learned_range=True), SCHEDULER.config)
    generator = torch.Generator().manual_seed(0)
    pixels, noise = torch.rand((2, 2, 3, 4, 4), generator=generator, dtype=torch.float64) * 2 - 1
    noisy, timesteps, target, weight = objective.add_noise(pixels, noise, torch.tensor([0.3, 0.8]))
    prediction = torch.cat([target, -torch.ones_like(target)], dim=1)
    loss = objective.hybrid_loss(prediction, target, weight, pixels, noisy, timesteps)
    assert loss.abs().max() < 1e-6  # abar is float32 in the noisy pictures
