"""Modules and functions stay small, and nothing asks for a schedule by its name."""

import ast
from pathlib import Path

from diffusionpipe.schedules import REGISTRY

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "src").rglob("*.py"))
LONGEST_MODULE = 450
LONGEST_FUNCTION = 75
"""Far beyond the sizes that CONVENTIONS gives as examples: no code is split or squeezed to obey a number."""


def relative(path):
    return str(path.relative_to(ROOT / "src" / "diffusionpipe"))


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def names_compared(tree, names):
    """(line, name) of every comparison with a name, or with a collection that holds one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for part in (node.left, *node.comparators):
                for leaf in ast.walk(part) if isinstance(part, ast.Tuple | ast.List | ast.Set) else (part,):
                    if isinstance(leaf, ast.Constant) and leaf.value in names:
                        yield node.lineno, leaf.value
        if isinstance(node, ast.MatchValue) and isinstance(node.value, ast.Constant) and node.value.value in names:
            yield node.lineno, node.value.value


def test_the_checks_see_what_they_look_for():
    tree = ast.parse("def long():\n" + "    pass\n" * 61 + "if name in ('gpipe', 'x') or name == '1f1b': pass")
    assert [f.end_lineno - f.lineno + 1 for f in functions(tree)] == [62]
    assert [name for _, name in names_compared(tree, REGISTRY)] == ["gpipe", "1f1b"]


def test_no_module_is_far_too_long():
    lengths = {relative(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {path: length for path, length in lengths.items() if length > LONGEST_MODULE} == {}


def test_no_function_is_far_too_long():
    lengths = {
        f"{relative(path)}: {node.name}": node.end_lineno - node.lineno + 1
        for path in MODULES
        for node in functions(ast.parse(path.read_text()))
    }
    assert {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION} == {}


def test_no_code_branches_on_the_name_of_a_schedule():
    elsewhere = [path for path in MODULES if "schedules" not in path.parts]
    found = {relative(path): list(names_compared(ast.parse(path.read_text()), REGISTRY)) for path in elsewhere}
    assert {path: names for path, names in found.items() if names} == {}


def test_workflows_print_nothing():
    printing = {
        relative(path): node.lineno
        for path in MODULES
        if "workflows" in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert printing == {}
