"""A ControlNet with pictures that steer it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from kit.drawn_families import Asked, asked_of
from kit.tiny_models import randomise_pipeline
from kit.tiny_pipelines import controlled
from PIL import Image

from diffusionpipe.trainer.inference.conditions import steering_pictures

CONDITIONS = tuple(f"edges/{number}.png" for number in range(4))


def save_controlled(folder: Path) -> Path:
    """A Stable Diffusion with a ControlNet, with random weights."""
    pipeline = controlled()
    randomise_pipeline(pipeline)
    pipeline.save_pretrained(folder)
    return folder


def save_steered(folder: Path, size: int) -> Path:
    """Pictures with captions and pictures that steer."""
    (folder / "edges").mkdir(parents=True)
    random = np.random.default_rng(0)
    lines = []
    for number, condition in enumerate(CONDITIONS):
        for name in (f"{number}.png", condition):
            Image.fromarray(random.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(folder / name)
        lines.append(json.dumps({"file_name": f"{number}.png", "text": "a b", "conditioning_image": condition}))
    (folder / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def asked_of_steered(model: Path, data: Path, guidance: float, size: int = 8) -> Asked:
    """Two pictures of a ControlNet, steered by the first ones of the data."""
    asked = asked_of(model, size, guidance)
    return replace(asked, wish=replace(asked.wish, conditions=steering_pictures(data, len(asked.wish))))
