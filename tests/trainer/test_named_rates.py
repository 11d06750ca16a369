"""The schedules of transformers by name: their rates, their state in checkpoints, and what they refuse."""

import pytest
import torch
from kit.tiny_runs import losses_of, recipe_of, save_dit, save_pictures, train_here
from torch import nn
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from diffusionpipe.trainer.checkpoints.checkpoint_folder import FOLDER
from diffusionpipe.trainer.optim.learning_rate import Decay, LearningRateSchedule, learning_rate_at
from diffusionpipe.trainer.optim.named_rates import LossRates, kept_rates
from diffusionpipe.trainer.recipe.group_section import RateSchedule

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, WARMUP = 20, 4
ARGUMENTS = {
    "cosine_with_restarts": {"num_cycles": 3},
    "polynomial": {"power": 2.0, "lr_end": 1e-3},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": 7},
    "cosine_with_min_lr": {"min_lr": 0.02},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2},
    "warmup_stable_decay": {"num_decay_steps": 6, "min_lr_ratio": 0.1},
}


def test_every_name_of_transformers_is_one_of_ours():
    assert {name.value for name in SchedulerType} == {schedule.value for schedule in RateSchedule}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_named_schedule_has_the_rates_of_transformers_at_every_step(name):
    import json

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = get_scheduler(name, optimizer, WARMUP, STEPS, ARGUMENTS[name])
    ours = LearningRateSchedule(
        peak=0.3,
        decay=Decay.CONSTANT,
        warmup_steps=WARMUP,
        total_steps=STEPS,
        final_fraction=0.0,
        named=name,
        arguments=json.dumps(ARGUMENTS[name]),
    )
    rates = []
    for step in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        assert learning_rate_at(step, ours) == pytest.approx(rates[-1], rel=1e-12, abs=1e-15)
        optimizer.step()
        scheduler.step()
    assert len(set(rates)) > 4


BY_LOSSES = {
    "reduce_lr_on_plateau": {"patience": 1, "factor": 0.5},
    "greedy": {"patience": 1, "factor": 0.5, "smooth": True, "window_size": 3},
}


@pytest.mark.parametrize(("name", "arguments"), list(BY_LOSSES.items()))
def test_a_schedule_by_losses_continues_from_its_kept_values(name, arguments):
    losses = [1.0, 1.2, 1.3, 1.1, 1.4, 1.5, 1.3, 1.6, 1.7, 1.8, 0.5, 0.4, 2.0, 2.1]
    straight, first = LossRates(name, arguments, 0.2), LossRates(name, arguments, 0.2)
    factors = []
    for loss in losses:
        straight.note(loss)
        factors.append(straight.factor)
    assert min(factors) < 0.6
    for loss in losses[:7]:
        first.note(loss)
    resumed = LossRates(name, arguments, 0.2, kept_rates(first.state()))
    assert resumed.factor == factors[6]
    for loss, factor in zip(losses[7:], factors[7:], strict=True):
        resumed.note(loss)
        assert resumed.factor == factor


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    place = tmp_path_factory.mktemp("rates")
    save_dit(place / "dit")
    save_pictures(place / "data")

    def make(folder, **sections):
        return recipe_of(place / "dit", place / "data", folder, checkpoint={"every": 3, "keep": 9}, **sections)

    return make


def test_a_run_whose_rate_follows_its_losses_resumes_with_the_same_rates(recipe, tmp_path):
    import shutil

    rates = {"schedule": "reduce_lr_on_plateau", "arguments": {"patience": 0, "factor": 0.5, "threshold": 10.0}}
    own = recipe(tmp_path / "run", learning_rate=rates)
    assert train_here(own, exports=False) == 6
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / FOLDER / "step-00000006")
    assert train_here(recipe(tmp_path / "again", learning_rate=rates), "3", exports=False) == 6
    expected = losses_of(tmp_path / "run", "learning_rate")
    assert losses_of(tmp_path / "again", "learning_rate") == expected
    assert losses_of(tmp_path / "again") == losses_of(tmp_path / "run")
    assert len(set(expected.values())) > 3


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"schedule": "warmup_stable_decay"}, "learning_rate.arguments: the schedule warmup_stable_decay refuses {}"),
        ({"schedule": "cosine", "arguments": {"num_cycles": 2}}, "arguments: the cosine schedule takes none"),
        ({"schedule": "polynomial", "final": 0.5}, "final: it has no effect on a polynomial schedule"),
        ({"schedule": "greedy", "warmup_steps": 2}, "warmup_steps: it has no effect on a greedy schedule"),
        ({"schedule": "polynomial", "arguments": {"powre": 2}}, "refuses {'powre': 2}"),
    ],
)
def test_a_schedule_that_cannot_be_had_is_refused(recipe, tmp_path, rates, message):
    with pytest.raises(ValueError, match=message):
        recipe(tmp_path, learning_rate=rates)
