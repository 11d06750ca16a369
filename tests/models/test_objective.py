import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_loss_weighting_for_sd3
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.special import betaincinv

from diffusionpipe.errors import ModelError, RecipeError
from diffusionpipe.models.objectives.beta_quantile import beta_quantile
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings, Prediction, TimeSampling
from diffusionpipe.models.objectives.objective_settings import LossKind, Weighting

CONFIGS = {
    "defaults": {},
    "Stable Diffusion": {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"},
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
    "zero terminal SNR": {"rescale_betas_zero_snr": True},
    "50 steps of a list": {"num_train_timesteps": 50, "trained_betas": [0.01 * i for i in range(1, 51)]},
}
DTYPES = [torch.float32, torch.float64]


def _batch(dtype, batch=64):
    generator = torch.Generator().manual_seed(1)
    latents, noise = torch.randn(2, batch, 4, 2, 2, generator=generator, dtype=dtype)
    return latents, noise, torch.rand(batch, generator=generator)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("prediction", [Prediction.EPSILON, Prediction.V_PREDICTION])
def test_noise_and_targets_are_exactly_those_of_diffusers(config, dtype, prediction):
    scheduler = DDPMScheduler(**config)
    # Another scheduler's configuration: what does not concern the betas has no effect.
    objective = Objective(
        ObjectiveSettings(prediction=prediction), {**config, "skip_prk_steps": True, "_class_name": "DDIMScheduler"}
    )
    latents, noise, time = _batch(dtype)
    noisy, timesteps, target, weight = objective.add_noise(latents, noise, time)
    assert timesteps.dtype == torch.int64
    assert torch.equal(timesteps, (time * scheduler.config.num_train_timesteps).floor().long())
    assert torch.equal(noisy, scheduler.add_noise(latents, noise, timesteps))
    velocity = scheduler.get_velocity(latents, noise, timesteps)
    assert torch.equal(target, noise if prediction is Prediction.EPSILON else velocity)
    assert torch.equal(weight, torch.ones(64))


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flow_is_exactly_that_of_diffusers(shift, dtype):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    latents, noise, _ = _batch(dtype)
    picked = torch.arange(64) * 15
    objective = Objective(ObjectiveSettings(prediction=Prediction.FLOW_MATCHING), {})
    noisy, timesteps, target, weight = objective.add_noise(latents, noise, scheduler.sigmas[picked])
    assert timesteps.dtype == torch.float32
    assert torch.equal(timesteps, scheduler.timesteps[picked])
    assert torch.equal(noisy, scheduler.scale_noise(latents, scheduler.timesteps[picked], noise))
    assert torch.equal(target, noise - latents)
    assert torch.equal(weight, torch.ones(64))


def test_shifted_times_are_those_of_diffusers():
    settings = ObjectiveSettings(prediction=Prediction.FLOW_MATCHING, shift=3.0)
    times = FlowMatchEulerDiscreteScheduler(shift=1.0).sigmas.double()
    shifted = FlowMatchEulerDiscreteScheduler(shift=3.0).sigmas.double()
    assert torch.allclose(Objective(settings, {}).flow_time(times), shifted, rtol=0, atol=1e-7)


def test_logit_normal_times_have_the_stated_distribution():
    settings = ObjectiveSettings(
        prediction=Prediction.FLOW_MATCHING, time_sampling=TimeSampling.LOGIT_NORMAL, logit_mean=0.5, logit_std=2.0
    )
    uniform = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    logits = torch.logit(Objective(settings, {}).flow_time(uniform))
    assert logits.mean().item() == pytest.approx(0.5, abs=1e-3)
    assert logits.std().item() == pytest.approx(2.0, abs=1e-2)
    assert bool((logits.diff() > 0).all())


SETTINGS = {
    **{
        f"flow, {sampling}": {"prediction": Prediction.FLOW_MATCHING, "time_sampling": sampling}
        for sampling in TimeSampling
        if sampling is not TimeSampling.SPEED
    },
    **{
        f"flow, {weighting}": {"prediction": Prediction.FLOW_MATCHING, "weighting": weighting}
        for weighting in (Weighting.SIGMA_SQRT, Weighting.COSMAP)
    },
    "v, debiased": {"prediction": Prediction.V_PREDICTION, "weighting": Weighting.DEBIASED},
    "epsilon": {"prediction": Prediction.EPSILON, "min_snr_gamma": 5.0},
    "v, speed": {"prediction": Prediction.V_PREDICTION, "time_sampling": TimeSampling.SPEED},
    "v": {"prediction": Prediction.V_PREDICTION, "min_snr_gamma": 5.0},
}


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (0.29, 0.7)], ids=str)
@pytest.mark.parametrize("given_settings", SETTINGS.values(), ids=SETTINGS)
@given(time=st.floats(0, 1, exclude_max=True, width=32))
@example(time=0.0)
@example(time=1 - 2**-24)
def test_any_uniform_number_gives_finite_noise_and_a_timestep_in_range(given_settings, bounds, time):
    settings = ObjectiveSettings(**given_settings, time_range=bounds)
    is_flow = settings.prediction is Prediction.FLOW_MATCHING
    latents, noise, _ = _batch(torch.float32, 1)
    written = Objective(settings, CONFIGS["zero terminal SNR"]).add_noise(latents, noise, torch.tensor([time]))
    assert all(bool(tensor.isfinite().all()) for tensor in written)
    low, high = (1000 * bound for bound in bounds)
    assert low - 1e-4 <= written[1].item() <= high + 1e-4 - (not is_flow)


@pytest.mark.parametrize("prediction", [Prediction.EPSILON, Prediction.V_PREDICTION])
def test_timesteps_of_a_range_are_evenly_those_in_it(prediction):
    objective = Objective(ObjectiveSettings(prediction=prediction, time_range=(0.29, 0.7)), {})
    uniform = (torch.arange(41_000, dtype=torch.float64) + 0.5).float() / 41_000
    _, timesteps, _, _ = objective.add_noise(torch.zeros(41_000, 1), torch.zeros(41_000, 1), uniform)
    values, counts = timesteps.unique(return_counts=True)
    assert values.tolist() == list(range(290, 700))
    assert (counts - 100).abs().max() <= 1


@pytest.mark.parametrize("parameters", [(2, 2), (1, 1), (0.5, 0.5), (0.1, 0.1), (0.1, 100), (100, 3), (1.5, 0.3)])
def test_the_table_of_beta_times_is_the_inverse_that_scipy_has(parameters):
    generator = torch.Generator().manual_seed(0)
    share = torch.rand(20_000, generator=generator, dtype=torch.float64)
    small = 10 ** (-7.3 * torch.rand(20_000, generator=generator, dtype=torch.float64))
    share = torch.cat([share, small, 1 - small]).sort().values
    found = beta_quantile(share, *parameters)
    assert (found - torch.from_numpy(betaincinv(*parameters, share.numpy()))).abs().max() < 1e-9
    assert bool((found.diff() >= 0).all())


@pytest.mark.parametrize("prediction", [Prediction.EPSILON, Prediction.V_PREDICTION])
def test_min_snr_weighs_every_prediction_as_the_capped_error_of_the_latents(prediction):
    """Hang et al.: the loss is min(snr, gamma) times the squared error of the latents that a prediction implies."""
    objective = Objective(ObjectiveSettings(prediction=prediction, min_snr_gamma=5.0), {})
    latents, noise, time = _batch(torch.float64)
    noisy, timesteps, target, weight = objective.add_noise(latents, noise, time)
    wrong = target + 0.1
    alpha = objective.alphas_cumprod[timesteps].double().reshape(-1, 1, 1, 1)
    if prediction is Prediction.EPSILON:
        implied = (noisy - (1 - alpha).sqrt() * wrong) / alpha.sqrt()
    else:
        implied = alpha.sqrt() * noisy - (1 - alpha).sqrt() * wrong
    snr = (alpha / (1 - alpha)).flatten()
    expected = snr.clamp(max=5) * (implied - latents).square().flatten(1).mean(1)
    assert torch.allclose(objective.loss(wrong, target, weight), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("weighting", [Weighting.NONE, Weighting.SIGMA_SQRT, Weighting.COSMAP])
def test_weights_of_flow_times_are_those_of_diffusers(weighting):
    settings = ObjectiveSettings(prediction=Prediction.FLOW_MATCHING, weighting=weighting, shift=3.0)
    latents, noise, time = _batch(torch.float64)
    _, timesteps, _, weight = Objective(settings, {}).add_noise(latents, noise, time.double())
    sigmas = timesteps / 1000
    assert torch.allclose(weight, compute_loss_weighting_for_sd3(weighting, sigmas).double(), rtol=1e-6, atol=0)
    formula = {"none": torch.ones_like(sigmas), "sigma_sqrt": 1 / sigmas**2}
    cosmap = 2 / (torch.pi - 2 * torch.pi * sigmas + 2 * torch.pi * sigmas**2)
    assert torch.allclose(weight, formula.get(weighting, cosmap), rtol=1e-12, atol=0)


def test_the_weight_of_no_noise_is_that_of_one_step():
    settings = ObjectiveSettings(prediction=Prediction.FLOW_MATCHING, weighting=Weighting.SIGMA_SQRT)
    latents, noise, _ = _batch(torch.float32, 2)
    weight = Objective(settings, {}).add_noise(latents, noise, torch.tensor([0.0, 0.0005]))[3]
    assert weight.tolist() == pytest.approx([1e6, 1e6])


def test_debiased_weights_weigh_the_error_of_the_noise_alike_for_both_predictions():
    """Yu et al.: the weight of the noise's squared error is 1 / sqrt(snr), whatever is predicted."""
    latents, noise, time = _batch(torch.float64)
    for prediction in (Prediction.EPSILON, Prediction.V_PREDICTION):
        objective = Objective(ObjectiveSettings(prediction=prediction, weighting=Weighting.DEBIASED), {})
        noisy, timesteps, target, weight = objective.add_noise(latents, noise, time)
        wrong = target + 0.1
        alpha = objective.alphas_cumprod[timesteps].double().reshape(-1, 1, 1, 1)
        implied = wrong if prediction is Prediction.EPSILON else alpha.sqrt() * wrong + (1 - alpha).sqrt() * noisy
        snr = (alpha / (1 - alpha)).flatten()
        expected = snr**-0.5 * (implied - noise).square().flatten(1).mean(1)
        assert torch.allclose(objective.loss(wrong, target, weight), expected, rtol=1e-5, atol=0)


def test_debiased_weights_need_a_signal_at_every_step():
    settings = {"weighting": Weighting.DEBIASED, "prediction": Prediction.EPSILON}
    with pytest.raises(ModelError, match=r"infinite where the scheduler leaves no signal \(rescale_betas_zero_snr"):
        Objective(ObjectiveSettings(**settings), CONFIGS["zero terminal SNR"])


@pytest.mark.parametrize("delta", [1e-3, 0.1, 2.0])
def test_huber_loss_and_its_gradient_are_those_of_the_formula(delta):
    objective = Objective(ObjectiveSettings(loss=LossKind.HUBER, huber_delta=delta), {})
    target, errors, _ = _batch(torch.float64)
    errors = errors * 10 ** torch.linspace(-3, 1, 64, dtype=torch.float64).reshape(-1, 1, 1, 1)
    prediction, weight = (target + errors).requires_grad_(), torch.linspace(0.5, 2, 64, dtype=torch.float64)
    loss = objective.loss(prediction, target, weight)
    error = prediction.detach() - target
    root = (error**2 + delta**2).sqrt()
    assert torch.allclose(loss, weight * (2 * delta * (root - delta)).flatten(1).mean(1), rtol=1e-9, atol=1e-15)
    (gradient,) = torch.autograd.grad(loss.sum(), prediction)
    expected = weight.reshape(-1, 1, 1, 1) * 2 * delta * error / root / error[0].numel()
    assert torch.allclose(gradient, expected, rtol=1e-9, atol=1e-15)


def test_huber_loss_of_small_errors_is_their_square_in_float32_too():
    objective = Objective(ObjectiveSettings(loss=LossKind.HUBER, huber_delta=1.0), {})
    assert objective.loss(torch.full((1, 4), 1e-5), torch.zeros(1, 4), torch.ones(1)).item() == pytest.approx(1e-10)


def test_loss_is_the_weighted_mean_square_of_each_sample():
    objective = Objective(ObjectiveSettings(), {})
    prediction, target = torch.tensor([[[1.0, 3.0]], [[2.0, 2.0]]]), torch.zeros(2, 1, 2)
    assert objective.loss(prediction, target, torch.tensor([1.0, 0.5])).tolist() == [5.0, 2.0]


@pytest.mark.parametrize(
    ("prediction", "target", "expected"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float64, torch.float64, torch.float64),
    ],
    ids=str,
)
def test_loss_is_never_narrower_than_float32(prediction, target, expected):
    objective = Objective(ObjectiveSettings(), {})
    loss = objective.loss(torch.ones(2, 3, dtype=prediction), torch.ones(2, 3, dtype=target), torch.ones(2))
    assert loss.dtype == expected


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"prediction": Prediction.FLOW_MATCHING, "min_snr_gamma": 5.0}, "min_snr_gamma"),
        ({"min_snr_gamma": 0.0}, "min_snr_gamma must be positive"),
        ({"time_sampling": TimeSampling.LOGIT_NORMAL}, "logit_normal needs flow_matching, not epsilon; remove it"),
        ({"shift": 3.0}, "shift needs flow_matching, not epsilon; remove it"),
        ({"prediction": Prediction.FLOW_MATCHING, "logit_mean": 1.0}, 'set time_sampling = "logit_normal" or remove'),
        ({"prediction": Prediction.FLOW_MATCHING, "shift": 0.0}, "must be positive"),
        ({"weighting": Weighting.COSMAP}, "weighting: cosmap needs flow_matching, not epsilon; remove it"),
        (
            {"prediction": Prediction.FLOW_MATCHING, "weighting": Weighting.DEBIASED},
            "weighting: debiased needs epsilon or v_prediction, not flow_matching; remove it",
        ),
        ({"weighting": Weighting.DEBIASED, "min_snr_gamma": 5.0}, "two weights of one sample; remove one"),
        ({"huber_delta": 0.5}, 'huber_delta: it has no effect for the l2 loss; set loss = "huber" or remove it'),
        ({"loss": LossKind.HUBER, "huber_delta": 0.0}, "huber_delta: 0 must be positive, e.g. 0.1"),
        ({"time_sampling": TimeSampling.BETA}, "beta needs flow_matching, not epsilon; remove it"),
        ({"time_range": (0.5, 0.5)}, "time_range: .0.5, 0.5. is not .from, to. with"),
    ],
)
def test_a_setting_without_effect_or_sense_is_refused(settings, named):
    with pytest.raises(RecipeError, match=named):
        ObjectiveSettings(**settings)


@pytest.mark.parametrize("betas", [[], 0.5, [[0.1, 0.2]]])
def test_a_scheduler_whose_betas_are_no_list_of_all_steps_is_refused(betas):
    with pytest.raises(ModelError, match="are not 1000 numbers from 0 to 1"):
        Objective(ObjectiveSettings(prediction=Prediction.EPSILON), {"trained_betas": betas})
