"""Rules of the house that the type checker and the contracts do not see: names, prints, programs in texts."""

import ast
import re
from pathlib import Path

from diffusionpipe.schedules import REGISTRY

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "src").rglob("*.py"))


def relative(path):
    return str(path.relative_to(ROOT / "src" / "diffusionpipe"))


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
    tree = ast.parse("if name in ('gpipe', 'x') or name == '1f1b': pass")
    assert [name for _, name in names_compared(tree, REGISTRY)] == ["gpipe", "1f1b"]


def test_no_code_branches_on_the_name_of_a_schedule():
    elsewhere = [path for path in MODULES if "schedules" not in path.parts]
    found = {relative(path): list(names_compared(ast.parse(path.read_text()), REGISTRY)) for path in elsewhere}
    assert {path: names for path, names in found.items() if names} == {}


def test_no_comment_is_a_banner():
    files = [path for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    banner = re.compile(r"^ *# ?([-=#*~])\1\1.*", re.MULTILINE)
    found = {str(path.relative_to(ROOT)): banner.findall(path.read_text(encoding="utf-8")) for path in files}
    assert len(banner.findall("# --- whole runs\n    #===\n")) == 2
    assert [path for path, lines in found.items() if lines] == []


def test_workflows_print_nothing():
    printing = {
        relative(path): node.lineno
        for path in MODULES
        if "workflows" in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert printing == {}


def test_no_two_public_classes_share_a_name_but_those_of_the_library():
    homes = {}
    for path in MODULES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(relative(path))
    shared = {name: places for name, places in homes.items() if len(places) > 1}
    # `dp.Choice` and `dp.Timeline` are what users of the library see of the classes with the same names.
    assert {
        name: [place for place in places if not place.startswith("library/")] for name, places in shared.items()
    } == {
        "Choice": ["planner/choosing/chosen.py"],
        "Timeline": ["ir/timeline.py"],
    }


def names_of(path):
    """Everything that a module defines, imports or assigns."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def imports_in_texts(path):
    """(file, name) of each import of ours in a program that a test holds as a text."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for line in re.findall(r"^\s*from diffusionpipe\.(\S+ import [\w, ]+)$", node.value, flags=re.MULTILINE):
                module, _, names = line.partition(" import ")
                place = ROOT.joinpath("src", "diffusionpipe", *module.split("."))
                yield from ((place, name.split(" as ")[0].strip()) for name in names.split(","))


def test_programs_that_tests_hold_as_texts_import_what_exists():
    # The type checker does not read them.
    found = [one for path in sorted((ROOT / "tests").rglob("*.py")) for one in imports_in_texts(path)]
    assert len(found) > 20
    for place, name in found:
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        assert name in names_of(file) or (place / f"{name}.py").exists(), f"{relative(file)}: {name}"
