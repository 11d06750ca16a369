"""Every term that a screen shows has an entry in the glossary: heads of tables, keys of logs, names of layouts."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffusionpipe.cli.text import plan_compare
from diffusionpipe.cli.text.plan_table import COLUMNS, WORDS
from diffusionpipe.cli.verbs.plan_show import HEADS
from diffusionpipe.holding.memory import MemoryUse
from diffusionpipe.ir.versions import Versions
from diffusionpipe.planner.rivals import baselines
from diffusionpipe.planner.rivals.planners import PLANNERS
from diffusionpipe.planner.search import naming
from diffusionpipe.schedules import REGISTRY

ROOT = Path(__file__).parents[2]
SCREENS = sorted((ROOT / "tests/screens").glob("*.txt"))
COMMANDS = sorted((ROOT / "src/diffusionpipe/cli").glob("*.py"))
BASELINES = {baselines.DDP, baselines.DDP_AFTER, baselines.ZERO3}
RIVALS = {planner.title for planner in PLANNERS.values()}
LAYOUTS = {naming.DATA_PARALLEL, naming.SHARDED, "one device", *BASELINES, "GPipe", "1F1B + SPP", *RIVALS}
UNFLUSHED = {str(row) for row in Versions if row is not Versions.FLUSHED}
SEARCHED = ("search-linear", "search-v", "search-loop")


def entries() -> set[str]:
    """Everything in bold in the glossary, and the letters of the table of ops; several terms have commas between."""
    text = " ".join((ROOT / "docs/glossary.md").read_text(encoding="utf-8").split())
    found = {term.strip("` ") for bold in re.findall(r"\*\*(.+?)\*\*", text) for term in bold.split(", ")}
    return found | set(re.findall(r"\*\*(.+?)\*\*", text)) | {bold for bold in REGISTRY if bold in documented()}


def documented() -> set[str]:
    """Schedules with a section of their own in docs/schedules.md, to which the glossary leads."""
    assert "[schedules.md](schedules.md)" in (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    return set(
        re.findall(r"^## `?([a-z0-9-]+)`?", (ROOT / "docs/schedules.md").read_text(encoding="utf-8"), re.MULTILINE)
    )


def has_entry(term: str, known: set[str]) -> bool:
    return any(form in known for form in (term, term.lower(), term.removesuffix("s"), f"{term}s", f"{term}es"))


def heads_in(path: Path) -> Iterator[str]:
    """Heads of rich's tables: constants, also those that a loop goes through."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        is_loop = isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple) and isinstance(node.target, ast.Name)
        if is_loop and (node.target.id, True) in _heads(node):
            yield from (one.value for one in node.iter.elts if isinstance(one, ast.Constant))
    yield from (head for head, is_name in _heads(tree) if not is_name and head)


def _heads(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """(head, whether it is the name of a variable) of every call of add_column."""
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if is_call and node.func.attr == "add_column" and node.args:
            if isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value), False
            elif isinstance(node.args[0], ast.Name):
                yield node.args[0].id, True


def keys_in(text: str) -> set[str]:
    """Keys of a log's key=value; a recipe's key has blanks around the sign or a dot before it."""
    return set(re.findall(r"(?<![\w.\-\[])([a-z][a-z0-9_]*)=(?=\S)", text))


def layouts_in(text: str) -> set[str]:
    """Names of schedules and other layouts that stand in a text as words of their own."""
    words = set(re.findall(r"(?<![\w-])[A-Za-z0-9]+(?:-[a-z0-9]+)*(?![\w-])", text))
    return words & {*REGISTRY, *SEARCHED} | {name for name in LAYOUTS if name in text}


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_every_head_of_a_table_has_an_entry(path):
    known = entries()
    heads = {" ".join(head.split()) for head in heads_in(path)}
    assert sorted(head for head in heads if not has_entry(head, known)) == []


def test_every_head_of_the_plan_table_and_of_plan_show_has_an_entry():
    known = entries()
    parts = [name.replace("_", " ") for name in MemoryUse().items()]
    compared = [term for _, term, _ in plan_compare.HEADS]
    heads = [*(column.term for column in COLUMNS), *HEADS, *compared, *parts, "layout"]
    assert [head for head in heads if not has_entry(head, known)] == []


def test_every_word_of_a_layout_has_an_entry():
    known = entries()
    names = {"accumulated": "accumulated over N", "on host": "encoders on host", "search-": "search-v"}
    assert [word for word, _ in WORDS if not has_entry(names.get(word, word), known)] == []


@pytest.mark.parametrize("name", sorted({*LAYOUTS, *REGISTRY, *SEARCHED}))
def test_every_layout_that_can_be_shown_has_an_entry(name):
    assert name in entries()


@pytest.mark.parametrize("screen", SCREENS, ids=lambda path: path.stem)
def test_every_key_and_layout_of_a_screen_has_an_entry(screen):
    text, known = screen.read_text(encoding="utf-8"), entries()
    assert sorted(key for key in keys_in(text) if not has_entry(key, known)) == []
    assert sorted(name for name in layouts_in(text) if name not in known) == []


@pytest.mark.parametrize("screen", [path for path in SCREENS if path.stem.startswith(("plan_p", "plan_d"))], ids=str)
def test_every_layout_in_a_plan_table_is_a_known_one(screen):
    """The first words of each row: a new name of a layout must be listed above."""
    rows = re.findall(r"^(?:>| ) (\S.*?)(?:,| {2}).*%", screen.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(rows) > 5
    assert set(rows) <= {*LAYOUTS, *REGISTRY, *SEARCHED, *UNFLUSHED}


def test_the_searches_find_terms():
    """So that none of the tests above passes because it looks at nothing."""
    assert {"rank", "busy", "peak activations"} <= set(heads_in(ROOT / "src/diffusionpipe/cli/verbs/schedule.py"))
    assert keys_in('loss=0.1 plan="a, b" step_s=0.4 [lora] rank = 16 training.batch=512 --x=1') == {
        "loss",
        "plan",
        "step_s",
    }
    assert layouts_in("> zb-v, 8 stages; search-loop; GPipe; zb-2pq") == {"zb-v", "search-loop", "GPipe"}
    assert not has_entry("no such term", entries())
