"""Training times are distributed as the formulas say and as diffusers' schedulers shift them."""

import math

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from kit.covering import covering
from scipy.special import betainc

from diffusionpipe.errors import ModelError
from diffusionpipe.models.objectives.flow_shift import FlowShift, is_flow_scheduler, shift_of
from diffusionpipe.models.objectives.objective import (
    Objective,
    ObjectiveSettings,
    Prediction,
    TimeSampling,
    noise_layer,
)
from diffusionpipe.trainer.data.randomness import uniform

FLUX = {"use_dynamic_shifting": True, "shift": 3.0}
CONFIGS = {
    "none": {},
    "static": {"shift": 3.0},
    "dynamic": FLUX,
    "linear": {**FLUX, "time_shift_type": "linear", "base_image_seq_len": 64, "max_image_seq_len": 8192},
    "terminal": {**FLUX, "shift_terminal": 0.02, "max_shift": 0.9},
}
RESOLUTIONS = (256, 512, 1024)
"""A token is a square of 16 pixels."""


def config_of(name: str) -> dict[str, object]:
    return {"_class_name": "FlowMatchEulerDiscreteScheduler", **CONFIGS[name]}


def objective_of(name: str, sampling: TimeSampling = TimeSampling.UNIFORM, **others) -> Objective:
    settings = ObjectiveSettings(prediction=Prediction.FLOW_MATCHING, time_sampling=sampling, shift=None, **others)
    return Objective(settings, config_of(name))


def share_below(times: torch.Tensor, sampling: TimeSampling, *parameters: float) -> torch.Tensor:
    """The cumulative distribution of times before any shift, by formulas that the code does not use."""
    match sampling:
        case TimeSampling.UNIFORM:
            return times
        case TimeSampling.LOGIT_NORMAL:
            mean, deviation = parameters or (0.0, 1.0)
            return torch.special.ndtr((torch.logit(times) - mean) / deviation)
        case TimeSampling.MODE:
            # As diffusers' compute_density_for_timestep_sampling has it; 1 - u is uniform too.
            (scale,) = parameters or (1.29,)
            u = np.linspace(1, 0, 200_001)
            drawn = 1 - u - scale * (np.cos(math.pi * u / 2) ** 2 - 1 + u)
            return torch.from_numpy(np.interp(times, drawn, 1 - u))
        case TimeSampling.BETA:
            return torch.from_numpy(betainc(*(parameters or (2.0, 2.0)), times.numpy()))


@pytest.fixture(scope="module")
def drawn() -> torch.Tensor:
    """The numbers of 100,000 samples: 100 steps of 1,000."""
    steps = [uniform(seed=5, purpose="time", step=step, positions=range(1000), shape=()) for step in range(100)]
    return torch.cat(steps)


def times_of(objective: Objective, drawn: torch.Tensor, side: int) -> torch.Tensor:
    """The times that they become for a picture, sorted."""
    return objective.flow_time(drawn, (side // 16) ** 2).sort().values.double()


def distance(times: torch.Tensor, cumulative: torch.Tensor) -> float:
    """Kolmogorov and Smirnov's: the largest difference from a distribution, given at each of the times."""
    count = len(times)
    ranks = torch.arange(count + 1, dtype=torch.float64) / count
    return float(torch.maximum((cumulative - ranks[:-1]).abs(), (cumulative - ranks[1:]).abs()).max())


def factor_of(name: str, side: int) -> float:
    """By diffusers' own formula of mu."""
    config = FlowMatchEulerDiscreteScheduler(**CONFIGS[name]).config
    if not config.use_dynamic_shifting:
        return config.shift
    numbers = (config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift)
    mu = calculate_shift((side // 16) ** 2, *numbers)
    return math.exp(mu) if config.time_shift_type == "exponential" else mu


@pytest.mark.parametrize(
    ("sampling", "name", "side"),
    covering([one for one in TimeSampling if one is not TimeSampling.SPEED], tuple(CONFIGS), RESOLUTIONS),
)
def test_drawn_times_follow_the_formula(drawn, name, side, sampling):
    times = times_of(objective_of(name, sampling), drawn, side)
    terminal = CONFIGS[name].get("shift_terminal", 0.0)
    assert terminal <= times[0] <= times[-1] <= 1
    stretched = (times - terminal) / (1 - terminal)
    unshifted = stretched / (stretched + factor_of(name, side) * (1 - stretched))
    assert distance(times, share_below(unshifted, sampling)) < 0.01


SAMPLINGS = {
    "mean and deviation": (TimeSampling.LOGIT_NORMAL, {"logit_mean": -0.5, "logit_std": 2.0}),
    "no mode in the middle": (TimeSampling.MODE, {"mode_scale": -1.0}),
    "as steep as may be": (TimeSampling.MODE, {"mode_scale": 1.75}),
    "arcsine": (TimeSampling.BETA, {"beta_alpha": 0.5, "beta_beta": 0.5}),
    "near the noise": (TimeSampling.BETA, {"beta_alpha": 3.0, "beta_beta": 1.5}),
    "uniform": (TimeSampling.UNIFORM, {}),
}


@pytest.mark.parametrize(
    ("kind", "name", "bounds"),
    covering(tuple(SAMPLINGS), ("none", "static", "terminal"), ((0.0, 1.0), (0.25, 0.875))),
)
def test_times_with_parameters_and_a_range_follow_the_formula(drawn, name, kind, bounds):
    sampling, parameters = SAMPLINGS[kind]
    objective = objective_of(name, sampling, **parameters, time_range=bounds)
    times = times_of(objective, drawn, 512)
    terminal = CONFIGS[name].get("shift_terminal", 0.0)
    assert max(terminal, bounds[0]) - 1e-7 <= times[0] <= times[-1] <= bounds[1]
    ends = torch.tensor(bounds, dtype=torch.float64).clamp(min=terminal)
    stretched = ((torch.cat([times, ends]) - terminal) / (1 - terminal)).clamp(min=0)
    unshifted = stretched / (stretched + factor_of(name, 512) * (1 - stretched))
    below = share_below(unshifted, sampling, *parameters.values())
    assert distance(times, (below[:-2] - below[-2]) / (below[-1] - below[-2])) < 0.01


def test_a_range_without_times_is_refused(drawn):
    objective = objective_of("terminal", time_range=(0.0, 0.02))
    with pytest.raises(ModelError, match=r"0.0e\+00 of all times lies from 0 to 0.02, because of the shift"):
        objective.flow_time(drawn[:4], 64)


@pytest.mark.parametrize("side", RESOLUTIONS)
@pytest.mark.parametrize("name", CONFIGS)
def test_uniform_times_are_those_of_diffusers_tables(drawn, name, side):
    scheduler = FlowMatchEulerDiscreteScheduler(**CONFIGS[name])
    if scheduler.config.use_dynamic_shifting:
        config = scheduler.config
        numbers = (config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift)
        scheduler.set_timesteps(2000, mu=calculate_shift((side // 16) ** 2, *numbers))
        table = scheduler.sigmas[:-1]
    else:
        table = scheduler.sigmas  # of training; it is shifted once
    times = times_of(objective_of(name), drawn, side)
    below = torch.searchsorted(table.double().sort().values, times, right=True) / len(table)
    assert distance(times, below) < 0.01


@pytest.mark.parametrize("side", RESOLUTIONS)
def test_the_layer_that_adds_noise_counts_the_tokens_of_its_latents(drawn, side):
    objective = objective_of("dynamic")
    latents = torch.zeros(4, 1, side // 8, side // 8)
    _, timesteps, _, _ = noise_layer(2).run(objective, latents, latents, drawn[:4])
    assert torch.equal(timesteps, objective.flow_time(drawn[:4], (side // 16) ** 2) * 1000)


def test_another_shift_is_noticed(drawn):
    times = times_of(objective_of("dynamic"), drawn, 1024)
    other = times / (times + factor_of("dynamic", 896) * (1 - times))
    assert distance(times, other) > 0.03


def test_a_shift_of_one_gives_the_same_bits_as_no_shift(drawn):
    given = Objective(ObjectiveSettings(prediction=Prediction.FLOW_MATCHING, shift=1.0), config_of("dynamic"))
    assert torch.equal(given.flow_time(drawn, 64), drawn)
    assert torch.equal(objective_of("none").flow_time(drawn, 64), drawn)


def test_other_schedulers_shift_nothing_and_strange_ones_are_refused():
    assert shift_of({"_class_name": "DDIMScheduler", "shift": 7.0}) == FlowShift()
    flow = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
    with pytest.raises(ModelError, match="the scheduler FlowMatchNoneScheduler is not supported"):
        shift_of({"_class_name": "FlowMatchNoneScheduler"})
    with pytest.raises(ModelError, match="invert_sigmas = true is not supported"):
        shift_of({**flow, "invert_sigmas": True})
    with pytest.raises(ModelError, match=r"max_shift = .*None.* is not supported"):
        shift_of({**flow, "use_dynamic_shifting": True, "max_shift": None})
    with pytest.raises(ModelError, match=r"has no tokens; set objective\.shift to a number"):
        shift_of({**flow, "use_dynamic_shifting": True}).factor(None)


UNIPC = {
    "_class_name": "UniPCMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
}
"""As Wan 2.1 is published."""


def test_a_scheduler_of_another_kind_that_is_told_to_sample_a_flow_states_its_shift():
    assert is_flow_scheduler(UNIPC)
    assert shift_of(UNIPC) == FlowShift(static=3.0)
    assert not is_flow_scheduler(UNIPC | {"prediction_type": "epsilon"})
    with pytest.raises(ModelError, match="use_flow_sigmas is not true"):
        shift_of(UNIPC | {"use_flow_sigmas": False})
