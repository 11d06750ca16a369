"""The page of each benchmark is short; its full tables are files beside it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("benchmarks/*/README.md"))
RESULTS = sorted(ROOT.glob("benchmarks/*/results/*.txt"))
MOST_WORDS = 900
MOST_WORDS_WITH_TABLES = 1300


def words_outside_tables(text: str) -> int:
    """Words of the whole page, code included, wherever its tables are."""
    return sum(len(line.split()) for line in text.splitlines() if not line.lstrip().startswith("|"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT / "benchmarks"))


def test_every_benchmark_has_a_page_and_results():
    packages = {path.parent.name for path in ROOT.glob("benchmarks/*/__main__.py")}
    assert {path.parent.name for path in PAGES} == packages
    assert {path.parents[1].name for path in RESULTS} == packages


def test_words_are_counted_outside_tables_only():
    assert words_outside_tables("# Two words\n\n| a | table |\n|---|---|\n\n    some code\n") == 5


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_page_of_a_benchmark_is_short(page):
    text = page.read_text(encoding="utf-8")
    words = words_outside_tables(text)
    assert words <= MOST_WORDS, f"{words} words; move details to results/*.txt beside the page"
    assert len(text.split()) <= MOST_WORDS_WITH_TABLES, "move full tables to results/*.txt and keep a short one"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_page_links_each_of_its_results_and_shows_a_table(page):
    text = page.read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\((results/[^)]+)\)", text))
    assert linked == {f"results/{path.name}" for path in page.parent.glob("results/*")}
    assert "\n|" in text


@pytest.mark.parametrize("path", RESULTS, ids=name_of)
def test_results_name_their_command_hardware_and_commit(path):
    head = path.read_text(encoding="utf-8").split("\n\n")[1]
    found = dict(line.split(maxsplit=1) for line in head.splitlines())
    assert found["command"].startswith(f"python -m benchmarks.{path.parents[1].name}")
    assert found["hardware"]
    assert re.match(r"[0-9a-f]{7}", found["commit"])


def figures(text: str) -> list[str]:
    """Numbers in columns that are aligned to the right: those are copied from the results."""
    found: list[str] = []
    is_right: list[bool] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells and all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            is_right = [cell.endswith(":") for cell in cells]
        elif not cells:
            is_right = []
        columns = zip(cells, is_right, strict=False)
        found += [number for cell, right in columns if right for number in re.findall(r"\d+(?:\.\d+)?", cell)]
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_figures_in_short_tables_are_those_of_the_results(page):
    results = "\n".join(path.read_text(encoding="utf-8") for path in page.parent.glob("results/*.txt"))
    measured = set(re.findall(r"\d+(?:\.\d+)?", results))
    assert [number for number in figures(page.read_text(encoding="utf-8")) if number not in measured] == []


def test_figures_are_taken_from_columns_aligned_to_the_right():
    assert figures("| a | b |\n|---|---:|\n| 1 | 2.5 [2, 3] |\n\n| c |\n|---|\n| 4 |\n") == ["2.5", "2", "3"]
