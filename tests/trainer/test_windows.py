"""Whole runs without a flush: metrics, validation, average, checkpoints, stops; and what is refused before them."""

import pytest
import torch
from tiny_runs import (
    ask_to_save_and_quit,
    losses_of,
    recipe_of,
    save_dit,
    save_pictures,
    tensors_of,
    train,
    train_here,
)

from diffusionpipe.errors import ConfigError
from diffusionpipe.trainer.checkpoints.checkpoint_folder import latest
from diffusionpipe.trainer.loading import Weights


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
    assert crew.run(train, recipe("whole")) == [8, 8]
    losses = losses_of(place / "whole")
    assert list(losses) == list(range(1, 9))
    assert list(losses_of(place / "whole", "validation_loss")) == [4, 8]
    assert crew.run(train, recipe("half", training={"steps": 4})) == [4, 4]
    assert crew.run(train, recipe("half"), "latest") == [8, 8]
    assert losses_of(place / "half")[6] == losses[6]
    assert_same_bits(place / "half", place / "whole")


@pytest.mark.slow
def test_with_a_flush_after_every_step_it_is_the_flushed_run(crew, recipe, place):
    same = {"clip_norm": "none", "clip": "global"}
    assert crew.run(train, recipe("every", pipeline={"flush_every": 1}, training=same)) == [8, 8]
    assert crew.run(train, recipe("usual", pipeline={"versions": "flushed"}, training=same)) == [8, 8]
    assert losses_of(place / "every") == losses_of(place / "usual")
    assert_same_bits(place / "every", place / "usual")


def test_a_run_that_is_asked_to_stop_finishes_the_batches_that_it_has_begun(crew, recipe, place):
    stopped = recipe("stopped", training={"steps": 20}, checkpoint={"every": 20}, validation={"every": 20})
    done = crew.run(train, stopped, at={2: ask_to_save_and_quit})
    assert done[0] == done[1] < 10
    assert latest(place / "stopped").name == f"step-{done[0]:08d}"
    assert list(losses_of(place / "stopped")) == list(range(1, done[0] + 1))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"clip": "global"}}, 'not known when a stage steps; set clip = "block", or leave out clip_norm'),
        ({"training": {"post_validation": True}}, "post-validation takes a step back before the next one"),
        ({"training": {"on_spike": "skip"}}, "a spike is known after the next steps have begun"),
        ({"pipeline": {"fill": True}}, "there are no bubbles to fill; leave out fill"),
        ({"pipeline": {"data_parallel": 2, "sharded": True}}, "sharded parameters are gathered for one version"),
        ({"pipeline": {"replicas": [2, 1]}}, "replicas of a stage cannot train without a flush yet"),
        ({"pipeline": {"offload_frozen": True}}, "weights of encoders cannot come from host memory"),
        ({"pipeline": {"versions": "predicted"}, "optimizer": {"name": "SGD"}}, "and SGD is none of them"),
        ({"pipeline": {"orders": "orders.csv"}}, "searched orders and orders of a file end with a flush"),
        ({"pipeline": {"delay": 2}}, 'delay: only versions = "delayed" has one'),
        ({"pipeline": {"plan": "auto"}}, "versions: neither the search nor a plan file takes it"),
        ({"objective": {"self_conditioning": 0.5}}, "self-conditioning needs a second forward of the same weights"),
        ({"pipeline": {"versions": "flushed", "flush_every": 2}}, "flush_every: every step ends with a flush"),
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
