"""TensorBoard's event files, the guard around trackers, and their names."""

import io
import json
import logging

import numpy as np
import pytest
from kit.tiny_runs import recipe_of, save_dit, save_pictures, train_here
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from diffusionpipe.errors import ConfigError, RecipeError
from diffusionpipe.trainer.recipe import recipe_from_table, recipe_to_toml, with_values
from diffusionpipe.trainer.reporting import trackers
from diffusionpipe.trainer.reporting.metrics import MetricsWriter, read_metrics
from diffusionpipe.trainer.reporting.tracker import LoggedImage
from diffusionpipe.trainer.reporting.trackers import Trackers, flat_values, open_trackers, tag_of

SECTIONS = {"training": {"steps": 8}, "sampling": {"prompts": ("a wren", "an owl"), "every": 2}}


@pytest.fixture
def recipe(tmp_path):
    return recipe_of(tmp_path / "sd", tmp_path / "data", tmp_path / "run", **SECTIONS)


def pictures(seed):
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, (8, 12, 3), dtype=np.uint8) for _ in range(2)]


def shown(folder, seed=0):
    names = ("000-a-wren", "001-an-owl")
    found = zip(names, ("a wren", "an owl"), pictures(seed), strict=True)
    return [LoggedImage(name=n, caption=c, picture=p, path=folder / f"{n}.png") for n, c, p in found]


def numbers(step):
    return {"loss": 1 / step, "learning_rate": 0.1, "step_s": 0.25, "bubble": 0.0}


def write(recipe, steps, resume_step=None):
    recipe.run.folder.mkdir(parents=True, exist_ok=True)
    with MetricsWriter(recipe.run.folder, resume_step, open_trackers(recipe, resume_step)) as writer:
        for step in steps:
            writer.write(step, numbers(step))
            if step % 2 == 0:
                writer.write(step, {"validation_loss": 2 / step, "validation_loss_t0.1": 3 / step})
                writer.show(step, shown(recipe.run.folder, seed=step))


def events_of(folder):
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0, "scalars": 0, "tensors": 0})
    return events.Reload()


def decoded(event):
    return np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))


def test_tensorboard_holds_the_numbers_of_metrics_jsonl_in_groups(recipe):
    write(recipe, range(1, 5))
    events = events_of(recipe.run.folder)
    expected = {}
    for row in read_metrics(recipe.run.folder):
        for key, value in row.items():
            if key != "step":
                expected.setdefault(tag_of(key), []).append((row["step"], np.float32(value)))
    found = {tag: [(e.step, np.float32(e.value)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found == expected
    assert set(found) == {
        "train/loss", "train/learning_rate", "speed/step_s", "speed/bubble", "validation/loss", "validation/loss_t0.1",
    }  # fmt: skip


def test_tensorboard_holds_every_picture_and_its_prompt(recipe):
    write(recipe, range(1, 5))
    events = events_of(recipe.run.folder)
    assert events.Tags()["images"] == ["samples/000-a-wren", "samples/001-an-owl"]
    for number, tag in enumerate(events.Tags()["images"]):
        found = events.Images(tag)
        assert [event.step for event in found] == [2, 4]
        assert all(np.array_equal(decoded(event), pictures(event.step)[number]) for event in found)
    assert "`001-an-owl`: an owl" in text_of(events, "samples/captions")


def text_of(events, name):
    (event,) = events.Tensors(f"{name}/text_summary")
    return event.tensor_proto.string_val[0].decode()


def test_tensorboard_holds_the_recipe(recipe):
    import tomllib

    write(recipe, [1])
    text = text_of(events_of(recipe.run.folder), "recipe")
    toml = text.removeprefix("```toml\n").removesuffix("\n```")
    assert recipe_from_table(tomllib.loads(toml), source="a.toml") == recipe
    assert toml == recipe_to_toml(recipe)


def test_a_resumed_run_hides_the_steps_that_it_repeats(recipe, monkeypatch):
    # Event files end with a count over the process, and as text "10" comes before "9".
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    write(recipe, range(1, 6))
    write(recipe, range(3, 8), resume_step=2)
    events = events_of(recipe.run.folder)
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 8))
    assert [event.step for event in events.Images("samples/000-a-wren")] == [2, 4, 6]


class Failing:
    """A tracker whose network goes away."""

    def __init__(self):
        self.calls = 0

    def describe(self, recipe, values):
        pass

    def scalars(self, step, values):
        self.calls += 1
        if step == 2:
            raise ConnectionError("no route to host")

    def pictures(self, step, shown):
        self.calls += 1

    def close(self):
        self.calls += 1


class Recording(Failing):
    def scalars(self, step, values):
        self.calls += 1


def test_a_tracker_that_fails_is_left_out_with_one_warning_and_the_rest_goes_on(tmp_path, caplog):
    failing, other = Failing(), Recording()
    with (
        caplog.at_level(logging.WARNING),
        MetricsWriter(tmp_path, trackers=Trackers({"wandb": failing, "mlflow": other})) as writer,
    ):
        for step in range(1, 5):
            writer.write(step, {"loss": 1.0})
            writer.show(step, [])
    (record,) = caplog.records
    assert 'tracker=wandb recording=False reason="ConnectionError: no route to host"' in record.getMessage()
    assert failing.calls == 3  # steps 1 and 2, and the pictures between
    assert other.calls == 9
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_a_tracker_that_is_not_installed_is_refused_with_what_to_install(recipe, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    named = recipe.model_copy(update={"run": recipe.run.model_copy(update={"trackers": ("wandb", "trackio")})})
    with pytest.raises(RecipeError) as caught:
        open_trackers(named, None)
    for name in ("wandb", "trackio"):
        assert f"{name} is not installed; run pip install {name}, or remove it" in str(caught.value)


def test_without_tensorboard_nothing_is_recorded_and_nothing_refused(recipe, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    write(recipe, [1])
    assert not (recipe.run.folder / "tensorboard").exists()


def test_an_unknown_tracker_is_refused_with_the_known_ones(recipe):
    import tomllib

    table = tomllib.loads(recipe_to_toml(recipe))
    table["run"]["trackers"] = ["wanbd"]
    with pytest.raises(RecipeError, match=r"run\.trackers\[0\].*'auto', 'tensorboard', 'wandb'.*got \"wanbd\""):
        recipe_from_table(table, source="a.toml")


@pytest.mark.parametrize(
    ("given", "expected"),
    [("none", []), ("auto", ["auto"]), ("wandb", ["wandb"]), (["auto", "mlflow"], ["auto", "mlflow"])],
)
def test_trackers_are_one_name_or_a_list(recipe, given, expected):
    import tomllib

    table = tomllib.loads(recipe_to_toml(recipe))
    table["run"]["trackers"] = given
    assert list(recipe_from_table(table, source="a.toml").run.trackers) == expected


def test_a_tracker_that_does_not_start_is_an_error_with_what_to_do(recipe, monkeypatch):
    def refuse(name, opening):
        raise PermissionError("not logged in")

    monkeypatch.setattr(trackers, "_open", refuse)
    with pytest.raises(ConfigError, match=r"tensorboard did not start: PermissionError: not logged in\nset up"):
        open_trackers(recipe, None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "Expecting property name"), ("[]", "an object of texts"), ('{"wandb": 1}', "an object of texts")],
)
def test_a_damaged_file_of_identities_is_an_error_with_what_to_do(recipe, text, reason):
    recipe.run.folder.mkdir()
    (recipe.run.folder / "trackers.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"trackers\.json: cannot be read: .*{reason}.*; remove it, and the"):
        open_trackers(recipe, 3)


class Closing(Recording):
    def close(self):
        self.calls = "closed"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one step."""
    folder = tmp_path_factory.mktemp("trained")
    save_dit(folder / "dit")
    save_pictures(folder / "data")
    recipe = recipe_of(folder / "dit", folder / "data", folder / "run", training={"steps": 1})
    train_here(recipe, exports=False)
    return recipe


def test_a_run_that_ends_before_its_first_step_closes_its_trackers(trained, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(trackers, "_open", lambda *_: (opened.append(Closing()) or opened[-1], None))

    def stop(start):
        raise ConfigError("the user says no")

    fresh = with_values(trained, {"run.folder": str(tmp_path / "run")})
    with pytest.raises(ConfigError, match="says no"):
        train_here(fresh, announce=stop)
    longer = with_values(trained, {"training.steps": 2})
    metrics = trained.run.folder / "metrics.jsonl"
    metrics.rename(tmp_path / "metrics.jsonl")
    metrics.mkdir()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        train_here(longer, "latest")
    assert [one.calls for one in opened] == ["closed", "closed"]


def test_configurations_are_plain_values(recipe):
    values = flat_values(recipe)
    assert values["training.batch"] == 4
    assert values["data.validation"] == "none"
    assert json.loads(str(values["sampling.prompts"])) == ["a wren", "an owl"]
    assert all(isinstance(value, str | int | float) for value in values.values())
