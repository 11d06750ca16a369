"""A "~" at the start of a path is the home folder: in every key of a recipe and on the whole command line."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from diffusionpipe import cli
from diffusionpipe.errors import ConfigError, RecipeError
from diffusionpipe.models.opening.folder import resolve_folder
from diffusionpipe.trainer.recipe.recipe_file import load_recipe

RECIPE = '[model]\npath = "~/model"\n[data]\nresolution = 32\n[training]\nsteps = 10\nbatch = 8\n'
SCHEDULE = ["schedule", "1f1b", "--ranks", "2", "--microbatches", "2"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder, elsewhere than the current one."""
    here = tmp_path / "here"
    folder = tmp_path / "home"
    here.mkdir()
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(here)
    yield folder
    assert list(here.iterdir()) == [], "a folder named ~ was made here"


def recipe(home, *overrides):
    path = home / "recipe.toml"
    path.write_text(RECIPE)
    return load_recipe(path, ["data.train=~/pictures", *overrides])


def test_every_path_of_a_recipe_may_begin_with_the_home_folder(home):
    (home / "prompts.txt").write_text("a blue tit\n")
    found = recipe(
        home,
        "run.folder=~/run",
        "data.validation=~/others",
        "validation.every=1",
        "pipeline.plan=~/plan.json",
        "sampling.prompts='~/prompts.txt'",
    )
    assert found.run.folder == home / "run"
    assert (found.data.train, found.data.validation) == (home / "pictures", home / "others")
    assert found.pipeline.plan_file == home / "plan.json"
    assert found.sampling.prompts == ("a blue tit",)
    assert recipe(home, "pipeline.orders=~/o.csv").pipeline.orders == str(home / "o.csv")
    assert recipe(home, "run.folder=~").run.folder == home


def test_words_and_hub_ids_stay_and_a_tilde_elsewhere_is_a_letter(home):
    found = recipe(home, "pipeline.plan=auto", "run.folder=runs/~x", "model.path=owner/name")
    assert (found.pipeline.plan, found.run.folder, found.model.path) == ("auto", Path("runs/~x"), "owner/name")


def test_a_model_folder_may_begin_with_the_home_folder(home):
    (home / "model").mkdir()
    assert resolve_folder("~/model") == home / "model"


def test_the_home_of_nobody_is_refused_by_key_and_remedy(home):
    with pytest.raises(RecipeError, match=r"run\.folder: there is no home folder ~no-such-user; give the whole path"):
        recipe(home, "run.folder=~no-such-user/x")
    result = CliRunner().invoke(cli.app, [*SCHEDULE, "--out=~no-such-user/x.json"])
    assert isinstance(result.exception, ConfigError)
    assert "--out: there is no home folder ~no-such-user" in str(result.exception)


def test_files_that_a_command_writes_and_reads_may_be_in_the_home_folder(home):
    written = CliRunner().invoke(cli.app, [*SCHEDULE, "--out=~/file.json", "--perfetto", "~/trace.json"])
    assert written.exit_code == 0
    assert (home / "file.json").is_file()
    assert (home / "trace.json").is_file()
    read = CliRunner().invoke(cli.app, ["schedule", "~/file.json"])
    assert read.exit_code == 0, read.output


def commands(command, words=()):
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*words, name))


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_path_of_every_command_passes_the_rule(home, verb):
    found = 0
    for _, command in commands(cli._load(verb)):
        context = typer.Context(command)
        for parameter in command.params:
            annotation = str(parameter.type_descriptor.annotation)
            if "Path" not in annotation and parameter.name not in {"cluster", "model"}:
                continue
            found += 1
            takes_several = parameter.multiple or parameter.nargs == -1
            given = ["~/file.json"] if takes_several else "~/file.json"
            value = parameter.process_value(context, given)
            assert [Path(one) for one in (value if takes_several else [value])] == [home / "file.json"]
    assert found
