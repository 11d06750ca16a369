"""docs/objectives.md: its table of schedulers is what our code and diffusers make of their fields."""

import ast
import re
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from diffusionpipe.models.objectives.flow_shift import is_flow_scheduler, shift_of
from diffusionpipe.models.objectives.objective_settings import Prediction
from diffusionpipe.models.opening.folder import REGISTRY
from diffusionpipe.trainer.recipe import ObjectiveSection

PAGE = (Path(__file__).parents[2] / "docs/objectives.md").read_text(encoding="utf-8")
ROWS = {
    row[0].strip("`"): row
    for row in ([cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines())
    if re.fullmatch(r"`\w+Pipeline`", row[0])
}
WITH_FIELDS = {name: row for name, row in ROWS.items() if row[3].startswith("`")}


def scheduler_of(cell: str):
    """The scheduler that a cell writes as a call."""
    call = ast.parse(cell.strip("`"), mode="eval").body
    assert isinstance(call, ast.Call)
    fields = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    return getattr(diffusers, call.func.id)(**fields), fields


def test_every_pipeline_has_a_row():
    assert list(ROWS) == sorted(REGISTRY)


@pytest.mark.parametrize("name", WITH_FIELDS)
def test_a_row_says_what_our_code_reads_in_the_scheduler(name):
    _, _, prediction, cell, tokens, factor, _ = WITH_FIELDS[name]
    scheduler, fields = scheduler_of(cell)
    config = {"_class_name": type(scheduler).__name__, **scheduler.config}
    assert is_flow_scheduler(config) == (Prediction(prediction) is Prediction.FLOW_MATCHING)
    if not is_flow_scheduler(config):
        assert scheduler.config.prediction_type == prediction
        return
    shift = shift_of(config)
    assert (shift.dynamic is None) == (tokens == "any")
    assert f"{shift.factor(4096):.2f}" == factor
    assert shift.terminal == fields.get("shift_terminal", 0)


@pytest.mark.parametrize("name", [name for name, row in WITH_FIELDS.items() if row[5]])
def test_the_factor_of_a_row_is_that_of_diffusers(name):
    scheduler, fields = scheduler_of(WITH_FIELDS[name][3])
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        keys = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        mu = calculate_shift(4096, *(fields[key] for key in keys)) if "base_shift" in fields else None
        scheduler.register_to_config(shift_terminal=None)
        scheduler.set_timesteps(sigmas=[1.0, 0.5], mu=mu)
        sigma = float(scheduler.sigmas[1])
    else:
        scheduler.set_timesteps(1000)
        sigma = float(scheduler.sigmas[500])
    # The time 1/2 becomes f / (1 + f).
    assert sigma / (1 - sigma) == pytest.approx(float(WITH_FIELDS[name][5]), rel=0.005)


def test_the_stated_defaults_are_those_of_the_recipe():
    defaults = ObjectiveSection().model_dump(mode="json")
    stated = re.findall(r"`(\w+) = (\"?[\w.\[\], ]+\"?)`", PAGE.partition("So only the prediction")[0])
    assert len(stated) == 7
    for key, value in stated:
        wanted = "none" if defaults[key] is None else defaults[key]
        assert ast.literal_eval(value) == wanted, key


def test_training_times_of_diffusers_are_shifted_by_a_static_shift_only():
    """So its script of FLUX.1, whose scheduler shifts dynamically, trains at times without a shift."""
    plain = FlowMatchEulerDiscreteScheduler()
    flux = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0)
    assert torch.equal(flux.timesteps, plain.timesteps)
    assert not torch.equal(FlowMatchEulerDiscreteScheduler(shift=3.0).timesteps, plain.timesteps)


def test_diffusers_counts_training_times_from_the_noisy_end():
    assert FlowMatchEulerDiscreteScheduler().timesteps[0] == 1000
