"""Embeddings of classes from prototypes of pictures: the command, runs that freeze or train them, and the export."""

import json

import diffusers
import numpy as np
import pytest
import torch
from kit.tiny_models import NUM_CLASSES
from kit.tiny_runs import (
    RESOLUTION,
    losses_of,
    recipe_of,
    save_dit,
    save_pictures,
    save_stable_diffusion,
    train,
    train_here,
)
from PIL import Image
from safetensors.torch import load_file, save_file

from diffusionpipe import cli
from diffusionpipe.errors import CheckpointError, DataError, ModelError
from diffusionpipe.trainer.data.prototypes import prototypes_of

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_dit(tmp_path_factory.mktemp("model") / "dit")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return save_pictures(tmp_path_factory.mktemp("data") / "pictures", count=10)


@pytest.fixture
def file(tmp_path):
    """Prototypes of random numbers."""
    values = torch.randn(NUM_CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))
    save_file({"prototypes": values}, tmp_path / "prototypes.safetensors")
    return tmp_path / "prototypes.safetensors"


def tables_of(folder):
    weights = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    return {name: value for name, value in weights.items() if "class_embedder" in name}


def expected_table(file):
    values = load_file(file)["prototypes"]
    return torch.cat([values, values.mean(0, keepdim=True)])


def recipe(path, pictures, folder, file, **more):
    section = {"path": str(path), "class_embeddings": str(file), **more.pop("model", {})}
    training = {"steps": 2, "ema_decay": None, **more.pop("training", {})}
    return recipe_of(path, pictures, folder, model=section, training=training, **more)


def test_prototypes_are_the_projected_means_of_the_vaes_features(model, pictures, tmp_path, capsys):
    out = tmp_path / "made.safetensors"
    words = ["prototypes", pictures, "--model", model, "--resolution", RESOLUTION, "--out", out, "--device", "cpu"]
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    assert ended.value.code == 0
    assert (
        f"holds {NUM_CLASSES} prototypes of width {WIDTH}, of 10 pictures with 64 features" in capsys.readouterr().out
    )
    values = load_file(out)["prototypes"].double().numpy()
    vae = diffusers.AutoencoderKL.from_pretrained(model / "vae")
    features = {label: [] for label in range(NUM_CLASSES)}
    for row in map(json.loads, (pictures / "metadata.jsonl").read_text().splitlines()):
        levels = np.asarray(Image.open(pictures / row["file_name"]), dtype=np.float32)
        pixels = torch.from_numpy(levels / 127.5 - 1).permute(2, 0, 1)[None]
        with torch.no_grad():
            features[row["label"]].append(vae.encode(pixels).latent_dist.mean.flatten().double().numpy())
    means = np.stack([np.mean(some, axis=0) for some in features.values()])
    means -= means.mean(axis=0)
    # A projection keeps what is linear: five centred means have rank four, and so have their prototypes.
    combination = np.linalg.lstsq(means.T[:, :4], means.T[:, 4], rcond=None)[0]
    assert values[4] == pytest.approx(values[:4].T @ combination, abs=1e-5)
    assert values.std() == pytest.approx(1, rel=1e-6)
    assert values.mean(axis=0) == pytest.approx(np.zeros(WIDTH), abs=1e-6)
    again = prototypes_of(pictures, model, resolution=RESOLUTION, seed=1, device=torch.device("cpu")).values
    assert not np.allclose(again, values)


@pytest.mark.parametrize("from_scratch", [False, True])
def test_frozen_embeddings_are_the_files_bit_for_bit_after_training(from_scratch, model, pictures, file, tmp_path):
    chosen = recipe(model, pictures, tmp_path / "run", file, model={"from_scratch": from_scratch})
    assert train_here(chosen) == 2
    tables = tables_of(tmp_path / "run" / "export")
    assert len(tables) == 3
    assert all(torch.equal(table, expected_table(file)) for table in tables.values())


def test_trained_embeddings_begin_with_the_files_and_move(model, pictures, file, tmp_path):
    trained = {"model": {"freeze_class_embeddings": False}, "optimizer": {"learning_rate": 1e-9}}
    assert train_here(recipe(model, pictures, tmp_path / "run", file, **trained)) == 2
    moved = [table - expected_table(file) for table in tables_of(tmp_path / "run" / "export").values()]
    assert all(0 < difference.abs().max() < 1e-6 for difference in moved)


def test_a_run_resumes_with_the_same_prototypes_alone(model, pictures, file, tmp_path):
    half = recipe(model, pictures, tmp_path / "run", file, checkpoint={"every": 1})
    assert train_here(half, exports=False) == 2
    losses = losses_of(tmp_path / "run")
    assert train_here(half, "1", exports=False) == 2
    assert losses_of(tmp_path / "run") == losses
    save_file({"prototypes": torch.zeros(NUM_CLASSES, WIDTH)}, file)
    with pytest.raises(CheckpointError, match="class embeddings was 'fingerprint"):
        train_here(half, "1", exports=False)


@pytest.mark.slow
@pytest.mark.parametrize("is_frozen", [False, True])
def test_two_stages_learn_what_one_process_learns(is_frozen, crew, model, pictures, file, tmp_path):
    def chosen(name, **pipeline):
        more = {"model": {"freeze_class_embeddings": is_frozen}, "pipeline": pipeline}
        return recipe(model, pictures, tmp_path / name, file, training={"precision": "float64"}, **more)

    assert crew.run(train, chosen("over-two", stages=2, microbatches=2)) == [2, 2]
    assert train_here(chosen("in-one", stages=1, microbatches=1)) == 2
    assert losses_of(tmp_path / "over-two") == pytest.approx(losses_of(tmp_path / "in-one"), rel=1e-12)
    over_two, in_one = (tables_of(tmp_path / name / "export") for name in ("over-two", "in-one"))
    assert all((over_two[name] - in_one[name]).abs().max() < 1e-12 for name in in_one)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(NUM_CLASSES, 9), f"has prototypes of {NUM_CLASSES} classes and width 9; the model has 5 classes"),
        (torch.zeros(4, WIDTH), "has prototypes of 4 classes and width 8; the model has 5 classes and width 8"),
        (torch.full((NUM_CLASSES, WIDTH), torch.nan), "has numbers that are not finite"),
        (None, 'has no matrix "prototypes"; make it with `diffusionpipe prototypes`'),
    ],
)
def test_prototypes_that_do_not_fit_are_refused(values, message, model, pictures, tmp_path):
    path = tmp_path / "bad.safetensors"
    save_file({"prototypes": values} if values is not None else {"other": torch.zeros(1)}, path)
    with pytest.raises(ModelError, match=f"model.class_embeddings: .*{message}"):
        train_here(recipe(model, pictures, tmp_path / "run", path))


def test_models_without_classes_and_classes_without_pictures_are_refused(model, pictures, file, tmp_path):
    plain = save_stable_diffusion(tmp_path / "sd")
    with pytest.raises(ModelError, match="the model has no embeddings of classes; remove it"):
        train_here(recipe(plain, pictures, tmp_path / "run", file))
    few = save_pictures(tmp_path / "few", count=3)
    with pytest.raises(DataError, match="no picture has the label 3, 4; a prototype is the mean of a class's pictures"):
        prototypes_of(few, model, resolution=RESOLUTION, seed=0, device=torch.device("cpu"))
