"""Schedules, families and trackers of other packages are found by their entry points; a broken one is named."""

import json

import pytest
from typer.testing import CliRunner

import diffusionpipe as dp
from diffusionpipe.cli import app
from diffusionpipe.errors import ConfigError
from diffusionpipe.plugins import Kind, load, offered
from diffusionpipe.schedules import generator_of

SOURCE = """
def orders(ranks, microbatches):
    "All forwards, then all backwards."
    return [
        [f"{r}F{i}" for i in range(microbatches)] + [f"{r}B{i}" for i in range(microbatches)] for r in range(ranks)
    ]


def illegal(ranks, microbatches):
    return [["0B0", "0F0"]]


class Tracker:
    heard = []

    def describe(self, recipe, values):
        self.heard.append(("describe", values["run.trackers"]))

    def scalars(self, step, values):
        self.heard.append((step, dict(values)))

    def pictures(self, step, shown):
        pass

    def close(self):
        self.heard.append("closed")


def open_tracker(opening):
    return Tracker()


def family():
    from diffusionpipe.models.families.dit import FAMILY
    return FAMILY


NUMBER = 3


def __getattr__(name):
    if name == "FAMILY":
        return family()
    raise AttributeError(name)
"""
ENTRIES = """
[diffusionpipe.schedules]
mine = offering_package:orders
wrong = offering_package:illegal
gone = lost_package:orders
number = offering_package:NUMBER
gpipe = offering_package:illegal

[diffusionpipe.families]
MyPipeline = offering_package:FAMILY
LostPipeline = lost_package:FAMILY

[diffusionpipe.trackers]
notebook = offering_package:open_tracker
"""


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    info = folder / "offering_package-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "offering_package.py").write_text(SOURCE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offering-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(folder)
    return folder


def test_a_schedule_is_found_by_its_name_everywhere():
    found = dp.schedule("mine", ranks=2, microbatches=3)
    assert found.orders == dp.schedule("gpipe", ranks=2, microbatches=3).orders
    assert found.name == "mine"
    assert generator_of("mine")(2, 3, 4).placement.pipelines[0].microbatches == (4, 4, 4)
    shown = CliRunner().invoke(app, ["schedule", "mine", "--ranks", "2", "--microbatches", "2"])
    assert (shown.exit_code, "mine, 2 ranks" in shown.output) == (0, True), shown.output
    assert "mine" in CliRunner().invoke(app, ["schedule", "list"]).output


def test_names_of_ours_win():
    assert dp.schedule("gpipe", ranks=2, microbatches=2).num_workers == 2


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "gone",
            r"the schedule 'gone' of offering-package \(lost_package:orders\) cannot be imported \(Mod",
        ),
        ("number", "the schedule 'number' that a package offers is not a function"),
        ("absent", "there is no schedule 'absent'"),
    ],
)
def test_a_broken_one_is_named_and_the_rest_works(name, says):
    with pytest.raises(ConfigError, match=says):
        dp.schedule(name, ranks=1, microbatches=1)
    assert dp.schedule("mine", ranks=1, microbatches=1).num_workers == 1


def test_its_orders_are_checked_as_all_others():
    with pytest.raises(dp.ScheduleError, match="wrong: the orders are illegal"):
        dp.schedule("wrong", ranks=1, microbatches=1)


def test_the_search_says_that_it_compares_published_schedules(tmp_path):
    from pathlib import Path

    profile = Path(__file__).parent / "files" / "profile.json"
    with pytest.raises(ConfigError, match="the schedule 'mine' comes from a package"):
        dp.plan(profile, cluster="rtx4090x2", batch=16, schedule="mine")
    found = dp.plan(profile, cluster="rtx4090x2", batch=16, schedule="mine", stages=2, microbatches=4)
    assert found.plan.train.name == "mine"


def test_two_packages_with_one_name_are_refused(package):
    other = package / "other_package-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[diffusionpipe.schedules]\nmine = other_package:orders\n")
    with pytest.raises(ConfigError, match=r"'mine' is offered by offering-package .* and other-package"):
        load(Kind.SCHEDULE, "mine")
    assert offered(Kind.SCHEDULE).count("mine") == 1


def test_a_family_is_found_by_the_class_of_the_pipeline(tmp_path):
    from diffusionpipe.errors import ModelError
    from diffusionpipe.models.families.dit import FAMILY
    from diffusionpipe.models.opening.folder import family_of

    index = tmp_path / "model" / "model_index.json"
    index.parent.mkdir()
    index.write_text(json.dumps({"_class_name": "MyPipeline"}))
    assert family_of(index.parent) is FAMILY
    index.write_text(json.dumps({"_class_name": "LostPipeline"}))
    with pytest.raises(ConfigError, match="the family 'LostPipeline' of offering-package"):
        family_of(index.parent)
    index.write_text(json.dumps({"_class_name": "OtherPipeline"}))
    with pytest.raises(ModelError, match="is a OtherPipeline; supported pipelines"):
        family_of(index.parent)


def test_a_recipe_may_name_a_tracker_and_hands_it_the_numbers(tmp_path):
    from kit.tiny_runs import recipe_of

    from diffusionpipe.trainer.recipe import recipe_to_toml
    from diffusionpipe.trainer.reporting.trackers import open_trackers

    (tmp_path / "data").mkdir()
    recipe = recipe_of(tmp_path / "dit", tmp_path / "data", tmp_path / "run", run={"trackers": ["notebook"]})
    assert 'trackers = ["notebook"]' in recipe_to_toml(recipe)
    import offering_package

    offering_package.Tracker.heard.clear()
    trackers = open_trackers(recipe, None)
    trackers.scalars(3, {"loss": 0.5})
    trackers.close()
    assert offering_package.Tracker.heard == [("describe", '["notebook"]'), (3, {"train/loss": 0.5}), "closed"]
