"""`profile --operations`: screen, file and picture of a recipe; what is refused."""

import pytest
from kit.tiny_runs import recipe_of, save_dit, save_pictures

from diffusionpipe.cli import main
from diffusionpipe.costs.operations import read_report
from diffusionpipe.trainer.recipe import recipe_to_toml


@pytest.fixture
def run(tmp_path, capsys):
    def command(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["profile", *map(str, arguments)])
        shown = capsys.readouterr()
        return caught.value.code or 0, shown.out, " ".join(shown.err.split())

    return command


@pytest.mark.slow
def test_operations_of_a_recipe_are_shown_written_drawn_and_shown_again(run, tmp_path):
    save_dit(tmp_path / "dit")
    save_pictures(tmp_path / "data")
    recipe = recipe_of(tmp_path / "dit", tmp_path / "data", tmp_path / "run")
    (tmp_path / "recipe.toml").write_text(recipe_to_toml(recipe))
    out, png = tmp_path / "operations.json", tmp_path / "operations.png"
    code, shown, problem = run(tmp_path / "recipe.toml", "--operations", out, "--png", png, "--analytic", "rtx4090")
    assert code == 0, problem
    report = read_report(out)
    assert report.samples == 2  # a batch of 4 in two micro-batches
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "lines hold 80% of it" in shown
    assert "Side by side, all operations would be at most" in shown
    assert all(len(line) <= 110 for line in shown.splitlines())
    assert run(out)[:2] == (0, shown)
    code, _, problem = run(out, "--operations", tmp_path / "other.json")
    assert (code, "is not a recipe; give the recipe" in problem) == (2, True)


def test_a_picture_of_a_profile_and_a_missing_file_are_refused(run, tmp_path):
    code, _, problem = run(tmp_path / "recipe.toml", "--png", tmp_path / "x.png")
    assert (code, "--png: only operations are drawn; give --operations FILE too" in problem) == (2, True)
    code, _, problem = run(tmp_path / "none.json")
    assert (code, "none.json" in problem) == (2, True)
