import json
from dataclasses import replace

import pytest
from golden.plans import recorded_profile
from kit.screen_files import assert_screen
from PIL import Image
from typer.testing import CliRunner

from diffusionpipe import cli
from diffusionpipe.cli.verbs.schedule_search import _origin_text
from diffusionpipe.costs.files import write_profile
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir.files import read_schedule
from diffusionpipe.ordering.instance_file import read_instance
from diffusionpipe.timing.legal import check

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


@pytest.mark.parametrize("columns", ["80", "160"])
def test_the_screen_fits_the_terminal_and_explains_its_letters_and_figures(instance, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    result = run(instance(microbatches=6, placement="v", comm=0.5, memory_limit=[4, 4]))
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= int(columns)
    assert_screen(f"schedule_search_{columns}", result.stdout)


def test_a_proof_and_the_published_schedule_that_an_order_comes_from_are_named(instance):
    shown = " ".join(run(instance(memory_limit=[2, 2])).stdout.split())
    assert "no order has a shorter one (proven)" in shown or "no order is below" in shown
    assert _origin_text("zb-v") == "the published schedule zb-v"
    assert _origin_text("zb-v+") == "the published schedule zb-v, then improved"
    assert _origin_text("search 1:2:100") == "by one of the search's own rules"


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


def sdxl():
    return replace(recorded_profile("sdxl-rtx4090"), device="NVIDIA L40S")


def make_instance(path, *arguments):
    profile = path.with_name("profile.json")
    write_profile(sdxl(), profile)
    options = ("--profile", profile, "--cluster", "l40sx8", "--batch", 16, "--out", path, *arguments)
    return CliRunner().invoke(cli.app, ["schedule", "instance", *map(str, options)])


def test_a_profile_and_a_cluster_give_an_instance_that_the_search_takes(tmp_path):
    path = tmp_path / "instance.json"
    result = make_instance(path, "--microbatches", 8, "--placement", "v", "--seconds", 0)
    assert result.exit_code == 0, result.output
    question, profile = read_instance(path), sdxl()
    assert (question.ranks, question.microbatches, question.placement, len(question.stages)) == (8, 8, "v", 16)
    forward = sum(profile.forward(name, 2) for name in profile.graph.backbone_layers)
    assert sum(stage.forward for stage in question.stages) * 1e-7 == pytest.approx(
        forward, rel=0.05
    )  # and the weights cast once
    assert all(0 < limit < 48 * 2**30 for limit in question.memory_limit)
    shown = run(path)
    assert shown.exit_code == 0, shown.output
    assert "placement " in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--microbatches", 7), "a batch of 16 cannot be cut into 7 equal micro-batches"),
        (("--microbatches", 8, "--placement", "u"), "--placement is 'u'; use linear, v, loop, any"),
        (("--microbatches", 8, "--cluster", "l40sx8:9"), "144 half-stages, but the trained part has only"),
    ],
)
def test_an_instance_that_cannot_be_made_is_refused(tmp_path, arguments, says):
    result = make_instance(tmp_path / "instance.json", *arguments)
    assert isinstance(result.exception, ConfigError), result.output
    assert says in str(result.exception)
