"""The documents say what the code does."""

import ast
import doctest
import re
import sys
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import diffusers
import pytest
from kit.drawn_families import asked_of, by_diffusers, difference, drawn_here
from kit.tiny_described import PIPELINES, pixart_sigma, save_described

from diffusionpipe.models.opening import folder
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.simulator.comparison import WorkerCosts, compare_families
from diffusionpipe.timing.legal import check
from diffusionpipe.trainer.recipe import recipe_from_table

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/diffusionpipe"
KINDS = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
DOCUMENTS = sorted(path for kind in KINDS for path in ROOT.glob(kind))


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def names_in(tree: ast.Module) -> set[str]:
    """Functions, classes, their methods and module constants, as "name" and "Class.name"."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_the_readme_has_less_than_150_lines():
    assert len(text_of("README.md").splitlines()) < 150


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_relative_link_leads_to_a_file(document):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    if not (ROOT / "docs/images").exists():  # the pictures are made by the demo
        missing = [link for link in missing if not link.endswith(".png")]
    assert not missing


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings; a second heading of the same words gets "-1"."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return {slug + (f"-{number}" if number else "") for slug in slugs for number in range(slugs.count(slug))}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_link_to_a_heading_finds_it(document):
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text(encoding="utf-8"))
    for path, anchor in links:
        assert anchor in anchors(document.parent / path if path else document), f"{path}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_function_that_a_document_names_exists(document):
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]+\.py): ?([A-Za-z_.]+)`", document.read_text(encoding="utf-8"))
    for path, name in named:
        file = next(base / path for base in (SOURCE, ROOT) if (base / path).exists())
        assert name in names_in(ast.parse(file.read_text(encoding="utf-8"))), f"{path}: {name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_source_file_that_a_document_names_exists(document):
    # CONTRIBUTING adds a schedule as an example, so its module is not there.
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|md))\b", document.read_text(encoding="utf-8")))
    missing = [path for path in named if not any((base / path).exists() for base in (ROOT, SOURCE, document.parent))]
    assert [path for path in missing if "eager_one_f_one_b" not in path] == []


@pytest.mark.parametrize(
    ("document", "below"),
    [("ARCHITECTURE.md", set()), ("docs/tour.md", {"errors", "units", "version", "hidden_packages"})],
)
def test_the_pictures_of_the_house_have_every_package_in_the_order_of_its_layer(document, below):
    settings = tomllib.loads(text_of("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    [house] = [contract for contract in settings if contract["name"] == "The hourglass, from top to bottom"]
    layers = [set(layer.split(" | ")) - below for layer in house["layers"] if layer != "__main__"]
    picture = next(
        part for part in re.findall(r"(?:^ {3,}.*\n|^\n)+", text_of(document), re.MULTILINE) if "cli" in part
    )
    line_of = {name: line for line, text in enumerate(picture.splitlines()) for name in re.findall(r"[a-z_]{2,}", text)}
    lines = [sorted(line_of[name] for name in layer) for layer in layers if layer]
    assert all(above[-1] <= beneath[-1] and above[0] <= beneath[0] for above, beneath in pairwise(lines))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_recipe_in_a_document_is_valid(document):
    for block in blocks(document.read_text(encoding="utf-8"), "toml"):
        recipe_from_table(tomllib.loads(block), source=document)


@pytest.mark.parametrize("name", REGISTRY)
def test_the_readme_names_every_schedule(name):
    assert f"`{name}`" in text_of("README.md")


def test_the_page_of_schedules_is_that_of_the_code():
    spec = spec_from_file_location("make_schedules", ROOT / "docs/make_schedules.py")
    assert spec is not None
    assert spec.loader is not None
    page = module_from_spec(spec)
    spec.loader.exec_module(page)
    comparison = compare_families(page.RANKS, page.MICROBATCHES, WorkerCosts())
    assert text_of("docs/schedules.md") == page.document(comparison), "run make docs"


def test_the_schedule_that_contributing_adds_is_legal_and_its_tests_pass(monkeypatch):
    module_source, test_source, *_ = blocks(text_of("CONTRIBUTING.md"), "python")
    module = ModuleType("diffusionpipe.schedules.families.eager_one_f_one_b")
    exec(module_source, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    results = doctest.testmod(module)
    assert results.attempted
    assert not results.failed
    check(module.eager_one_f_one_b(4, 6))
    run_tests(test_source, {})


def test_the_model_that_contributing_adds_passes_its_tests():
    model_source, test_source = blocks(text_of("CONTRIBUTING.md"), "python")[2:4]
    # A module of its own, so that the copies of the graph find the layers' functions.
    namespace: dict[str, object] = {"__name__": "contributed"}
    exec(model_source, namespace)
    run_tests(test_source, namespace)


def test_the_family_that_contributing_adds_draws_what_diffusers_draws(monkeypatch, tmp_path):
    namespace: dict[str, object] = {}
    exec(blocks(text_of("CONTRIBUTING.md"), "python")[4], namespace)
    kind = "PixArtAlphaPipeline"
    monkeypatch.setitem(folder.REGISTRY, kind, namespace["FAMILY"])
    monkeypatch.setitem(PIPELINES, kind, lambda: diffusers.PixArtAlphaPipeline(**pixart_sigma().components))
    save_described(kind, tmp_path)
    asked = asked_of(tmp_path, 32, 2.0)
    theirs = by_diffusers(asked)
    assert difference(drawn_here(asked), (theirs,)) < 1e-5
    assert theirs.std() > 0.02


def run_tests(source: str, namespace: dict[str, object]) -> None:
    exec(source, namespace)
    tests = [value for name, value in namespace.items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()
