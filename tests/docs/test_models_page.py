"""docs/models.md lists every transformer class of the installed diffusers, as the adapter and the tests have it."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from diffusionpipe.models.opening.class_table import CLASSES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = spec_from_file_location("make_models", ROOT / "docs/make_models.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows():
    lines = (ROOT / "docs/models.md").read_text(encoding="utf-8").partition("## Transformer classes")[2].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0]: row for row in cells[1:]}


def test_each_class_has_a_row_that_says_what_the_tests_say(script, rows):
    cases, refused = script.tables()
    assert list(rows) == script.classes()
    assert {name for name, row in rows.items() if row[3] == "no"} == set(refused)
    assert set(cases) <= {name for name, row in rows.items() if row[3] == "yes"}
    assert len(cases) >= 40
    assert all(rows[name][6] for name in refused)
    assert {name: row[5] for name, row in rows.items() if row[5] != "no"} == {
        name: script.planned_size(name) for name in CLASSES if name not in refused
    }


@pytest.mark.slow
def test_the_page_is_up_to_date(script):
    assert script.document() == (ROOT / "docs/models.md").read_text(encoding="utf-8")
