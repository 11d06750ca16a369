"""Runs what a model card tells its reader to run."""

import re
from pathlib import Path

from PIL import Image

from diffusionpipe.trainer.exports.card_snippet import CONDITION, FOLDER


def picture_of(card: str, folder: Path, place: Path, *, result: str = "picture.png", **places: Path) -> Image.Image:
    """The picture that the card's Python code saves; `places` are further folders that it names by "path/to/"."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", card, flags=re.MULTILINE | re.DOTALL)
    condition = place / "condition.png"
    Image.new("RGB", (8, 8)).save(condition)
    known = {FOLDER: folder, CONDITION: condition, f'"{result}"': f'"{place / result}"'}
    known |= {f"path/to/{name}": path for name, path in places.items()}
    for text, path in known.items():
        code = code.replace(text, str(path))
    exec(compile(code, "card", "exec"), {})  # the card's own code is what is tested
    return Image.open(place / result)
