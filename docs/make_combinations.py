"""Writes docs/combinations.md from `diffusionpipe.combinations` and the table in tests/kit/pairs.py: `make docs`."""

from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from kit.pairs import WORKS, Refused, Works, verdict

from diffusionpipe.combinations.features import MEANINGS, Feature
from diffusionpipe.combinations.refused import REFUSED

FILE = Path(__file__).parent / "combinations.md"
HEAD = """# Combinations

`make docs` generates this page from `src/diffusionpipe/combinations/refused.py` and `tests/kit/pairs.py`. Every error
message about two features that do not go together comes from the first, and a test provokes each of them. For every
pair that works, a test trains with both features and compares the result with a run that lacks them. No test has tried
the other pairs, and no code refuses them.
"""


def document() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_features(), *_refusals(), *_pairs(), *_tests()])


def _features() -> Iterator[str]:
    yield "## Features\n"
    yield "| feature | meaning |\n|---|---|"
    yield from (f"| {feature} | {meaning} |" for feature, meaning in MEANINGS.items())


def _refusals() -> Iterator[str]:
    yield "\n## Refused\n\nWords in braces are values of the case.\n"
    for (one, other), reason in REFUSED.items():
        yield from _item(f"**{one} with {other}**: {reason.replace('!r', '')}")


def _pairs() -> Iterator[str]:
    yield "\n## Works\n"
    for feature in Feature:
        found = {kind: [other for other in Feature if _is(feature, other, kind)] for kind in (Works, Refused)}
        if found[Works]:
            refused = f"; refused with {', '.join(found[Refused])}" if found[Refused] else ""
            yield from _item(f"**{feature}** with {', '.join(found[Works])}{refused}")


def _is(one: Feature, other: Feature, kind: type[Works | Refused]) -> bool:
    return one is not other and isinstance(verdict(one, other), kind)


def _tests() -> Iterator[str]:
    yield "\n## Tests of the pairs that work\n"
    for test in WORKS:
        pairs = sum(verdict(one, other) == Works(test) for one in Feature for other in Feature) // 2
        path, _, name = test.partition("::")
        yield f"- `{path}`:\n  `{name}` ({pairs} {'pairs' if pairs > 1 else 'pair'})"
    yield ""


def _item(text: str) -> Iterator[str]:
    yield from wrap(f"- {text}", 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
