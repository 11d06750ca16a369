"""A recipe that has changed since the checkpoint: what may change is said and stays, the rest is refused."""

import json
from itertools import product
from pathlib import Path

import pytest
from kit.tiny_runs import recipe_of

from diffusionpipe.errors import CheckpointError, RecipeError
from diffusionpipe.trainer.course.kept_facts import facts_to_keep, kept_facts
from diffusionpipe.trainer.course.recipe_changes import Settled, settle, shown
from diffusionpipe.trainer.recipe import Effect, effect_of, load_recipe, recipe_to_toml, values_of
from diffusionpipe.workflows.training.stated_values import stated_values

SOURCE = Path("runs/x/checkpoints/step-00000049")


def recipe(**sections):
    return recipe_of(Path("sd"), Path("data"), Path("run"), **sections)


def kept(settled, step=49):
    """What a checkpoint keeps, after a journey through JSON."""
    return json.loads(json.dumps({"step": step, **facts_to_keep({}, values_of(settled.recipe), settled.stated)}))


def changed(before, after, stated=None):
    return settled_by(after, kept(Settled(recipe=before)), stated)


def settled_by(after, state, stated=None, source=SOURCE):
    return settle(after, stated or {}, kept_facts(state, source))


def refusal(before, after):
    with pytest.raises(CheckpointError) as caught:
        changed(before, after)
    text = str(caught.value)
    assert text.count("\n") < 3
    assert "start a new run in another run.folder" in text
    return text


def rate(value):
    return recipe(optimizer={"learning_rate": value})


def test_a_recipe_that_is_the_same_is_settled_without_a_word():
    assert changed(recipe(), recipe()) == Settled(recipe=recipe())


def test_a_key_that_may_change_is_said_with_the_step():
    found = changed(rate(1e-4), recipe(optimizer={"learning_rate": 2e-4}, learning_rate={"warmup_steps": 2}))
    assert found.notes == (
        "changed since step 49: optimizer.learning_rate 1e-4 -> 2e-4; learning_rate.warmup_steps 0 -> 2",
    )
    assert found.recipe.optimizer.learning_rate == 2e-4


def test_a_key_that_does_not_change_the_weights_is_not_said():
    after = recipe(checkpoint={"every": 1}, sampling={"steps": 3}, pipeline={"microbatches": 4}, run={"name": "x"})
    assert changed(recipe(), after).notes == ()


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"training": {"seed": 1}}, "training.seed was 0 and is 1"),
        ({"training": {"batch": 8}}, "training.batch was 4 and is 8"),
        ({"data": {"flip": True}}, "data.flip was false and is true"),
        ({"data": {"resolution": 16}}, "data.resolution was 8 and is 16"),
        ({"data": {"caption_dropout": 0.2}}, "data.caption_dropout was 0.1 and is 0.2"),
        ({"lora": {"rank": 4}}, "lora.rank was none and is 4"),
        ({"optimizer": {"name": "SGD"}}, "optimizer.name was AdamW and is SGD"),
        (
            {"optimizer": {"arguments": {"amsgrad": True}}},
            "arguments was {} and is {amsgrad = true} (the optimizer keeps",
        ),
        ({"training": {"precision": "float64"}}, "training.precision was float32 and is float64 (the checkpoint's num"),
        ({"model": {"path": "other"}}, "model.path was sd and is other"),
    ],
)
def test_a_key_that_may_not_change_is_refused_with_both_values_and_the_way_on(sections, text):
    assert text in refusal(recipe(), recipe(**sections))


def test_all_keys_that_may_not_change_are_named_at_once():
    text = refusal(recipe(), recipe(training={"seed": 1}, data={"flip": True}))
    assert "training.seed was 0 and is 1" in text
    assert "data.flip was false and is true" in text


def test_an_average_can_be_left_out_but_not_begin():
    none = recipe(training={"ema_decay": "none"})
    assert changed(recipe(), none).notes == ("changed since step 49: training.ema_decay 0.9 -> none",)
    assert "training.ema_decay was none and is 0.9 (the checkpoint holds no average)" in refusal(none, recipe())
    of_unet = recipe(training={"ema_decay": "none"}, model={"components": {"unet": {"ema_decay": 0.9}}})
    assert "model.components.unet.ema_decay was auto and is 0.9 (the checkpoint" in refusal(none, of_unet)
    also = recipe(model={"components": {"unet": {"ema_decay": 0.5}}})
    assert changed(recipe(), also).notes == ("changed since step 49: model.components.unet.ema_decay auto -> 0.5",)


def test_arguments_that_keep_the_same_numbers_may_change():
    after = recipe(optimizer={"arguments": {"weight_decay": 0.1}})
    assert changed(recipe(), after).notes == ("changed since step 49: optimizer.arguments {} -> {weight_decay = 0.1}",)


def test_the_same_folder_by_another_path_is_the_same_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert changed(recipe(), recipe(model={"path": str(tmp_path / "sd")})).recipe.model.path == str(tmp_path / "sd")


def test_a_checkpoint_of_an_older_version_is_compared_with_the_recipe_in_the_runs_folder(tmp_path):
    source = tmp_path / "checkpoints" / "step-00000049"
    assert settled_by(rate(2e-4), {"step": 49}, source=source) == Settled(recipe=rate(2e-4))
    (tmp_path / "recipe.toml").write_text(recipe_to_toml(rate(1e-4)))
    found = settled_by(rate(2e-4), {"step": 49}, source=source)
    assert found.notes == ("changed since step 49: optimizer.learning_rate 1e-4 -> 2e-4",)


def test_keys_of_other_versions_are_left_out_and_younger_keys_have_their_default():
    state = kept(Settled(recipe=recipe()))
    state["recipe"] |= {"training.gone": 1, "nowhere.key": 2}
    del state["recipe"]["data.flip"]
    assert settled_by(recipe(), state).notes == ()
    with pytest.raises(CheckpointError, match="flip was false and is true"):
        settled_by(recipe(data={"flip": True}), state)


def test_aspects_that_had_no_effect_may_leave_the_recipe():
    state = kept(Settled(recipe=recipe(data={"resolution": ["64x64", "32x32"]})))
    state["recipe"] |= {"data.aspects": [0.5, 2.0], "data.multiple": 16}
    without_number = {key: value for key, value in state.items() if key not in ("format", "identity")}
    assert settled_by(recipe(data={"resolution": ["64x64", "32x32"]}), without_number).notes == ()
    state["recipe"] |= {"data.sizes": [64, "32x32"]}
    for one in (state, {key: value for key, value in state.items() if key not in ("format", "identity")}):
        with pytest.raises(CheckpointError, match=r"data\.aspects was \[0\.5, 2\.0\] and is none"):
            settled_by(recipe(data={"resolution": [64, "32x32"]}), one)


@pytest.mark.parametrize("wrong", [3, "x", [1]])
def test_a_state_that_no_run_has_written_is_refused(wrong):
    with pytest.raises(CheckpointError, match=r"state\.json has the recipe .*it was not written by a run"):
        settled_by(recipe(), {"step": 1, "recipe": wrong})


@pytest.mark.parametrize(
    ("file_then", "run_then", "file_now", "given"),
    list(product((1e-4, 3e-4), (1e-4, 2e-4), (1e-4, 3e-4), (None, 1e-4, 2e-4, 5e-4))),
)
def test_a_rate_of_the_command_line_stays_until_it_or_the_file_is_changed(file_then, run_then, file_now, given):
    """Against the rule in words, for every case of two starts."""
    stated = {"optimizer.learning_rate": file_then} if run_then != file_then else {}
    state = kept(Settled(recipe=rate(run_then), stated=stated))
    now = {} if given is None else {"optimizer.learning_rate": file_now}
    found = settled_by(rate(file_now if given is None else given), state, now)
    stays = given is None and file_now == file_then and run_then != file_then
    assert found.recipe.optimizer.learning_rate == (given or (run_then if stays else file_now))
    assert any("stays 2e-4, as the command line has set it before" in note for note in found.notes) == (
        stays and run_then == 2e-4
    )
    assert any(note.startswith("changed since step 49") for note in found.notes) == (
        found.recipe.optimizer.learning_rate != run_then
    )
    again = settled_by(rate(file_now), kept(found))  # without the command line's value
    assert again.recipe == found.recipe


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_to_toml(recipe()))
    return path


def stated(file, *overrides):
    return stated_values(file, overrides, load_recipe(file, overrides))


def test_values_of_the_file_are_known_for_keys_of_the_command_line_alone(file):
    assert stated(file) == {}
    assert stated(file, "checkpoint.every=3") == {}
    assert stated(file, "optimizer.learning_rate=0.5") == {"optimizer.learning_rate": 0.01}
    assert stated(file, "optimizer.learning_rate=0.01") == {"optimizer.learning_rate": 0.01}
    assert stated(file, "optimizer.arguments.weight_decay=0.1", "training.steps=7") == {
        "optimizer.arguments": {},
        "training.steps": 6,
    }


def test_a_key_that_the_file_lacks_has_its_default(file):
    text = file.read_text().replace("steps = 6\n", "", 1).replace("learning_rate = 0.01\n", "")
    file.write_text(text)
    with pytest.raises(RecipeError, match=r"training\.steps: this key is required"):
        load_recipe(file)
    found = stated(file, "training.steps=7", "optimizer.learning_rate=0.5")
    assert found == {"training.steps": None, "optimizer.learning_rate": 1e-4}


def test_the_only_model_of_several_has_the_keys_of_a_recipe_with_one(tmp_path):
    path = tmp_path / "recipe.toml"
    tables = '[models.base]\npath = "sd"\nlearning_rate = 0.5\n[data]\ntrain = "d"\nresolution = 8\n'
    path.write_text(tables + "[training]\nsteps = 3\nbatch = 4\n")
    assert stated(path, "models.base.learning_rate=0.1") == {"optimizer.learning_rate": 0.5}
    assert stated(path, "models.base.learning_rate=0.5") == {"optimizer.learning_rate": 0.5}


def test_every_key_that_is_said_has_a_value_that_people_read():
    for key, value in values_of(recipe()).items():
        if effect_of(key) is Effect.SAID:
            assert shown(value)
