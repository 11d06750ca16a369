"""Noise levels, predictions and times are those of a scheduler's own class; other classes are refused by name."""

import ast
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.schedulers import scheduling_ddpm

from diffusionpipe.errors import ModelError, RecipeError
from diffusionpipe.models.objectives.noise_levels import DISCRETE, FLOWS, alphas_cumprod
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings, Prediction
from diffusionpipe.trainer.inference.denoise import SamplingSettings, build_scheduler, draw

# Schedulers of diffusers 0.39 call numpy in a way that is old, thousands of times.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

HERE = [name for name in DISCRETE if name != "DPMSolverSDEScheduler"]
"""That class needs torchsde."""
NAMES = [pytest.param(name, marks=pytest.mark.slow if name.startswith("KDPM2") else ()) for name in HERE]
"""Those of KDPM2 take ten times as long as the others."""


def all_classes():
    """Every scheduler in the files of the package, also of those whose extras are not installed."""
    folder = Path(scheduling_ddpm.__file__).parent
    found = set()
    for path in folder.rglob("scheduling_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Scheduler"):
                found.add(node.name)
    return sorted(found)


UNKNOWN = [name for name in all_classes() if name not in (*DISCRETE, *FLOWS)]


def test_every_class_is_known_or_refused():
    assert {*DISCRETE, *FLOWS} <= set(all_classes())
    assert len(UNKNOWN) >= 20


@pytest.mark.parametrize(("name", "shown"), [("../../etc/passwd", "'../../etc/passwd'"), ("A\n[]", r"'A\n[]'")])
def test_a_name_that_is_none_is_refused_on_one_line_with_its_file(name, shown):
    with pytest.raises(ModelError) as raised:
        Objective(ObjectiveSettings(), {"_class_name": name})
    assert str(raised.value).startswith(f"scheduler_config.json: the scheduler {shown} is not supported: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_classes_are_refused_by_name(name):
    with pytest.raises(ModelError, match=f"the scheduler {name} is not supported"):
        Objective(ObjectiveSettings(), {"_class_name": name})
    with pytest.raises(RecipeError, match=f"scheduler {name} is not supported|no scheduler '{name}'"):
        build_scheduler({"_class_name": "DDIMScheduler"}, name)


ENDS_IN_NOISE = ("DEISMultistepScheduler", "SASolverScheduler", "TCDScheduler")
BETAS = (
    {},
    {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
    {"beta_schedule": "squaredcos_cap_v2"},
)


@pytest.mark.parametrize(
    "betas",
    [pytest.param(BETAS[0], marks=pytest.mark.slow), BETAS[1], pytest.param(BETAS[2], marks=pytest.mark.slow)],
    ids=["defaults of the class", "scaled_linear", "cosine"],
)
@pytest.mark.parametrize("name", NAMES)
def test_noise_levels_are_those_of_the_classs_own_add_noise(name, betas):
    kind = getattr(diffusers, name)
    try:
        scheduler = kind(**betas)
    except NotImplementedError:
        pytest.skip("the class has no such betas")
    if not hasattr(scheduler, "add_noise"):
        pytest.skip("the class adds no noise")
    alphas = alphas_cumprod({"_class_name": name, **betas}).double()
    scheduler.set_timesteps(50)
    times = scheduler.timesteps.unique()
    times = times[times == times.round()].long() if times.is_floating_point() else times
    ones = torch.ones(len(times), 1, dtype=torch.float64)
    whole = times.to(scheduler.timesteps.dtype)
    signal, noise = (scheduler.add_noise(x, n, whole) for x, n in ((ones, 0 * ones), (0 * ones, ones)))
    levels = (signal / (signal**2 + noise**2).sqrt()).flatten().double() ** 2
    assert len(times) > 1
    assert torch.allclose(levels, alphas[times], rtol=1e-5, atol=1e-6)


def test_videos_of_cogvideox_have_less_signal():
    plain = alphas_cumprod({"_class_name": "CogVideoXDDIMScheduler", "snr_shift_scale": 1.0})
    shifted = alphas_cumprod({"_class_name": "CogVideoXDDIMScheduler"})
    assert torch.allclose(shifted, plain / (3 + (1 - 3) * plain), atol=1e-6)


def levels_at(objective, time):
    """The cumulative alpha at a time between two whole ones, as sigmas are interpolated."""
    sigmas = ((1 - objective.alphas_cumprod) / objective.alphas_cumprod).double().sqrt()
    low = min(int(time), len(sigmas) - 2)
    share = float(time) - low
    sigma = sigmas[low] if share == 0 else torch.exp((1 - share) * sigmas[low].log() + share * sigmas[low + 1].log())
    return 1 / (1 + sigma**2)


@pytest.mark.parametrize("prediction", ["epsilon", pytest.param("v_prediction", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name in NAMES if name.values != ("CogVideoXDPMScheduler",)])
def test_the_exact_denoiser_of_one_point_draws_it(name, prediction):
    config = {"_class_name": name, "prediction_type": prediction, "timestep_spacing": "leading", "clip_sample": False}
    config |= {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "set_alpha_to_one": True}
    config |= {"timestep_spacing": "trailing"} if "CogVideoX" in name else {}
    objective = Objective(ObjectiveSettings(prediction=Prediction(prediction)), config)
    point = torch.linspace(-0.8, 0.7, 4).reshape(1, 4, 1, 1)

    def predict(noisy, time):
        alpha = levels_at(objective, time)
        noise = (noisy - alpha.sqrt() * point) / (1 - alpha).sqrt()
        return (noise if prediction == "epsilon" else alpha.sqrt() * noise - (1 - alpha).sqrt() * point).float()

    # Some classes end at their lowest noise level in place of 0, and leave its noise in what they draw.
    left = 4 * (1 / levels_at(objective, 0) - 1).sqrt() if name in ENDS_IN_NOISE else 1e-3
    assert_draws(point, predict, config, float(left))


def test_a_class_whose_steps_need_more_than_a_prediction_draws_nothing_here():
    with pytest.raises(RecipeError, match="CogVideoXDPMScheduler cannot be drawn with: its steps also need"):
        build_scheduler({"_class_name": "CogVideoXDPMScheduler"})


@pytest.mark.parametrize("name", FLOWS)
def test_the_exact_flow_of_one_point_draws_it(name):
    config = {"_class_name": name, "shift": 3.0}
    objective = Objective(ObjectiveSettings(prediction=Prediction.FLOW_MATCHING, shift=None), config)
    point = torch.linspace(-0.8, 0.7, 4).reshape(1, 4, 1, 1)
    assert objective.shift.static == 3.0

    def predict(noisy, time):
        sigma = float(time) / objective.num_timesteps
        return (noisy - point) / sigma

    assert_draws(point, predict, config)


def assert_draws(point, predict, config, tolerance=1e-3):
    settings = SamplingSettings(steps=50, guidance=1.0, seed=0, scheduler=config)
    found = draw(predict, settings, num_samples=1, latent_shape=(4, 1, 1), device=torch.device("cpu"))
    assert torch.allclose(found, point, atol=tolerance)
