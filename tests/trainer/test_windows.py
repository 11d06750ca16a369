"""Whole runs without a flush: metrics, validation, average, checkpoints, stops; and what is refused before them."""

import shutil
import time
from unittest.mock import patch

import pytest
import torch
from kit.asynchronous_device import AsynchronousDevice, AsynchronousRecorder
from kit.tiny_runs import (
    ask_to_draw,
    ask_to_save_and_quit,
    losses_of,
    recipe_of,
    save_dit,
    save_pictures,
    tensors_of,
    train,
    train_here,
)

from diffusionpipe.errors import ConfigError, NonFiniteLossError, RecipeError
from diffusionpipe.ir.files import read_plan
from diffusionpipe.ir.versions import Versions
from diffusionpipe.passes import with_versions
from diffusionpipe.planner.assembly.windows import overlap
from diffusionpipe.runtime.recording import trace
from diffusionpipe.trainer.checkpoints.checkpoint_folder import latest
from diffusionpipe.trainer.course.run import is_flush
from diffusionpipe.trainer.model.loading import Weights
from diffusionpipe.trainer.optim.staleness_rates import factor_at, fading_staleness
from diffusionpipe.trainer.recipe import load_recipe, recipe_to_toml
from diffusionpipe.trainer.reporting.metrics import read_metrics
from diffusionpipe.trainer.step import loop, windows
from diffusionpipe.trainer.step.windows import WindowStepper
from diffusionpipe.workflows.planning.job_profiles import CachedProfiles
from diffusionpipe.workflows.training.recipe_checks import checks_of_run


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("windows")
    save_dit(folder / "dit")
    save_pictures(folder / "data")
    save_pictures(folder / "held-out", count=6, seed=1)
    return folder


@pytest.fixture(scope="module")
def recipe(place):
    def make(name, **sections):
        base = {
            "data": {"validation": str(place / "held-out")},
            "training": {"clip_norm": 0.5, "clip": "block", "ema_decay": 0.9, "steps": 8},
            "pipeline": {"versions": "stashed"},
            "validation": {"every": 4, "samples": 5, "timesteps": (0.1, 0.5)},
            "checkpoint": {"every": 4, "keep": 5},
        }
        merged = {key: base.get(key, {}) | sections.get(key, {}) for key in {**base, **sections}}
        return recipe_of(place / "dit", place / "data", place / name, **merged)

    return make


def assert_same_bits(found, expected):
    a, b = tensors_of(latest(found)), tensors_of(latest(expected))
    assert a.keys() == b.keys()
    assert {name.partition(".")[0] for name in a} == {"model", "ema", "optimizer"}
    assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def test_a_run_goes_on_bit_for_bit_from_its_checkpoint(crew, recipe, place):
    """Every checkpoint flushes the pipeline, so nothing older than its weights is needed."""
    assert crew.run(train, recipe("whole"), exports=False) == [8, 8]
    losses = losses_of(place / "whole")
    assert list(losses) == list(range(1, 9))
    assert list(losses_of(place / "whole", "validation_loss")) == [4, 8]
    assert crew.run(train, recipe("half", training={"steps": 4}), exports=False) == [4, 4]
    assert crew.run(train, recipe("half"), "latest", exports=False) == [8, 8]
    assert losses_of(place / "half")[6] == losses[6]
    assert_same_bits(place / "half", place / "whole")


def test_pictures_without_a_flush_are_drawn_at_the_next_one_and_change_no_bit(crew, recipe, place):
    drawn = {"sampling": {"every": 8, "steps": 2, "labels": (0, 1)}}
    assert crew.run(train, recipe("whole-drawn", **drawn)) == [8, 8]
    assert crew.run(train, recipe("asked", **drawn), at={2: ask_to_draw}) == [8, 8]
    assert sorted(one.stem for one in (place / "asked/samples").glob("*.npy")) == ["step-00000004", "step-00000008"]
    assert losses_of(place / "asked") == losses_of(place / "whole-drawn")
    assert_same_bits(place / "asked", place / "whole-drawn")


def train_with_late_batches(job, recipe):
    """A rank's run; every batch comes 1,000 s late by its clocks, so that other programs do not matter."""
    own, waited = WindowStepper._feed, [0]

    def wait(one):
        waited[0] += 1000
        return one

    def late(stepper, batch):
        batches = stepper._batches
        stepper._batches = map(wait, batches)
        own(stepper, batch)
        stepper._batches = batches

    with (
        patch.object(WindowStepper, "_feed", late),
        patch.object(trace, "perf_counter_ns", lambda: time.perf_counter_ns() + waited[0] * 10**9),
        patch.object(windows, "perf_counter", lambda: time.perf_counter() + waited[0]),
        patch.object(loop, "perf_counter", lambda: time.perf_counter() + waited[0]),
    ):
        return train(job, recipe)


def test_a_wait_for_a_batch_counts_as_data_and_not_as_a_bubble(crew, recipe, place):
    """Windows take their batches while they run: the first one two, the last one none."""
    never = {"checkpoint": {"every": 20}, "validation": {"every": 20}, "training": {"steps": 4}}
    assert crew.run(train_with_late_batches, recipe("waits", **never)) == [4, 4]
    rows = [row for row in read_metrics(place / "waits") if "loss" in row]
    for row, batches in zip(rows, (2, 1, 1, 0), strict=True):
        assert 1000 * batches <= row["data_s"] < 1000 * batches + 500
        assert row["iteration_s"] < 500
        assert row["step_s"] == pytest.approx(row["data_s"] + row["iteration_s"] + row["update_s"])


def train_beside_a_device(job, recipe):
    """A rank's run on a device that only takes work in; how often the host waited for the work of each window in it."""
    device, waits = AsynchronousDevice(lambda: 3.0), []

    def step(stepper, *arguments, original=WindowStepper.step):
        start, num_waits = len(device.ends), len(device.waits)
        found = original(stepper, *arguments)
        waits.append(sum(mark >= start for mark in device.waits[num_waits:]))
        return found

    with (
        patch("diffusionpipe.runtime.engine.windows.recorder_for", lambda _: AsynchronousRecorder(device)),
        patch.object(WindowStepper, "step", step),
    ):
        train(job, recipe)
    return waits


def test_the_host_waits_for_the_device_where_the_pipeline_is_flushed_and_not_behind_each_window(crew, recipe, place):
    never = {"checkpoint": {"every": 20}, "validation": {"every": 20}, "training": {"steps": 5}}
    assert crew.run(train_beside_a_device, recipe("beside", **never)) == [[0, 0, 0, 0, 1]] * 2
    rows = [row for row in read_metrics(place / "beside") if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert row["iteration_s"] % 3 == 0
        assert 0 <= row["bubble"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("versions", ["delayed", "newest", "predicted"])
def test_with_other_weights_it_goes_on_bit_for_bit_too(crew, recipe, place, versions):
    """Predictions need the state and the rates of the steps before the checkpoint."""
    others = {
        "pipeline": {"versions": versions},
        "learning_rate": {"warmup_steps": 6},
        "validation": {"every": 3},
        "checkpoint": {"every": 3},
    }
    run = recipe(versions, training={"steps": 7}, **others)
    assert crew.run(train, run) == [7, 7]
    whole = tensors_of(latest(place / versions))
    for name in ("step-00000007", "step-00000006"):
        shutil.rmtree(place / versions / "checkpoints" / name)
    assert latest(place / versions).name == "step-00000003"
    assert crew.run(train, run, "latest") == [7, 7]
    again = tensors_of(latest(place / versions))
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())


@pytest.mark.slow
def test_a_filled_run_goes_on_bit_for_bit_from_its_checkpoint(crew, recipe, place):
    """Behind the flush of a checkpoint everything is encoded by the same fills: those of the kept profile.

    Losses are those of the run without fills and with the same cuts: other cuts make other weights old. One that is
    asked to stop ends the batches that it has begun.
    """
    assert crew.run(train, recipe("not-filled")) == [8, 8]
    second = read_plan(place / "not-filled" / "plan.json").blocks[1]
    filled, profiles = {"pipeline": {"fill": True, "splits": [second[0]]}}, CachedProfiles(place / "profiles")
    assert crew.run(train, recipe("filled", **filled), profiles=profiles) == [8, 8]
    losses = losses_of(place / "filled")
    assert read_plan(place / "filled" / "plan.json").is_filled
    assert losses == pytest.approx(losses_of(place / "not-filled"), rel=1e-4)
    assert list(losses_of(place / "filled", "validation_loss")) == [4, 8]
    whole = tensors_of(latest(place / "filled"))
    shutil.rmtree(place / "filled" / "checkpoints" / "step-00000008")
    assert crew.run(train, recipe("filled", **filled), "latest") == [8, 8]
    again = tensors_of(latest(place / "filled"))
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())
    late = {"checkpoint": {"every": 20}, "validation": {"every": 20}, "training": {"steps": 20}}
    stopped = recipe("filled-stop", **filled, **late)
    done = crew.run(train, stopped, profiles=profiles, at={2: ask_to_save_and_quit})
    assert done[0] == done[1] < 12
    assert latest(place / "filled-stop").name == f"step-{done[0]:08d}"


@pytest.mark.slow
def test_with_a_flush_after_every_step_it_is_the_flushed_run(crew, recipe, place):
    same = {"clip_norm": "none", "clip": "global"}
    assert crew.run(train, recipe("every", pipeline={"flush_every": 1}, training=same)) == [8, 8]
    assert crew.run(train, recipe("usual", pipeline={"versions": "flushed"}, training=same)) == [8, 8]
    assert losses_of(place / "every") == losses_of(place / "usual")
    assert_same_bits(place / "every", place / "usual")


def test_a_run_that_is_asked_to_stop_finishes_the_batches_that_it_has_begun(crew, recipe, place):
    stopped = recipe("stopped", training={"steps": 20}, checkpoint={"every": 20}, validation={"every": 20})
    done = crew.run(train, stopped, at={2: ask_to_save_and_quit}, exports=False)
    assert done[0] == done[1] < 10
    assert latest(place / "stopped").name == f"step-{done[0]:08d}"
    assert list(losses_of(place / "stopped")) == list(range(1, done[0] + 1))


def test_the_last_steps_are_flushed_each(recipe):
    others = {"training": {"steps": 10}, "validation": {"every": 10}, "checkpoint": {"every": 10}}
    late = recipe("late", pipeline={"flushed_from": 0.7}, **others)
    assert [step for step in range(1, 11) if is_flush(late, step)] == [7, 8, 9, 10]
    assert [step for step in range(1, 11) if is_flush(recipe("never", **others), step)] == [10]


def test_rates_of_old_weights_fade_to_the_usual_ones():
    """One micro-batch, four ranks: the stages' weights are 3, 2, 1 and 0 steps old."""
    window = with_versions(overlap(4, 1), Versions.STASHED)
    found = fading_staleness(2, window)
    assert found == {0: 3.0, 1: 2.0, 2: 1.0, 3: 0.0}
    assert [factor_at(step, found[0], 2) for step in (0, 1, 2, 3)] == [1 / 3, pytest.approx(3**-0.5), 1.0, 1.0]
    assert {factor_at(step, found[3], 2) for step in range(4)} == {1.0}
    with pytest.raises(ConfigError, match="on average no stage reads weights that are more than one step old"):
        fading_staleness(2, with_versions(overlap(4, 4), Versions.STASHED))


@pytest.mark.slow
def test_a_run_lowers_the_rates_of_stages_with_old_weights(crew, recipe, place):
    """Weights that are two steps old have half the rate, which fades too slowly to show."""
    delayed = {"pipeline": {"versions": "delayed", "delay": 2}, "training": {"steps": 4}}
    halved = {"learning_rate": {"by_staleness": 10**12}}
    assert crew.run(train, recipe("lower", **delayed, **halved)) == [4, 4]
    assert crew.run(train, recipe("given", **delayed, optimizer={"learning_rate": 0.005})) == [4, 4]
    assert crew.run(train, recipe("twice", **delayed)) == [4, 4]
    lower, given, twice = (losses_of(place / name)[4] for name in ("lower", "given", "twice"))
    assert lower == pytest.approx(given, rel=1e-5) != pytest.approx(twice, rel=1e-4)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"clip": "global"}}, 'not known when a stage steps; set clip = "block", or clip_norm = "none"'),
        ({"training": {"clip_norm": "none"}}, "nothing is clipped without a clip_norm; set clip_norm, or leave out"),
        ({"training": {"post_validation": True}}, "post-validation takes a step back before the next one"),
        ({"training": {"on_spike": "skip"}}, "a spike is known after the next steps have begun"),
        ({"pipeline": {"data_parallel": 2, "sharded": True}}, "sharded parameters are gathered for one version"),
        ({"pipeline": {"offload_frozen": True}}, "weights of encoders cannot come from host memory"),
        ({"pipeline": {"versions": "predicted"}, "optimizer": {"name": "SGD"}}, "and SGD is none of them"),
        ({"pipeline": {"orders": "orders.csv"}}, "searched orders and orders of a file end with a flush"),
        ({"pipeline": {"delay": 2}}, 'delay: only versions = "delayed" has one'),
        ({"pipeline": {"plan": "auto"}}, "versions: neither the search nor a plan file takes it"),
        ({"checkpoint": {"asynchronous": True}}, "weights change while a checkpoint would be copied"),
        ({"objective": {"self_conditioning": 0.5}}, "self-conditioning needs a second forward of the same weights"),
        ({"pipeline": {"versions": "flushed", "flush_every": 2}}, "flush_every: every step ends with a flush"),
        ({"pipeline": {"versions": "flushed", "flushed_from": 0.5}}, "flushed_from: every step ends with a flush"),
        ({"pipeline": {"flushed_from": 1.0}}, "flushed_from"),
        (
            {"pipeline": {"versions": "flushed"}, "training": {"clip": "global"}, "learning_rate": {"by_staleness": 9}},
            "learning_rate.by_staleness: no weights are old where every step ends with a flush",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_the_recipe(recipe, sections, message):
    with pytest.raises((ConfigError, ValueError)) as error:
        recipe("refused", **sections)
    assert message in str(error.value).replace("\n", " ")


def test_sizes_without_a_window_are_refused_before_anything_long_starts(recipe, monkeypatch):
    monkeypatch.setattr(Weights, "__init__", None)
    with pytest.raises(ConfigError, match="versions need at least 2 stages: with one nothing is in flight"):
        train_here(recipe("alone"))


def early_problem(recipe, place, num_ranks, *keys):
    """What the command says before any rank starts; "" if it starts them."""
    path = place / "refused.toml"
    path.write_text(recipe_to_toml(recipe("refused")))
    try:
        load_recipe(path, keys, checks_of_run(num_ranks, None))
    except RecipeError as error:
        return str(error).replace("\n", " ")
    return ""


@pytest.mark.parametrize(
    ("ranks", "keys", "message"),
    [
        (1, ["fill=true"], "pipeline.versions: versions need at least 2 stages: with one nothing is in flight"),
        (2, ["schedule=zb-h1", "fill=true"], "pipeline.versions: the schedule 'zb-h1' does not alternate"),
        (3, ["versions=delayed", "microbatches=1"], "a delay of 1 needs at least 2 micro-batches for 3 stages"),
        (4, ["versions=delayed", "microbatches=1", "replicas=[2,1,1]"], "2 micro-batches for 3 stages"),
        (2, ["schedule=kfkb-3", "fill=true"], "2 micro-batches are not a multiple of 3; use 3"),
    ],
)
def test_sizes_without_a_window_are_refused_before_any_rank_starts(recipe, place, ranks, keys, message):
    """So nothing is measured for fills before."""
    alone = ["pipeline.versions=delayed", "pipeline.delay=2", "pipeline.microbatches=1"]
    assert not early_problem(recipe, place, 3, *alone)
    assert message in early_problem(recipe, place, ranks, *(f"pipeline.{key}" for key in keys))


@pytest.mark.slow
def test_a_run_with_groups_of_two_resumes_bit_for_bit(crew, recipe, place):
    """TiMePReSt's nF1B, by a recipe: checkpoint, resumed run, and the run that was not interrupted."""
    groups = {"schedule": "kfkb-2", "versions": "newest", "microbatches": 4}
    assert crew.run(train, recipe("groups", pipeline=groups)) == [8, 8]
    assert crew.run(train, recipe("first-half", pipeline=groups, training={"steps": 4})) == [4, 4]
    assert crew.run(train, recipe("first-half", pipeline=groups), "latest") == [8, 8]
    assert_same_bits(place / "first-half", place / "groups")


def test_rates_by_staleness_without_effect_are_refused_before_any_rank_starts(recipe, place):
    key = "learning_rate.by_staleness=4"
    assert "no stage reads weights that are more than one step old" in early_problem(recipe, place, 2, key)
    assert not early_problem(recipe, place, 4, key, "pipeline.microbatches=1")


def test_a_loss_that_is_not_finite_is_named_on_all_ranks_and_nothing_of_it_is_saved(crew, recipe, place):
    """The weights are lost in the first step, and the losses of later ones, which are known together."""
    training = {"clip_norm": "none", "clip": "global"}
    lost = recipe("lost", training=training, optimizer={"learning_rate": 1e30}, validation={"every": 8})
    for error in crew.run(train, lost):
        assert isinstance(error, NonFiniteLossError), error
        assert "step 2: the loss is nan" in str(error)
        assert "the others went on up to step 4, and nothing of it is saved" in str(error)
    assert latest(place / "lost") is None
