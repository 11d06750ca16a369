"""Docstrings say something by themselves, in plain English: an editor shows each without the lines around it."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
from kit.plain_english import RULES, docstrings, refused

SOURCE = Path(__file__).parents[2] / "src/diffusionpipe"
SENTENCES = [
    tuple(line.split(": ", maxsplit=1))
    for line in (Path(__file__).parent / "refused_sentences.txt").read_text(encoding="utf-8").splitlines()
]
"""(rule, sentence) of docstrings that this project has had."""
EXAMPLES = (
    ("that of", "The time is those of the slowest rank."),
    ("that of", "The name is that of the family."),
    ("behind", "Fills come behind the forwards."),
    ("what for a noun", "What a plan is made for."),
    ("continues", "Of all backbones together."),
    ("continues", "and of all their gradients."),
    ("continues", "The same for a data worker."),
    ("continued", "The loss of all backbones,"),
    ("as in", "As in `Family`."),
    ("mutable", "Mutable: the ring."),
)
PLAIN = (
    "The shape is the same as that of `a`, and its norm is larger than those of the others.",
    "The work that happens behind the scenes; nothing is left behind.",
    "Whether it is what we would expect of an order.",
    "The score of the best candidate that fits, in seconds.",
    "The layers of a stage.\n\n>>> print('What stands behind?')\nWhat stands behind?\n",
    "The order `what that of`: a link to [those that differ](of.md).",
)


def names(docstring: str) -> set[str]:
    return {hit.rule.name for hit in refused(docstring)}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_docstrings_are_in_plain_english(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [f"line {line}: {hit}" for line, docstring in docstrings(tree) for hit in refused(docstring)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(("name", "sentence"), [*SENTENCES, *EXAMPLES])
def test_a_hard_docstring_is_refused(name, sentence):
    assert name in names(sentence)


def test_sixty_sentences_of_this_project_are_refused():
    assert len({sentence for _, sentence in SENTENCES}) == 60


@pytest.mark.parametrize("docstring", PLAIN)
def test_ordinary_english_is_accepted(docstring):
    assert names(docstring) == set()


def test_docstrings_of_modules_classes_functions_and_fields_are_read():
    fields = '    field: int\n    """F."""\n    def f(self):\n        """D."""\n'
    source = f'"""M."""\nclass C:\n    """C."""\n{fields}X = 1\n"""X."""\n'
    assert sorted(docstrings(ast.parse(source))) == [(1, "M."), (3, "C."), (5, "F."), (7, "D."), (9, "X.")]


def test_every_rule_has_a_reason_and_better_words():
    assert all(rule.reason and rule.better for rule in RULES)
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.slow
def test_known_packages_have_at_most_one_finding_in_200_docstrings():
    read = found = 0
    for package in ("pydantic", "numpy", "huggingface_hub"):
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        for path in Path(spec.origin).parent.rglob("*.py"):
            if "tests" not in path.parts:
                own = [docstring for _, docstring in docstrings(ast.parse(path.read_text(encoding="utf-8")))]
                read += len(own)
                found += sum(bool(names(docstring)) for docstring in own)
    assert read > 4_000
    assert found <= read / 200
