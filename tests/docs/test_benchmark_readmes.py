"""A benchmark's README answers its question; details are on pages beside it, and full tables are in its results."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("benchmarks/*/README.md"))
ALL_PAGES = sorted(ROOT.glob("benchmarks/**/*.md"))
RESULTS = sorted(ROOT.glob("benchmarks/*/results/*.txt"))
MOST_LINES = 40
MOST_COLUMNS = 120
MOST_WORDS_OF_AN_ANSWER = 12


def with_pages(readme: Path) -> str:
    """The README and the pages beside it."""
    return "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(readme.parent.glob("*.md")))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT / "benchmarks"))


def test_every_benchmark_has_a_page_and_results():
    packages = {path.parent.name for path in ROOT.glob("benchmarks/*/__main__.py")}
    assert {path.parent.name for path in PAGES} == packages
    assert {path.parents[1].name for path in RESULTS} == packages


def test_the_index_answers_the_question_of_each_benchmark_in_few_words():
    text = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+)\] \|.*$", text, flags=re.MULTILINE)
    assert sorted(rows) == sorted(path.parent.name for path in PAGES)
    assert re.findall(r"^\[(\w+)\]: \1/README\.md$", text, flags=re.MULTILINE) == rows
    for line in re.findall(r"^\| \[.*$", text, flags=re.MULTILINE):
        assert len(line) <= MOST_COLUMNS, line
        assert 0 < len(line.split("|")[3].split()) <= MOST_WORDS_OF_AN_ANSWER, line


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_readme_is_short_and_asks_its_question_before_all_else(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_LINES, "move details to pages beside it"
    question = " ".join(lines[2 : lines.index("", 2)])
    assert re.match(r"\*\*[^*]+\? [^*]+", question), "begin with the question and its answer"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_readme_links_each_page_beside_it_and_shows_a_table(page):
    text = page.read_text(encoding="utf-8")
    beside = {path.name for path in page.parent.glob("*.md")} - {"README.md"}
    assert beside <= set(re.findall(r"\]\(([^)#]+)[^)]*\)", text))
    assert "\n|" in text


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_pages_of_a_benchmark_link_each_of_its_results(page):
    linked = set(re.findall(r"\]\((results/[^)]+)\)", with_pages(page)))
    assert linked == {f"results/{path.name}" for path in page.parent.glob("results/*")}


@pytest.mark.parametrize("path", ALL_PAGES, ids=name_of)
def test_a_page_begins_with_its_only_title_and_its_lines_are_short(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [number for number, line in enumerate(lines) if line.startswith("# ")] == [0]
    long = [line for line in lines if len(line) > MOST_COLUMNS and not line.startswith("|")]
    assert long == []


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
    assert [number for number in figures(with_pages(page)) if number not in measured] == []


def test_figures_are_taken_from_columns_aligned_to_the_right():
    assert figures("| a | b |\n|---|---:|\n| 1 | 2.5 [2, 3] |\n\n| c |\n|---|\n| 4 |\n") == ["2.5", "2", "3"]
