"""Texts that users read are in plain English: errors, checks, logs, help, legends, recipe keys, schedules."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.plain_english import hits

from diffusionpipe.schedules import REGISTRY

SOURCE = Path(__file__).parents[2] / "src/diffusionpipe"
FILES = sorted(SOURCE.rglob("*.py"))


def texts_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every sentence that the code can show; internal docstrings and asserts are left out."""
    hidden = {id(part) for node in ast.walk(tree) if isinstance(node, ast.Assert) for part in ast.walk(node)}
    for node in ast.walk(tree):
        body = getattr(node, "body", [])
        is_shown = is_section(node) or is_command(node)
        for statement in body if isinstance(body, list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and not is_shown:
                hidden.add(id(statement.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            hidden |= {id(part) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "#" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if len(text.split()) > 2:
            yield node.lineno, text


def is_section(node: ast.AST) -> bool:
    """Whether it is a section of the recipe, whose docstrings users read."""
    return isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Section" for base in node.bases)


def is_command(node: ast.AST) -> bool:
    """Whether it is a verb, whose docstring is its help: a public function with typer's annotations or decorators."""
    if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
        return False
    shown = [*node.decorator_list, *(argument.annotation for argument in node.args.args if argument.annotation)]
    return any("typer." in ast.unparse(one) or "app." in ast.unparse(one) for one in shown)


def refused(text: str) -> list[str]:
    """The name of each rule that refuses words of a shown text."""
    return [hit.rule.name for hit in hits(" ".join(text.split()), is_shown=True)]


def test_no_text_of_the_sources_needs_a_second_reading():
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {', '.join(names)}: {text[:100]!r}"
        for path in FILES
        for line, text in texts_of(ast.parse(path.read_text(encoding="utf-8")))
        if (names := refused(text))
    ]
    assert found == []


@pytest.mark.parametrize("name", REGISTRY)
def test_the_line_of_a_schedule_is_plain_and_ends_with_a_full_stop(name):
    line = (REGISTRY[name].__doc__ or "").partition("\n")[0]
    assert line.endswith(".")
    assert refused(line) == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('raise ConfigError(f"{x} ranks are no whole pipelines")', ["is no"]),
        ('yield "pipeline.plan: the plan file says it; remove it"', ["says it"]),
        ('logger.warning("What fits nowhere is left out")', ["what for a noun"]),
        ('class S(Section):\n    seed: int\n    """Keys the noise of the run."""', ["keys"]),
        (
            '@app.command()\ndef f() -> None:\n    """Whatever is trained by whoever stands there."""',
            ["stands", "whoever", "whatever", "trained by"],
        ),
        ('def f() -> None:\n    """What stands there, for us."""', []),
        ('assert x, "nobody stands in here"', []),
    ],
)
def test_every_kind_of_text_is_looked_at(source, names):
    found = [name for _, text in texts_of(ast.parse(source)) for name in refused(text)]
    assert set(names) <= set(found)
    assert bool(names) == bool(found)
