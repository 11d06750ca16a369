import re
from dataclasses import replace

import pytest
from kit.screen_files import assert_screen
from planner import synthetic

from diffusionpipe.cli.text.plan_table import MOST_SIMULATED, table_lines
from diffusionpipe.planner.choosing.advice import nothing_fits
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.pricing.setting import Setting


def setting_of(*, memory=80.0, ranks=4, update=1e-9, gigabytes=50.0):
    profile = synthetic.chain([0.01] * 8, parameters=[10**8] * 8, elements=10**5, frozen=0.02)
    cluster = synthetic.cluster(ranks, memory=memory, intra_gb=gigabytes)
    return Setting(profile=replace(profile, update=update), cluster=cluster, workload=synthetic.workload(16))


@pytest.fixture(scope="module")
def comparisons():
    """Where copies fit and links are fast, and where they are slow and memory is short, without a known update."""
    settings = {"data_parallel": setting_of(), "pipeline": setting_of(memory=8, gigabytes=0.5, update=0.0)}
    return {name: (setting, choose(setting).with_unflushed()) for name, setting in settings.items()}


def screen_of(comparisons, name, width):
    return [line for line, _ in table_lines(*comparisons[name], width=width)]


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("name", ["data_parallel", "pipeline"])
def test_the_screen(comparisons, name, width):
    lines = screen_of(comparisons, name, width)
    assert all(len(line) <= width for line in lines)
    assert_screen(f"plan_{name}_{width}", "\n".join(lines))


def test_the_winners_are_what_the_names_of_the_screens_say(comparisons):
    assert comparisons["data_parallel"][1].winner.num_stages == 1
    assert comparisons["pipeline"][1].winner.num_stages > 1


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("name", ["data_parallel", "pipeline"])
def test_no_layout_takes_more_than_two_lines_and_no_figure_is_cut(comparisons, name, width):
    lines = screen_of(comparisons, name, width)
    comparison = comparisons[name][1]
    shown = comparison.simulated[:MOST_SIMULATED]
    rows = [*shown, *comparison.estimated, *comparison.others, *comparison.unflushed]
    table = lines[: lines.index("")]
    left = len(comparison.simulated) - len(shown)
    assert (f"  {left} more, slower or too large" in table) == (left > 0)
    assert len(table) <= 3 + 4 + 2 * len(rows) + (left > 0)
    figures = [line for line in table if "%" in line]
    assert len(figures) == len(rows)
    for line, row in zip(figures, rows, strict=True):
        cells = line.split()
        assert f"{row.bubble:.1%}" in cells
        assert f"{row.memory / 2**30:.1f}" in cells
        assert {f"{row.step * 1e3:.{decimals}f}" for decimals in range(4)} & {cell.strip("~") for cell in cells}


def test_only_what_is_simulated_in_full_has_no_mark(comparisons):
    lines = screen_of(comparisons, "pipeline", 160)
    groups = [line.partition(",")[0] for line in lines if line.endswith("fastest first")]
    assert "without a flush, for older weights, simulated; never chosen unless a recipe asks" in lines
    assert groups == ["simulated", "estimated (~)", "other systems"]
    marked = ["~" in line for line in lines if "%" in line and "Use " not in line and "idle" not in line]
    comparison = comparisons["pipeline"][1]
    assert marked[: len(comparison.simulated)] == [False] * len(comparison.simulated)
    assert all(marked[len(comparison.simulated) : len(comparison.ours) + len(comparison.others)])


def test_a_row_without_a_flush_is_never_the_winner(comparisons):
    for _, comparison in comparisons.values():
        assert {row.name for row in comparison.unflushed} == {"stashed", "delayed", "newest", "vertical", "predicted"}
        assert comparison.winner in comparison.simulated


def test_where_it_is_faster_the_screen_says_how_to_ask_for_it(comparisons):
    setting, comparison = comparisons["pipeline"]
    slow = replace(comparison.winner, step=2 * comparison.unflushed[0].step)
    text = " ".join(
        line for line, _ in table_lines(setting, replace(comparison, winner=slow, simulated=(slow,)), width=160)
    )
    assert "a step would be 2.00 times as fast, with older weights: stashed, 4 stages" in text
    assert "would be" not in "\n".join(screen_of(comparisons, "pipeline", 160))


def test_no_number_is_in_powers_of_ten_and_a_column_has_one_form(comparisons):
    """A step of a tenth of a millisecond gives more than ten thousand samples a second."""
    setting, comparison = comparisons["data_parallel"]
    fast = replace(comparison.winner, step=1e-4, samples_per_second=153_300.0)
    lines = [line for line, _ in table_lines(setting, replace(comparison, winner=fast, simulated=(fast,)), width=100)]
    assert any("153300" in line for line in lines)
    assert "e+" not in "\n".join(lines)


def test_one_micro_batch_is_not_counted(comparisons):
    for name in comparisons:
        text = "\n".join(screen_of(comparisons, name, 160))
        assert re.search(r" \d+ micro-batches", text)
        assert " 1 micro-batch" not in text


@pytest.mark.parametrize("width", [80, 160])
def test_the_screen_where_nothing_fits(width, capsys, monkeypatch):
    """Errors are not cut into lines, so that commands in them can be copied: the terminal does that."""
    from diffusionpipe.cli import _print_error
    from diffusionpipe.errors import ConfigError

    monkeypatch.setenv("COLUMNS", str(width))
    _print_error(ConfigError(nothing_fits(setting_of(memory=1))))
    assert_screen(f"plan_nothing_fits_{width}", capsys.readouterr().err)
