"""Runs of tiny models of the larger pipelines: several text encoders, sizes, guidance, pictures that steer."""

import json
from dataclasses import replace
from string import ascii_lowercase

import diffusers
import numpy as np
import pytest
import torch
from kit.drawn_families import GUIDED, by_diffusers
from kit.steered import asked_of_steered, save_controlled, save_steered
from kit.tiny_models import randomise_pipeline
from kit.tiny_pipelines import PIPELINES, sd3
from kit.tiny_runs import RESOLUTION, losses_of, recipe_of, train, train_here
from PIL import Image

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Pictures with captions and pictures that steer."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "edges").mkdir()
    random = np.random.default_rng(0)
    lines = []
    for number in range(8):
        for name in (f"{number}.png", f"edges/{number}.png"):
            values = random.integers(0, 256, (RESOLUTION, RESOLUTION + number, 3), dtype=np.uint8)
            Image.fromarray(values).save(folder / name)
        row = {"file_name": f"{number}.png", "text": f"{ascii_lowercase[number]} b"}
        lines.append(json.dumps({**row, "conditioning_image": f"edges/{number}.png"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", PIPELINES)
def test_two_stages_learn_what_one_process_learns(kind, crew, pictures, tmp_path):
    pipeline = PIPELINES[kind]()
    randomise_pipeline(pipeline)
    pipeline.save_pretrained(tmp_path / "model")

    def recipe(name):
        data = {"random_crop": True, "flip": True, "caption_dropout": 0.3}
        return recipe_of(tmp_path / "model", pictures, tmp_path / name, data=data, training={"steps": 2})

    assert crew.run(train, recipe("over-two")) == [2, 2]
    assert train_here(recipe("in-one")) == 2
    over_two, in_one = losses_of(tmp_path / "over-two"), losses_of(tmp_path / "in-one")
    assert over_two.keys() == in_one.keys() == {1, 2}
    assert over_two == pytest.approx(in_one, rel=1e-5)
    assert in_one[1] != in_one[2]


def test_positions_that_are_saved_but_not_trained_are_exported_as_the_source_has_them(pictures, tmp_path):
    pipeline = sd3()
    pipeline.transformer.pos_embed.pos_embed += 1
    pipeline.save_pretrained(tmp_path / "model")
    recipe = recipe_of(tmp_path / "model", pictures, tmp_path / "run", training={"steps": 1})
    assert train_here(recipe) == 1
    exported = next((tmp_path / "run").rglob("model_index.json")).parent
    transformer = diffusers.SD3Transformer2DModel.from_pretrained(exported / "transformer")
    assert torch.equal(transformer.pos_embed.pos_embed, pipeline.transformer.pos_embed.pos_embed)


@pytest.mark.slow
def test_a_controlnet_draws_from_the_conditioning_pictures_of_validation(crew, tmp_path):
    model, data = save_controlled(tmp_path / "model"), save_steered(tmp_path / "data", RESOLUTION)
    sampling = {"every": 2, "prompts": ["a cat ", "b  c"], "steps": 4, "guidance": GUIDED, "seed": 0}
    recipe = recipe_of(
        model,
        data,
        tmp_path / "run",
        data={"validation": str(data)},
        validation={"every": 2},
        training={"steps": 2},
        sampling=sampling,
    )
    assert crew.run(train, recipe) == [2, 2]
    asked = asked_of_steered(tmp_path / "run" / "export", data, GUIDED)
    theirs = by_diffusers(replace(asked, wish=replace(asked.wish, negatives=())))
    files = sorted((tmp_path / "run" / "samples" / "step-00000002").glob("*.png"))
    ours = np.stack([np.asarray(Image.open(file)) for file in files]) / 255
    assert np.abs(ours - theirs).max() < 1 / 255
