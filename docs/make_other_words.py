"""Writes docs/other-words.md from `diffusionpipe.trainer.recipe.other_words`: `make docs`."""

from collections.abc import Iterator
from pathlib import Path

from diffusionpipe.trainer.recipe.other_words import ABSENT, REMARKS, SAME

FILE = Path(__file__).parent / "other-words.md"
HEAD = """# Words of other trainers

Keys of diffusers' scripts, sd-scripts, musubi-tuner, SimpleTuner, ai-toolkit, OneTrainer and diffusion-pipe, and the
keys of a [recipe](recipe.md) that do the same. A recipe with one of their words is refused with the key in this table.
`make docs` generates this page from `src/diffusionpipe/trainer/recipe/other_words.py`.

| key here | words of others |
|---|---|
"""
MIDDLE = """
## Without a key

| words of others | reason |
|---|---|
"""


def document() -> str:
    """The whole page."""
    return HEAD + "".join(_same()) + MIDDLE + "".join(_absent())


def _same() -> Iterator[str]:
    for key, words in SAME.items():
        remark = f" ({REMARKS[key]})" if key in REMARKS else ""
        yield f"| `{key}`{remark} | {_listed(words)} |\n"


def _absent() -> Iterator[str]:
    for words, why in ABSENT.items():
        yield f"| {_listed(words)} | {why} |\n"


def _listed(words: str) -> str:
    return ", ".join(f"`{word}`" for word in words.split())


if __name__ == "__main__":
    FILE.write_text(document())
