"""The documents avoid phrases that readers have to read twice."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.plain_english import hits, without_code

ROOT = Path(__file__).parents[2]
KINDS = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
DOCUMENTS = sorted({path for kind in KINDS for path in ROOT.glob(kind)})
EXAMPLES = (
    "What is recomputed is not kept.",
    "The search chooses, what it finds is kept.",
    "This is what the planner sees.",
    "Whoever finds it gone posts a verdict.",
    "It holds so many micro-batches.",
    "Beside it stands a profile.",
    "The model is trained by the loop.",
)


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, list items and cells without code, each with the number of its first line."""
    text = re.sub(r"^```.*?^```$", lambda fence: re.sub(r"[^\n]", "", fence[0]), text, flags=re.MULTILINE | re.DOTALL)
    number, parts = 0, []
    for index, line in enumerate(text.splitlines(), start=1):
        is_list_item = re.match(r"\s*(?:[-*] |\d+\. )", line)
        if not line.strip() or line.startswith(("    ", "|", "#", "  |")) or is_list_item:
            if parts:
                yield number, " ".join(parts)
            parts = []
        if line.lstrip().startswith("|"):
            yield from ((index, cell.strip()) for cell in line.split("|"))
        elif line.strip() and not line.startswith("    "):
            number = number if parts else index
            parts.append(re.sub(r"^\s*(?:[-*] |\d+\. |#+ )?", "", line))
    if parts:
        yield number, " ".join(parts)


def findings(text: str) -> list[str]:
    """Each phrase that a rule refuses: line, words around it, and advice."""
    found = []
    for number, paragraph in prose(text):
        found += [f"line {number}: {hit}" for hit in hits(without_code(paragraph))]
    return found


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_hard_phrase_is_found(example):
    assert findings(f"# Title\n\n- A sentence. {example}\n")
    assert findings(f"| `key` | {example} |")


def test_questions_code_and_common_uses_are_allowed():
    assert not findings("What is a bubble?\n\n`What is` here. CPU stands for a processor.\n\n    so many\n")
    assert not findings("```text\nwhoever\n```\n\nThe model decides what a rank does.\n")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_are_in_plain_english(document):
    found = findings(document.read_text(encoding="utf-8"))
    assert not found, "\n" + "\n".join(found)
