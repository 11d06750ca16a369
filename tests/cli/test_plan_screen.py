"""`diffusionpipe plan` without a batch: a table of batches, a short screen, and ways out whose commands work."""

import shlex

import pytest
from golden.plans import recorded_profile
from kit.screen_files import assert_screen
from planner import synthetic

from diffusionpipe.cli import main
from diffusionpipe.cli.verbs.plan_asking import PlanCommand
from diffusionpipe.costs.cluster import with_memory
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.costs.files import write_cluster, write_profile
from diffusionpipe.ir.files import read_plan
from diffusionpipe.planner.choosing.rows import GIB


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return int(caught.value.code or 0)


@pytest.fixture
def files(tmp_path):
    write_profile(recorded_profile("sd-2.1-a100-80"), tmp_path / "profile.json")
    return tmp_path


def words(files, cluster="a100-80x2", memory=75.0):
    path = files / f"{cluster}.json"
    write_cluster(with_memory(load_cluster(cluster), round(memory * GIB)), path)
    return ["plan", "--profile", files / "profile.json", "--cluster", path]


@pytest.mark.parametrize(
    ("cluster", "memory"),
    [
        ("a100-80x1", 75),
        pytest.param("a100-80x2", 75, marks=pytest.mark.slow),
        pytest.param("a100-80x2", 13, marks=pytest.mark.slow),
    ],
)
def test_a_screen_has_at_most_25_lines_of_80_columns(files, capsys, cluster, memory):
    assert run(*words(files, cluster, memory)) == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [line for line in lines if line.startswith("  diffusionpipe ")]  # not broken, so that they can be copied
    assert len(lines) - len(commands) <= 25
    assert all(len(line) <= 80 for line in lines if line not in commands)
    assert sum(line.startswith(">") for line in lines) == (2 if any("samples/s" in line for line in lines) else 1)
    assert any(line.startswith("band: ") for line in lines)
    assert any(line.startswith("fullest device, GiB: ") for line in lines)
    for command in commands:
        assert run(*shlex.split(command)[1:]) == 0
        capsys.readouterr()


def test_the_screen(files, capsys):
    assert run(*words(files, memory=13)) == 0
    assert_screen("plan_short_80", capsys.readouterr().out.replace(str(files), "."))


def test_a_list_of_batches_is_a_row_each_and_the_plan_file_is_the_knees(files, capsys):
    assert run(*words(files, "a100-80x1"), "--batch", "64,2,8", "--out", files / "plan.json") == 0
    shown = capsys.readouterr().out.splitlines()
    header = next(number for number, line in enumerate(shown) if "samples/s" in line)
    rows = shown[header + 1 : header + 4]
    assert [int(row.lstrip("> ").split()[0]) for row in rows] == [2, 8, 64]
    knee = next(int(row[1:].split()[0]) for row in rows if row.startswith(">"))
    assert read_plan(files / "plan.json").batch == knee


@pytest.mark.parametrize("batch", ["0", "8,", "x", "1e3", "-4", "8;16", "9999999999"])
def test_a_batch_that_is_none_is_refused(files, capsys, batch):
    assert run(*words(files), f"--batch={batch}") == 2
    assert "give a whole number from 1 to 1,000,000, several with commas between" in capsys.readouterr().err


def test_where_nothing_fits_each_way_out_is_a_command_that_works(files, capsys):
    assert run(*words(files, "a100-80x1", 14.8), "--batch", 32, "--checkpoint", "none") == 2
    message = capsys.readouterr().err
    commands = [line.strip() for line in message.splitlines() if line.startswith("  diffusionpipe plan")]
    assert commands
    for command in commands:
        assert run(*shlex.split(command)[1:]) == 0
        capsys.readouterr()


def test_all_shows_the_table_and_its_legend(tmp_path, capsys):
    write_profile(synthetic.chain([0.01] * 4, parameters=[10**6] * 4, frozen=0.02), tmp_path / "profile.json")
    write_cluster(synthetic.cluster(2), tmp_path / "cluster.json")
    asked = ["plan", "--profile", tmp_path / "profile.json", "--cluster", tmp_path / "cluster.json", "--batch", 8]
    assert run(*asked) == 0
    short = capsys.readouterr().out
    assert run(*asked, "--all") == 0
    shown = capsys.readouterr().out
    assert "simulated, fastest first" in shown
    assert "simulated, fastest first" not in short
    assert len(short.splitlines()) < len(shown.splitlines())


def test_a_change_is_an_option_or_a_key_of_the_recipe():
    options, keys = [("--checkpoint", "*"), ("--cluster", "t4x8")], ["training.activation_checkpointing=true", ""]
    command = PlanCommand(("plan", "--model", "x", "--devices", "2 x t4", "--link=pcie3", "--checkpoint=none"), ())
    assert command.changed(options, keys) == "diffusionpipe plan --model x --checkpoint '*' --cluster t4x8"
    of_recipe = PlanCommand(("plan", "r.toml", "--cluster", "t4x1"), (), has_recipe=True)
    words = "diffusionpipe plan r.toml training.activation_checkpointing=true --cluster t4x8"
    assert of_recipe.changed(options, keys) == words


def test_a_way_out_of_a_profile_or_a_stated_batch_is_one_that_the_command_takes():
    storage = [("--frozen-dtype", "bfloat16")], ["model.frozen_dtype=bfloat16"]
    assert PlanCommand(("plan", "--profile", "p.json", "--cluster", "t4x1"), ()).changed(*storage) == ""
    of_recipe = PlanCommand(("plan", "r.toml", "--profile=p.json", "--batch", "8"), (), has_recipe=True)
    assert of_recipe.changed(*storage) == "diffusionpipe plan r.toml --batch 8 model.frozen_dtype=bfloat16"
    fewer = of_recipe.changed([("--batch", "4")], ["training.batch=4"])
    assert fewer == "diffusionpipe plan r.toml --profile=p.json --batch 4"


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["rtx3060x1", "rtx3090x4", "t4x8"])
def test_flux_on_small_cards_has_a_plan_or_ways_out_that_work_as_printed(
    cluster, capsys, tmp_path_factory, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "flux"))  # counted once for all of them
    status = run("plan", "--model", "flux.1-dev-lora", "--cluster", cluster)
    shown = capsys.readouterr()
    if not status:
        assert "band: " in shown.out
        return
    commands = [line.strip() for line in shown.err.splitlines() if line.startswith("  diffusionpipe plan")]
    assert commands
    for command in commands:
        assert run(*shlex.split(command)[1:]) == 0
        assert "band: " in capsys.readouterr().out
