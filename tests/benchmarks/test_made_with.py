"""Each published page says with which defaults its tables were made: they have changed, and may change again."""

import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "benchmarks").glob("*/README.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_page_names_arithmetic_storage_recomputation_and_batch_of_its_tables(page):
    text = page.read_text(encoding="utf-8")
    first_table = text.find("\n|")
    (made,) = re.findall(r"^Made with: (.*?)\n\n", text, flags=re.MULTILINE | re.DOTALL)
    assert 0 < text.index(made) < first_table or first_table < 0
    for words in ("bfloat16|float32", "frozen", "recompu", "batch"):
        assert re.search(words, made), words
