"""Random pictures of several aspects, and a recipe's sizes for them."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

PICTURES = ((16, 8), (8, 16), (16, 16), (24, 16), (16, 8), (40, 20), (20, 40), (8, 8), (12, 12), (16, 24))


def save_sized(folder: Path) -> Path:
    """Random pictures of several aspects, two of each."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    lines = []
    for number, (width, height) in enumerate(PICTURES * 2):
        name = f"{number:03d}.png"
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / name)
        lines.append(json.dumps({"file_name": name, "text": "abcdefgh"[number % 8]}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


SIZED = {"resolution": ["16x8", "8x16", 8], "same_size": 2}
