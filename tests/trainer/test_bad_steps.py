"""Runs whose loss, weights or gradients go bad: what is saved, what is skipped, and what the message says."""

import re
from dataclasses import replace

import pytest
import torch
from kit.tiny_runs import (
    losses_of,
    recipe_of,
    save_pictures,
    save_stable_diffusion,
    train,
    train_here,
    train_with_many_spikes,
)

from diffusionpipe.errors import LossSpikeError, NonFiniteLossError, NonFiniteWeightsError
from diffusionpipe.runtime.job.membership import membership
from diffusionpipe.runtime.job.process_group import joined
from diffusionpipe.trainer.checkpoints.checkpoint import latest, saved_checkpoints
from diffusionpipe.trainer.course import run as run_module
from diffusionpipe.trainer.course.step_reports import StepReports
from diffusionpipe.trainer.reporting.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    save_stable_diffusion(folder / "sd")
    save_pictures(folder / "data")
    save_pictures(folder / "held-out", count=6, seed=1)
    return folder


@pytest.fixture
def recipe(place):
    def make(folder, **sections):
        return recipe_of(place / "sd", place / "data", folder, **sections)

    return make


@pytest.fixture
def validated(place):
    return {"validation": {"every": 3, "samples": 4}, "data": {"validation": str(place / "held-out")}}


def test_a_sample_that_is_not_finite_is_named(recipe, tmp_path, monkeypatch):
    def spoiled(loader):
        for inputs in batches(loader):
            for pictures in (value for value in inputs.values() if value.ndim == 4 and value.shape[1] == 3):
                pictures[2] = torch.nan
            yield inputs

    batches = run_module.StepLoader.__iter__
    monkeypatch.setattr(run_module.StepLoader, "__iter__", spoiled)
    with pytest.raises(NonFiniteLossError, match=r"step 1: the loss is nan .*, from samples \d+ \(\d+\.png\); nothing"):
        train_here(recipe(tmp_path))


def test_weights_that_are_not_finite_reach_no_checkpoint_and_no_export(crew, recipe, tmp_path):
    ruined = recipe(
        tmp_path,
        training={"clip_norm": None, "steps": 1},
        optimizer={"learning_rate": 1e39},
        learning_rate={"schedule": "constant", "warmup_steps": 0},
    )
    errors = crew.run(train, ruined)
    assert [type(error) for error in errors] == [NonFiniteWeightsError] * 2
    assert str(errors[0]) == str(errors[1])
    assert "after step 1 the weights are not finite, first model.unet." in str(errors[0])
    assert str(errors[0]).endswith("No checkpoint was saved. Start again.")
    assert latest(tmp_path) is None
    assert not (tmp_path / "export").exists()


def test_a_validation_loss_that_is_not_finite_comes_before_the_checkpoint(recipe, validated, tmp_path, monkeypatch):
    result = run_module.validate
    monkeypatch.setattr(run_module, "validate", lambda *given: replace(result(*given), loss=float("nan")))
    with pytest.raises(NonFiniteLossError, match="step 3: the validation loss is nan, so these weights are not saved"):
        train_here(recipe(tmp_path, training={"steps": 6}, **validated))
    assert latest(tmp_path) is None


def test_an_older_checkpoint_goes_after_the_next_one_gave_a_finite_loss(recipe, validated, tmp_path, monkeypatch):
    """With keep = 1, at every step with a validation or not: how many checkpoints there are after it."""
    counts = []
    write = StepReports.write
    counted = lambda *given: (write(*given), counts.append(len(saved_checkpoints(tmp_path))))  # noqa: E731
    monkeypatch.setattr(StepReports, "write", counted)
    checkpoint = {"every": 1, "keep": 1, "asynchronous": False}
    train_here(recipe(tmp_path, training={"steps": 6}, checkpoint=checkpoint, **validated))
    # Counted before the removal: from step 3 on there is one more, but none after the validation of step 3.
    assert counts[:6] == [0, 1, 2, 1, 2, 2]  # one for each step, and one at the end
    assert len(saved_checkpoints(tmp_path)) == 1


LAYOUTS_OF_SPIKES = {
    "one process": None,
    "two stages": {},
    "copies": {"stages": 1, "data_parallel": 2},
}


def skipped_in(folder):
    return [row["step"] for row in read_metrics(folder) if row.get("skipped_step")]


@pytest.mark.slow
def test_spikes_are_skipped_at_the_same_steps_on_every_layout_and_after_a_resume(crew, recipe, tmp_path):
    def spiky(name, **sections):
        training = {"on_spike": "skip", "steps": 8, "seed": 2} | sections.pop("training", {})
        return recipe(tmp_path / name, training=training, **sections)

    for name, pipeline in LAYOUTS_OF_SPIKES.items():
        if pipeline is None:
            with joined(membership({}), device="cpu") as job:
                train_with_many_spikes(job, spiky(name))
        else:
            crew.run(train_with_many_spikes, spiky(name, pipeline=pipeline))
    expected = tmp_path / "one process"
    assert 2 <= len(skipped_in(expected)) <= 6
    crew.run(train_with_many_spikes, spiky("post-validated", training={"post_validation": True, "clip_norm": None}))
    crew.run(train_with_many_spikes, spiky("blocking", training={"clip_norm": None}))
    crew.run(train_with_many_spikes, spiky("resumed", training={"steps": 5}))
    crew.run(train_with_many_spikes, spiky("resumed"), "latest")
    for name in (*LAYOUTS_OF_SPIKES, "resumed"):
        assert skipped_in(tmp_path / name) == skipped_in(expected)
        assert list(losses_of(tmp_path / name).values()) == pytest.approx(list(losses_of(expected).values()), rel=1e-5)
    assert losses_of(tmp_path / "resumed") == losses_of(tmp_path / "two stages")
    assert skipped_in(tmp_path / "post-validated") == skipped_in(tmp_path / "blocking") != []
    assert losses_of(tmp_path / "post-validated") == losses_of(tmp_path / "blocking")


def test_a_spike_stops_the_run_where_the_recipe_says_so(recipe, tmp_path):
    with joined(membership({}), device="cpu") as job, pytest.raises(LossSpikeError) as caught:
        train_with_many_spikes(job, recipe(tmp_path, training={"on_spike": "stop", "steps": 8}))
    assert re.match(
        r"step \d: (loss|gradient_norm)=\S+ is 1\.\d times the median of the last \d steps", str(caught.value)
    )
    assert "nothing was updated" in str(caught.value)
