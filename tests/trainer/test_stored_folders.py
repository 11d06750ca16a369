"""Folders of models in every way in which weights are stored: each use reads what diffusers itself reads."""

import random
import re
from functools import cache
from itertools import product
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from kit.steered import save_controlled, save_steered
from kit.stored_folders import BROKEN, KINDS, damage, store, variant_of
from kit.tiny_runs import RESOLUTION, losses_of, recipe_of, save_pictures, save_stable_diffusion, train_here
from safetensors.torch import load_file, save_file

from diffusionpipe.errors import ModelError
from diffusionpipe.models.objectives.objective import ObjectiveSettings
from diffusionpipe.models.opening.folder import build_graph, scheduler_config, weight_sources
from diffusionpipe.trainer.inference.conditions import SampleRequest
from diffusionpipe.trainer.inference.denoise import SamplingSettings
from diffusionpipe.trainer.inference.folder_drawing import draw_from_folder

pytestmark = pytest.mark.usefixtures("one_thread")

HALVED = ("fp16 only", "shards of a variant")
TRAINING = {
    "whole": {},
    "adapters": {"lora": {"rank": 2}},
    "ControlNet": {},
    "text encoder": {"model": {"train": ["unet", "text_encoder"]}},
    "merge": {"lora": {"rank": 2, "merge": True}},
    "export": {},
    "resume": {},
}
USES = (*TRAINING, "sample")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    as_on_the_hub(save_stable_diffusion(folder / "sd"))
    as_on_the_hub(save_controlled(folder / "ControlNet"))
    save_pictures(folder / "data", count=8)
    save_steered(folder / "steered", RESOLUTION)
    return folder


def as_on_the_hub(folder):
    """The names of a text encoder's tensors as versions of transformers before 5 wrote them."""
    path = folder / "text_encoder" / "model.safetensors"
    save_file({f"text_model.{name}": t for name, t in load_file(path).items()}, path, metadata={"format": "pt"})


def plain_copy(source, folder, kind):
    """A folder with plain files that hold what is to be read of one that is stored as `kind`."""
    store(source, folder, "plain")
    for path in folder.glob("*/*.safetensors") if kind in HALVED else ():
        save_file({name: t.half().to(t.dtype) for name, t in load_file(path).items()}, path)
    return folder


def drawn(rows, columns):
    """All pairs; those that are not drawn are slow. Each row is drawn once, and columns in turn."""
    turns = random.Random(36).sample(range(len(rows)), len(rows))
    quick = {(row, columns[turn % len(columns)]) for row, turn in zip(rows, turns, strict=True)}
    return [
        pytest.param(*pair, id=" - ".join(pair), marks=() if pair in quick else pytest.mark.slow)
        for pair in product(rows, columns)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_diffusers_reads_the_same_tensors(place, tmp_path, kind):
    folder, plain = store(place / "sd", tmp_path / "sd", kind), plain_copy(place / "sd", tmp_path / "plain", kind)
    expected, found = (
        diffusers.StableDiffusionPipeline.from_pretrained(path, variant=variant, dtype=torch.float32)
        for path, variant in ((folder, variant_of(kind)), (plain, None))
    )
    for name in ("unet", "vae", "text_encoder"):
        state = getattr(expected, name).state_dict()
        assert all(torch.equal(tensor, state[key]) for key, tensor in getattr(found, name).state_dict().items())


@pytest.fixture(scope="module")
def of_plain(place, tmp_path_factory):
    """The run, or the pictures, of one use of plain files; each is made once."""

    @cache
    def found(use, is_halved):
        source, folder = source_of(place, use), tmp_path_factory.mktemp("plain")
        model = plain_copy(source, folder / "model", HALVED[0] if is_halved else "plain")
        if use == "sample":
            return pictures_of(model)
        train_here(recipe_for(use, model, place, folder / "run"))
        return folder / "run"

    return found


def source_of(place, use):
    return place / ("ControlNet" if use == "ControlNet" else "sd")


def steps_of(use):
    """One step shows what was read; only who resumes needs another."""
    return 2 if use == "resume" else 1


def recipe_for(use, model, place, run):
    sections = {"training": {"steps": steps_of(use)}, "checkpoint": {"every": 1}} | TRAINING[use]
    if "model" in sections:
        sections["model"] = {"path": str(model)} | sections["model"]
    return recipe_of(model, place / ("steered" if use == "ControlNet" else "data"), run, **sections)


@pytest.mark.parametrize(("kind", "use"), drawn(KINDS, USES))
def test_each_use_reads_what_is_stored(place, of_plain, tmp_path, kind, use):
    if "lora" in TRAINING.get(use, {}):
        pytest.importorskip("peft")
    folder, plain = store(source_of(place, use), tmp_path / "stored", kind), of_plain(use, kind in HALVED)
    if use == "sample":
        assert np.array_equal(pictures_of(folder), plain)
        return
    recipe = recipe_for(use, folder, place, tmp_path / "run")
    if use == "resume":
        once = recipe.model_copy(update={"training": recipe.training.model_copy(update={"steps": 1})})
        assert train_here(once) == 1
        assert train_here(recipe, "latest") == 2
    else:
        assert train_here(recipe) == 1
    runs = (recipe.run.folder, plain)
    assert losses_of(runs[0]) == losses_of(runs[1])
    exports = [run / "export" for run in runs]
    assert names_and_tensors(exports[0]) == names_and_tensors(exports[1])
    if use != "adapters":
        opened = diffusers.DiffusionPipeline.from_pretrained(exports[0])
        assert all(parameter.isfinite().all() for parameter in opened.unet.parameters())


def pictures_of(folder):
    settings = SamplingSettings(steps=2, guidance=2.0, seed=0, scheduler=scheduler_config(folder))
    wish = SampleRequest(prompts=("a b",))
    return np.stack(draw_from_folder(folder, wish, settings, resolution=RESOLUTION, device=torch.device("cpu")))


def names_and_tensors(export: Path):
    """Of all files of weights, whatever their shards, precisions and formats; and that no name has a variant."""
    found = {}
    for file in sorted(export.rglob("*")):
        if file.suffix in (".safetensors", ".bin"):
            assert file.name.count(".") == 1, f"{file} has no plain name"
            assert file.stat().st_mode & 0o777 == (export / "README.md").stat().st_mode & 0o777
            tensors = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
            where = file.relative_to(export).parent.as_posix()
            found |= {(where, name): tensor.double().sum().item() for name, tensor in tensors.items()}
    return found


BROKEN_PARTS = ("unet", "vae", "text_encoder")


@pytest.mark.parametrize(("how", "part"), drawn(list(BROKEN), BROKEN_PARTS))
def test_weights_that_are_no_use_are_refused_before_anything_is_measured(place, tmp_path, monkeypatch, how, part):
    folder = damage(store(place / "sd", tmp_path / "sd", "plain"), part, how)
    monkeypatch.setattr("diffusionpipe.trainer.setup.session.agree_on_plan", None)  # nothing gets there
    for error in (refusal_of_training(folder, place / "data", tmp_path / "run"), refusal_of_drawing(folder)):
        assert len(error.splitlines()) <= 3
        assert f"{folder / part}" in error
        assert re.search(BROKEN[how], error), error


def refusal_of_training(folder, data, run):
    with pytest.raises(ModelError) as caught:
        train_here(recipe_of(folder, data, run))
    return str(caught.value)


def refusal_of_drawing(folder):
    with pytest.raises(ModelError) as caught:
        pictures_of(folder)
    return str(caught.value)


def test_a_variant_can_be_chosen(place, tmp_path):
    folder = damage(store(place / "sd", tmp_path / "sd", "plain"), "unet", "two variants")
    graph = build_graph(folder, objective=ObjectiveSettings(), resolution=RESOLUTION)
    sources = weight_sources(folder, graph, variant="non_ema")
    assert [sources[name].variant for name in ("unet", "vae")] == ["non_ema", None]
