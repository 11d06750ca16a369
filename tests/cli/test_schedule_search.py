import json

import pytest
from PIL import Image
from typer.testing import CliRunner

from diffusionpipe import cli
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir.check import check
from diffusionpipe.ir.files import read_schedule

HALF = {"forward": 1, "input_grad": 1, "weight_grad": 1, "activation": 1, "kept_after_input_grad": 1}


@pytest.fixture
def instance(tmp_path):
    """Writes an instance with changes, and gives its path."""

    def write(**changes):
        table = {"ranks": 2, "microbatches": 3, "placement": "linear", "stages": [HALF] * 4, "seconds": 1}
        path = tmp_path / "instance.json"
        path.write_text(json.dumps(table | changes))
        return path

    return write


def run(*arguments):
    return CliRunner().invoke(cli.app, ["schedule", "search", *map(str, arguments)])


def test_json_holds_the_figures_and_the_orders(instance):
    figures = json.loads(run(instance(), "--json").stdout)
    assert list(figures) == [
        "placement", "makespan", "window", "bubble", "peak_memory", "orders", "lower_bound", "optimal", "family",
    ]  # fmt: skip
    assert figures["makespan"] == figures["lower_bound"] == 20
    assert figures["optimal"] is True
    assert figures["bubble"] == pytest.approx(1 - 18 / 20)
    assert sorted(figures["orders"][1]) == sorted(f"1{op}{k}" for op in "FIW" for k in range(3))


def test_the_report_shows_the_sketch_the_figures_and_the_proof(instance):
    result = run(instance(memory_limit=[2, 2]))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("2 ranks, 3 micro-batches: placement linear, from ")
    assert lines[2].startswith("0 | F0")
    assert "peak memory" in result.stdout
    assert "proven to be the least" in result.stdout or "no order is below" in result.stdout


def test_files_are_written_and_their_notices_stay_off_stdout(instance, tmp_path):
    png, svg, out = tmp_path / "a.png", tmp_path / "a.svg", tmp_path / "schedule.json"
    result = run(instance(placement="v"), "--json", "--png", png, "--svg", svg, "--out", out)
    assert result.stderr == f"wrote {png}\nwrote {svg}\nwrote {out}\n"
    figures = json.loads(result.stdout)
    schedule = read_schedule(out)
    check(schedule)
    assert [[str(action) for action in order] for order in schedule.orders] == figures["orders"]
    assert Image.open(png).size[0] > 100
    assert "<svg" in svg.read_text()


def test_problems_of_the_instance_are_config_errors(instance):
    result = run(instance(ranks=0))
    assert isinstance(result.exception, ConfigError)
    assert "ranks: is 0" in str(result.exception)
    result = run(instance(memory_limit=[1, 2]))
    assert "rank 0 has 1; with placement linear it needs at least 2" in str(result.exception)
