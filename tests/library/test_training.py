"""`dp.train`: a recipe with functions that hear of each step."""

import pytest
from kit.tiny_runs import recipe_of, save_dit, save_pictures

import diffusionpipe as dp
from diffusionpipe.errors import ConfigError, RecipeError
from diffusionpipe.trainer.recipe import recipe_to_toml
from diffusionpipe.trainer.reporting.metrics import read_metrics


@pytest.fixture
def recipe(tmp_path):
    save_dit(tmp_path / "dit")
    save_pictures(tmp_path / "data", count=6)
    path = tmp_path / "recipe.toml"
    path.write_text(
        recipe_to_toml(recipe_of(tmp_path / "dit", tmp_path / "data", tmp_path / "run", training={"steps": 4}))
    )
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_callbacks_hear_each_line_of_the_metrics_once_and_resumed_runs_go_on(recipe, tmp_path):
    heard = []
    folder = dp.train(recipe, ranks=1, device="cpu", callbacks=[lambda step, values: heard.append((step, values))])
    assert folder == tmp_path / "run"
    assert heard == [(int(row.pop("step")), row) for row in read_metrics(folder)]
    assert [step for step, values in heard if "loss" in values] == [1, 2, 3, 4]
    more = []
    dp.train(
        recipe,
        "training.steps=6",
        ranks=1,
        device="cpu",
        resume="latest",
        callbacks=[lambda step, values: more.append(step) if "loss" in values else None],
    )
    assert more == [5, 6]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_an_error_of_a_callback_stops_the_training_and_is_raised(recipe, tmp_path):
    def fussy(step, values):
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        dp.train(recipe, "training.steps=100000", ranks=2, device="cpu", callbacks=[fussy])
    assert 0 < len(read_metrics(tmp_path / "run")) < 10_000


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ranks": 0}, "ranks=0: give a number of at least 1"),
        ({"callbacks": [3]}, "callbacks: 3 cannot be called"),
    ],
)
def test_other_arguments_are_refused_before_anything_starts(recipe, tmp_path, options, says):
    with pytest.raises(ConfigError, match=says):
        dp.train(recipe, **options)
    assert not (tmp_path / "run").exists()


def test_a_wrong_key_is_refused_before_anything_starts(recipe, tmp_path):
    with pytest.raises(RecipeError, match=r"training\.stepz"):
        dp.train(recipe, "training.stepz=3")
    assert not (tmp_path / "run").exists()


def test_ranks_are_torchruns_under_torchrun(recipe, monkeypatch):
    job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="torchrun has started the ranks already; leave out ranks"):
        dp.train(recipe, ranks=2)
