"""Whole runs whose captions are made each time: the same losses on one rank and, resumed in an epoch, on two."""

import json

import pytest
from kit.tiny_runs import losses_of, recipe_of, save_pictures, save_stable_diffusion, train_here

from diffusionpipe.errors import CheckpointError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

CAPTIONS = {"alternatives": True, "shuffle": True, "tag_dropout": 0.2, "keep_first": 1, "trigger": "z"}


def recipe(path, name, steps=6, **sections):
    data = {"captions": {**CAPTIONS, "dropout": {"text_encoder": 0.2}}, **sections.pop("data", {})}
    training = {"steps": steps, "batch": 4, "precision": "float64"}
    return recipe_of(path / "sd", path / "data", path / name, data=data, training=training, **sections)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("captions")
    save_stable_diffusion(path / "sd")
    save_pictures(path / "data", 7)
    rows = [{"file_name": f"{n:03d}.png", "text": [f"{'abcdefg'[n]},{{h|i}},j,k", "l,m,n"]} for n in range(7)]
    (path / "data/metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train_here(recipe(path, "whole"))
    return path


def test_the_options_change_what_is_learned(place):
    train_here(recipe(place, "plain", 2, data={"captions": {}}))
    assert losses_of(place / "plain")[1] != losses_of(place / "whole")[1]


def test_a_run_does_not_continue_with_other_captions(place):
    with pytest.raises(CheckpointError, match=r"data\.captions was .*shuffle = true.* and is .*shuffle = false"):
        train_here(recipe(place, "whole", 8, data={"captions": {"trigger": "z"}}), "latest")
