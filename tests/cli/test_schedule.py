import json

import pytest
from kit.screen_files import assert_screen
from PIL import Image
from typer.testing import CliRunner

from diffusionpipe import cli
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir.files import read_schedule
from diffusionpipe.ir.torch_csv import schedule_from_csv
from diffusionpipe.schedules import REGISTRY


def run(*arguments):
    return CliRunner().invoke(cli.app, ["schedule", *map(str, arguments)])


def output_of(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def problems_of(*arguments):
    result = run(*arguments)
    assert isinstance(result.exception, ConfigError), result.output
    return str(result.exception).splitlines()


SMALL = ("1f1b", "--ranks", 2, "--microbatches", 3)


@pytest.mark.parametrize("columns", ["80", "160"])
def test_the_screen_fits_the_terminal_and_explains_its_letters_and_figures(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    text = output_of("zb-v", "--ranks", 4, "--microbatches", 8)
    assert max(map(len, text.splitlines())) <= int(columns)
    assert_screen(f"schedule_{columns}", text)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_json_has_the_same_work_for_every_schedule(name):
    figures = json.loads(output_of(name, "--ranks", 4, "--microbatches", 8, "--input-grad", 2, "--json"))
    assert figures["busy"] == [32] * 4
    assert figures["makespan"] >= 32
    assert figures["bubble"] == pytest.approx(1 - 32 / figures["makespan"])
    assert figures["orders"] == [" ".join(map(str, order)) for order in REGISTRY[name](4, 8).orders]
    assert len(figures["peak_activations"]) == 4


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_formulas_of_the_papers_hold(name):
    figures = json.loads(output_of(name, "--ranks", 4, "--microbatches", 6, "--input-grad", 2, "--json"))
    assert figures["makespan"] == (6 + 4 - 1) * (1 + 2 + 1)
    assert figures["bubble"] == pytest.approx(3 / 9)


def test_integers_stay_integers_and_decimals_carry_no_noise():
    assert '"makespan": 12,' in output_of(*SMALL, "--json")
    assert '"makespan": 1.2,' in output_of(
        *SMALL, "--json", "--forward", 0.1, "--input-grad", 0.1, "--weight-grad", 0.1
    )
    assert "makespan         1.2  from" in output_of(
        *SMALL, "--forward", 0.1, "--input-grad", 0.1, "--weight-grad", 0.1
    )


def test_transfers_lengthen_the_iteration():
    assert json.loads(output_of(*SMALL, "--comm", 1, "--json"))["makespan"] > 12


def test_the_csv_is_the_orders_alone():
    assert schedule_from_csv(output_of(*SMALL, "--csv"), name="1f1b") == REGISTRY["1f1b"](2, 3)


def test_files_are_written_and_their_notices_stay_off_stdout(tmp_path):
    png, trace, out = tmp_path / "a.png", tmp_path / "a.json", tmp_path / "schedule.json"
    result = run(*SMALL, "--csv", "--png", png, "--perfetto", trace, "--out", out)
    assert result.exit_code == 0
    assert result.stdout == output_of(*SMALL, "--csv")
    assert result.stderr == f"wrote {png}\nwrote {trace}\nwrote {out}\n"
    assert Image.open(png).format == "PNG"
    assert json.loads(trace.read_text())["traceEvents"]
    assert read_schedule(out) == REGISTRY["1f1b"](2, 3)


def test_options_may_stand_before_the_name():
    assert output_of("--ranks", 2, "--microbatches", 3, "1f1b") == output_of(*SMALL)


def test_the_list_names_every_schedule_with_its_first_line():
    text, _, legend = output_of("list").partition("\n\n")
    lines = text.splitlines()
    assert legend.startswith("p workers")
    assert "`" not in text.replace("`waves`", "").replace("`chunks`", ""), "names of Python functions"
    assert [line.split()[0] for line in lines] == list(REGISTRY)
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("1f1", "--ranks", 2, "--microbatches", 2), "no schedule is called '1f1'; did you mean 1f1b?"),
        (("GPipe", "--ranks", 2, "--microbatches", 2), "no schedule is called 'GPipe'; did you mean gpipe?"),
        (
            ("zzz", "--ranks", 2, "--microbatches", 2),
            "no schedule is called 'zzz'; `diffusionpipe schedule list` lists the names",
        ),
        (("1f1b", "--ranks", 0, "--microbatches", 2), "--ranks is 0; use a number of at least 1"),
        (("1f1b", "--ranks", 2, "--microbatches", -3), "--microbatches is -3; use a number of at least 1"),
        (
            ("1f1b", "--ranks", 100_000, "--microbatches", 100_000),
            "100000 ranks x 100000 micro-batches are more than 50,000 forwards; use fewer",
        ),
        ((*SMALL, "--forward", -1), "--forward is -1; use a number from 0 to 1e15"),
        ((*SMALL, "--comm", "nan"), "--comm is nan; use a number from 0 to 1e15"),
        ((*SMALL, "--input-grad", "inf"), "--input-grad is inf; use a number from 0 to 1e15"),
        ((*SMALL, "--weight-grad", "fast"), "--weight-grad is fast; use a number from 0 to 1e15"),
        ((*SMALL, "--forward", "9" * 400), f"--forward is {'9' * 40}; use a number from 0 to 1e15"),
        ((*SMALL, "--forward", "1e308"), "--forward is 1e308; use a number from 0 to 1e15"),
        (
            ("interleaved-zb", "--ranks", 1, "--microbatches", 1_000_000),
            "1 ranks x 1000000 micro-batches are more than 50,000 forwards; use fewer",
        ),
        ((*SMALL, "--json", "--csv"), "--json and --csv exclude each other; use one of them"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(arguments, says):
    assert problems_of(*arguments) == [says]


def test_everything_that_is_wrong_is_said_at_once():
    assert len(problems_of("1fb", "--ranks", 0, "--microbatches", 0, "--forward", "x", "--json", "--csv")) == 5


def test_a_missing_name_or_size_is_a_usage_error():
    assert run().exit_code == 2
    assert run("1f1b", "--ranks", "two", "--microbatches", 2).exit_code == 2


def test_a_family_needs_both_sizes():
    assert problems_of("1f1b") == [
        "--ranks is missing; 1f1b suits any number, so give one",
        "--microbatches is missing; 1f1b suits any number, so give one",
    ]


@pytest.mark.parametrize("name", ["mine.csv", "mine.json"])
def test_a_file_of_orders_is_drawn_and_measured_as_the_family_that_wrote_it(name, tmp_path):
    path = tmp_path / name
    path.write_text(output_of(*SMALL, "--csv"))
    if name.endswith("json"):
        output_of(*SMALL, "--out", path)
    options = ("--comm", 1, "--input-grad", 2)
    assert output_of(path, *options) == output_of(*SMALL, *options).replace("1f1b", name)
    again = tmp_path / "again.json"
    output_of(path, "--csv", "--out", again, "--png", tmp_path / "mine.png")
    assert read_schedule(again).orders == REGISTRY["1f1b"](2, 3).orders
    assert json.loads(output_of(path, "--json"))["ranks"] == 2


def test_rules_are_drawn_at_the_sizes_that_are_given(tmp_path):
    path = tmp_path / "mine.rules"
    path.write_text("stages: chain\nlimit: ranks - rank\npriority: F B")
    assert output_of(path, *SMALL[1:], "--csv") == output_of(*SMALL, "--csv")
    assert "rules suit any number of ranks and micro-batches" in problems_of(path, "--ranks", 2)[0]


def test_an_illegal_file_of_orders_is_refused_before_anything_is_written(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0\n1B0,1F0\n")
    result = run(path, "--out", tmp_path / "out.json")
    assert str(result.exception).splitlines()[1] == "  line 2, cell 1: worker 1: 1B0 comes before 1F0"
    assert not (tmp_path / "out.json").exists()


def test_a_huge_file_of_orders_is_refused_before_it_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr("diffusionpipe.cli.verbs.schedule.MAX_FORWARDS", 1_000)
    path = tmp_path / "huge.csv"
    path.write_text(",".join(f"0F{i}" for i in range(1_001)) + "\n")
    assert problems_of(path) == [f"{path}: 1,001 forwards are more than 1,000; use fewer"]


def test_times_that_differ_by_hundreds_of_orders_of_magnitude_are_drawn():
    assert "makespan" in output_of(*SMALL, "--forward", "1e-308")


def test_times_of_zero_are_drawn():
    zeros = [part for option in ("--forward", "--input-grad", "--weight-grad") for part in (option, 0)]
    assert "makespan          0  from" in output_of(*SMALL, *zeros)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_what_ranks_hold_does_not_depend_on_times_of_zero(name):
    sizes = (name, "--ranks", 2, "--microbatches", 3, "--json")
    options = ("--forward", "--input-grad", "--weight-grad")
    expected = json.loads(output_of(*sizes))["peak_activations"]
    assert min(expected) > 0
    for zero in (*((option,) for option in options), options):
        found = json.loads(output_of(*sizes, *(part for option in zero for part in (option, 0))))
        assert found["peak_activations"] == expected


@pytest.mark.parametrize(
    ("suffix", "text"), [(".csv", "0F0,0F1,0B0,0B1\n"), (".rules", "stages: chain\nlimit: 2\npriority: F B\n")]
)
def test_a_byte_order_mark_is_no_part_of_an_order(suffix, text, tmp_path):
    plain, marked = tmp_path / f"plain{suffix}", tmp_path / f"marked{suffix}"
    plain.write_text(text, encoding="utf-8")
    marked.write_text(text, encoding="utf-8-sig")
    sizes = () if suffix == ".csv" else ("--ranks", 2, "--microbatches", 3)
    assert output_of(marked, *sizes, "--csv") == output_of(plain, *sizes, "--csv")


# Compare.

SIZES = ("compare", "--ranks", 4, "--microbatches", 8)


def test_compare_lists_every_schedule_fastest_first():
    found = json.loads(output_of(*SIZES, "--memory", 4, "--json"))
    rows = found["schedules"]
    assert {row["name"] for row in rows} | set(found["undefined"]) == set(REGISTRY)
    assert [row["makespan"] for row in rows] == sorted(row["makespan"] for row in rows)
    by_name = {row["name"]: row for row in rows}
    assert by_name["1f1b"]["makespan"] == (8 + 4 - 1) * 3
    assert by_name["1f1b"]["peak_activations"] == [4, 3, 2, 1]
    assert by_name["1f1b"]["fits"]
    assert not by_name["gpipe"]["fits"]
    assert by_name["1f1b"]["messages"] == 2 * 3 * 8
    assert by_name["chimera"]["weights"] == 2
    assert by_name["zb-v"]["window_bubble"] == pytest.approx(0, abs=1e-9)


def test_compare_says_why_a_schedule_is_missing():
    found = json.loads(output_of("compare", "--ranks", 3, "--microbatches", 3, "--json"))
    assert "chimera" in found["undefined"]
    assert "chimera" in output_of("compare", "--ranks", 3, "--microbatches", 3)


def test_compare_draws_one_sheet(tmp_path):
    output_of(*SIZES, "--png", tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as picture:
        assert picture.width > 1000


def test_compare_refuses_sizes_and_times_that_would_not_end():
    (found,) = problems_of("compare", "--ranks", 4, "--microbatches", 10**7)
    assert found.startswith("4 ranks x 10000000 micro-batches are 40,000,000 forwards, and at most 2,048 are compared;")
    assert run("compare", "--ranks", 4, "--microbatches", 8, "--forward", "inf").exit_code == 2


@pytest.mark.parametrize("option", [("--seconds", "inf"), ("--batch", 10**400)])
def test_an_instance_with_an_endless_number_is_a_usage_error(tmp_path, option):
    words = ("--profile", "x", "--cluster", "l40sx8", "--batch", 8, "--microbatches", 4, "--out", tmp_path / "x.json")
    assert run("instance", *words, *option).exit_code == 2
