"""The commands that `plan` prints for other plans work, and give what it says of them."""

import re
import shlex

import pytest
from planner import synthetic

from diffusionpipe.cli import main
from diffusionpipe.cli.verbs.plan_asking import PlanCommand
from diffusionpipe.costs.files import write_cluster, write_profile
from diffusionpipe.ir.files import read_plan


def run(*words) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    return caught.value.code or 0


@pytest.fixture
def asking(tmp_path):
    """The words of a command for a model of 600 million parameters on a cluster."""

    def words(cluster, batch=12):
        write_profile(synthetic.chain([0.01] * 6, parameters=[10**8] * 6, frozen=0.0), tmp_path / "profile.json")
        write_cluster(cluster, tmp_path / "my cluster.json")
        files = ["--profile", tmp_path / "profile.json", "--cluster", tmp_path / "my cluster.json"]
        others = ["--out", str(tmp_path / "plan.json"), "--all", "--checkpoint", "none"]
        return ["plan", *map(str, files), "--batch", str(batch), *others]

    return words


def step_in(row):
    """The step in ms of a row of the table: the first figure behind its layout."""
    return float(re.search(r"  +(\d+\.?\d*)  +\d", row)[1])


def chosen(shown):
    """The step of the plan."""
    return step_in(next(line for line in shown.splitlines() if line.startswith("> ")))


def command_in(shown, option):
    (line,) = [line for line in shown.splitlines() if f" {option} " in line and line.startswith("  diffusionpipe ")]
    return shlex.split(line)[1:]


def test_the_command_for_fewer_devices_gives_the_step_of_their_row(asking, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    words = asking(synthetic.cluster(3, speeds=(1.0, 1e-3, 1.0)))
    assert run(*words) == 0
    shown = capsys.readouterr().out
    row = shown.split("on fewer devices, simulated\n")[1].splitlines()[0]
    command = command_in(shown, "--use")
    assert command == [*words, "--use", "0,2"]
    assert read_plan(tmp_path / "plan.json").mesh.num_ranks == 3
    assert run(*command) == 0
    shown = capsys.readouterr().out
    assert chosen(shown) == pytest.approx(step_in(row), rel=1e-3)
    assert "on fewer devices" not in shown
    assert read_plan(tmp_path / "plan.json").mesh.num_ranks == 2
    shows = ["plan", "show", tmp_path / "plan.json", *words[1:5]]
    assert run(*shows, "--use", "0,2") == 0
    assert f"{step_in(row):.1f} ms" in capsys.readouterr().out
    assert run(*shows, "--use", "0,1") == 0
    assert f"{step_in(row):.1f} ms" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_for_less_memory_gives_the_step_that_the_warning_says(asking, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    words = asking(synthetic.cluster(2, memory=10.0, intra_gb=90.0))
    assert run(*words) == 0
    shown = capsys.readouterr().out
    said = re.search(r"GiB and (\d+\.\d) ms a\s+step", shown)
    assert run(*command_in(shown, "--memory")) == 0
    assert chosen(capsys.readouterr().out) == pytest.approx(float(said[1]), abs=0.5)


def test_an_error_ends_with_the_command_for_fewer_devices(asking, capsys):
    words = asking(synthetic.cluster(7), batch=1)
    assert run(*words) == 2
    error = capsys.readouterr().err
    assert "cannot be cut over 7 ranks" in error
    assert error.strip().endswith(shlex.join(["diffusionpipe", *words, "--use", "0,1,2"]))


def test_an_option_is_changed_and_ranks_are_those_of_the_whole_cluster():
    command = PlanCommand(("plan", "a b.toml", "--use", "0,2,5", "--memory=3"), (0, 2, 5))
    assert command.use([0, 2]) == "diffusionpipe plan 'a b.toml' --memory=3 --use 0,5"
    assert command.memory(2**30) == "diffusionpipe plan 'a b.toml' --use 0,2,5 --memory 1"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--use", "0,x", "'x' is not a rank; give ranks with commas between, e.g. 0,1,3"),
        ("--use", "", "'' is not a rank"),
        ("--use", "1,1", "names a rank twice"),
        ("--use", "0,7", "cluster synthetic has ranks 0 to 1, and no rank 7; leave it out, or name a larger cluster"),
        ("--memory", "0", "--memory 0.0: give more than 0 GiB"),
        ("--memory", "nan", "--memory nan: give more than 0 GiB"),
    ],
)
def test_ranks_and_memory_that_cannot_be_are_refused(asking, capsys, option, value, message):
    assert run(*asking(synthetic.cluster(2)), option, value) == 2
    assert message in capsys.readouterr().err
