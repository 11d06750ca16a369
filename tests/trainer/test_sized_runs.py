"""Runs over pictures of several sizes: recipes, validation, resuming on another layout."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_runs import losses_of, recipe_of, save_stable_diffusion, train, train_here

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


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_sized(tmp_path_factory.mktemp("pictures") / "sized")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_stable_diffusion(tmp_path_factory.mktemp("model"))


SIZED = {"resolution": ["16x8", "8x16", 8], "same_size": 2}


def recipe(model, data, folder, **sections):
    sections["data"] = {**SIZED, "validation": str(data), **sections.get("data", {})}
    sections["training"] = {"precision": "float64", **sections.get("training", {})}
    return recipe_of(model, data, folder, validation={"every": 3, "timesteps": [0.3]}, **sections)


def test_three_sizes_train_validate_and_resume_on_two_stages_as_on_one_rank(model, data, tmp_path, crew):
    one = recipe(model, data, tmp_path / "one")
    assert train_here(one) == 6
    expected, held = losses_of(tmp_path / "one"), losses_of(tmp_path / "one", "validation_loss")
    assert len(expected) == 6
    half = recipe(model, data, tmp_path / "two", training={"steps": 3})
    train_here(half)
    assert crew.run(
        train, recipe(model, data, tmp_path / "two", pipeline={"microbatches": 4, "fill": True}), "latest"
    ) == [6, 6]
    found = losses_of(tmp_path / "two")
    assert [found[step] for step in range(1, 7)] == pytest.approx([expected[step] for step in range(1, 7)], rel=1e-12)
    assert losses_of(tmp_path / "two", "validation_loss")[6] == pytest.approx(held[6], rel=1e-12)
