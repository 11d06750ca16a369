import tomllib

import pytest
from typer.testing import CliRunner

from diffusionpipe import cli
from diffusionpipe.errors import ConfigError
from diffusionpipe.workflows.examples import commands_of, examples, write_example


def test_every_example_of_the_checkout_is_written_as_it_is(tmp_path):
    for name, source in examples().items():
        place = write_example(name, tmp_path)
        files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
        for path in files:
            if "__pycache__" not in path.parts:
                copy = place if source.is_file() else place / path.relative_to(source)
                assert copy.read_bytes() == path.read_bytes()
    assert {"digits", "cascade", "sdxl", "flux.1-dev"} <= examples().keys()


def test_the_commands_of_a_written_example_name_files_that_are_there(tmp_path):
    for name in examples():
        for command in commands_of(write_example(name, tmp_path)):
            for word in command.split():
                if word.startswith("examples/"):
                    assert (tmp_path / word).exists(), command


def test_the_command_lists_and_writes(tmp_path):
    listed = CliRunner().invoke(cli.app, ["example"]).output.splitlines()
    assert len(listed) == len(examples())
    assert any(line.startswith("sdxl ") and "Stable Diffusion XL" in line for line in listed)
    done = CliRunner().invoke(cli.app, ["example", "digits", "--into", str(tmp_path)])
    assert "diffusionpipe train examples/digits/recipe.toml --ranks 2" in done.output
    recipe = tomllib.loads((tmp_path / "examples/digits/recipe.toml").read_text(encoding="utf-8"))
    assert (tmp_path / recipe["model"]["path"] / "model_index.json").is_file()


def test_a_place_that_is_taken_and_an_unknown_name_are_refused(tmp_path):
    write_example("sdxl", tmp_path)
    with pytest.raises(ConfigError, match=r"sdxl\.toml exists; give another folder by --into"):
        write_example("sdxl", tmp_path)
    with pytest.raises(ConfigError, match="there is no example 'digit'; the nearest: digits"):
        write_example("digit", tmp_path)
    with pytest.raises(ConfigError, match="there is no example 'nonsense'; `diffusionpipe example` lists all"):
        write_example("nonsense", tmp_path)
