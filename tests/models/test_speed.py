import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler

from diffusionpipe.errors import ModelError, RecipeError
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings, Prediction, TimeSampling
from diffusionpipe.models.objectives.speed import pair_members

SCHEDULES = {
    "linear": ({}, 642, 0.900, 0.949),
    "Stable Diffusion": (
        {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"},
        866,
        0.970,
        0.984,
    ),
    "cosine": ({"beta_schedule": "squaredcos_cap_v2"}, 959, 0.992, 0.996),
}
DRAWS = 400_000


def _steps(config, uniform, **settings):
    objective = Objective(ObjectiveSettings(time_sampling=TimeSampling.SPEED, **settings), config)
    still = torch.zeros(len(uniform), 1, 1, 1)
    return objective.add_noise(still, still, uniform)[1].numpy(), objective.speed.turn


@pytest.mark.parametrize(("config", "turn", "share", "share_of_pairs"), SCHEDULES.values(), ids=SCHEDULES)
def test_steps_before_the_turn_have_the_published_shares(config, turn, share, share_of_pairs):
    uniform = (torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS
    steps, found = _steps(config, uniform)
    in_pairs, _ = _steps(config, uniform, speed_pairs=True)
    assert abs(found - turn) <= 1
    assert (steps < turn).mean() == pytest.approx(share, abs=0.002)
    assert (in_pairs < turn).mean() == pytest.approx(share_of_pairs, abs=0.002)
    assert (np.diff(steps) >= 0).all()


@pytest.mark.parametrize("config", [row[0] for row in SCHEDULES.values()], ids=SCHEDULES)
def test_a_step_is_drawn_as_often_as_the_growth_of_its_noise_says(config):
    uniform = torch.rand(DRAWS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counts = np.bincount(_steps(config, uniform)[0], minlength=1000)
    growth = np.gradient(np.sqrt(1 - DDPMScheduler(**config).alphas_cumprod.double().numpy()))
    fast, slow = counts[growth > 1.05e-4], counts[growth < 0.95e-4]
    assert fast.mean() / slow.mean() == pytest.approx(5, rel=0.05)  # of random draws; the next line is exact
    grid = (torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS
    counts = np.bincount(_steps(config, grid)[0], minlength=1000)
    assert counts[growth > 1.05e-4].mean() / counts[growth < 0.95e-4].mean() == pytest.approx(5, rel=0.01)


def test_partners_lie_on_the_other_side_of_the_turn():
    uniform = torch.rand(500, generator=torch.Generator().manual_seed(0))
    members = [pair_members(uniform, torch.full((500,), is_partner)) for is_partner in (False, True)]
    first, turn = _steps({}, members[0], speed_pairs=True)
    assert (first == _steps({}, uniform)[0]).mean() > 0.99  # half a number has the same digits but for rounding
    assert (_steps({}, members[1], speed_pairs=True)[0] == np.abs(first - turn)).mean() > 0.99


@pytest.mark.parametrize("number", [0.0, 0.49999997, 0.5, 1 - 2**-24, 1.0])
@pytest.mark.parametrize("in_pairs", [False, True])
def test_every_number_that_rounding_gives_has_a_step(number, in_pairs):
    steps, _ = _steps({}, torch.tensor([number]), speed_pairs=in_pairs)
    assert 0 <= steps[0] < 1000


def test_only_steps_of_the_time_range_are_drawn_and_in_the_same_proportion():
    uniform = (torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS
    steps, _ = _steps({}, uniform, time_range=(0.25, 0.75))
    counts = np.bincount(steps, minlength=1000)
    assert not counts[:250].any()
    assert not counts[750:].any()
    assert counts[300] / counts[700] == pytest.approx(5, rel=0.01)


def test_a_schedule_without_slow_steps_is_refused():
    betas = [0.01 * step for step in range(1, 21)]
    with pytest.raises(ModelError, match="grows fast at every time step"):
        _steps({"num_train_timesteps": 20, "trained_betas": betas}, torch.zeros(1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prediction": Prediction.FLOW_MATCHING}, "speed needs epsilon or v_prediction, not flow_matching"),
        ({"min_snr_gamma": 5.0}, "time_sampling = speed and min_snr_gamma both weigh the times; remove one of them"),
        ({"speed_pairs": True, "time_range": (0.0, 0.5)}, "partners would lie outside time_range"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        ObjectiveSettings(time_sampling=TimeSampling.SPEED, **settings)
