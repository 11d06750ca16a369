"""Recipes with objective.self_conditioning: runs over stages, widened checkpoints, resuming, export, drawing."""

import shutil

import numpy as np
import pytest
import torch
from kit.tiny_pipelines import flux
from kit.tiny_runs import (
    RESOLUTION,
    ask_to_save_and_quit,
    losses_of,
    recipe_of,
    save_dit,
    save_pictures,
    save_stable_diffusion,
    tensors_of,
    train,
    train_here,
)

from diffusionpipe.combinations.features import Feature
from diffusionpipe.combinations.refused import refusal
from diffusionpipe.errors import CheckpointError, ConfigError, ModelError
from diffusionpipe.models.opening.folder import reads_estimate, scheduler_config
from diffusionpipe.trainer.checkpoints.checkpoint import latest
from diffusionpipe.trainer.inference.conditions import SampleRequest
from diffusionpipe.trainer.inference.denoise import SamplingSettings
from diffusionpipe.trainer.inference.folder_drawing import draw_from_folder
from diffusionpipe.trainer.model.members import build_model

pytestmark = pytest.mark.usefixtures("one_thread")
MODELS = {"sd": ("unet", "conv_in"), "dit": ("transformer", "pos_embed.proj")}
PLAIN = {"self_conditioning": 0.0}
EXACT = {"precision": "float64"}
HALF = {"self_conditioning": 0.5, "kind": "v_prediction"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("self-conditioning")
    save_stable_diffusion(folder / "sd")
    save_dit(folder / "dit")
    save_pictures(folder / "data", count=8)
    save_pictures(folder / "held-out", count=4, seed=1)
    return folder


@pytest.fixture(scope="module")
def recipe(place):
    """A recipe of a run of 4 steps called `name`."""

    def make(name, *, kind="sd", **sections):
        drawn = {"prompts": ("a b",)} if kind == "sd" else {"labels": (1,)}
        base = {
            "objective": HALF,
            "data": {"validation": str(place / "held-out")},
            "training": {"steps": 4},
            "validation": {"every": 2, "samples": 4, "timesteps": (0.3, 0.8)},
            "checkpoint": {"every": 2, "keep": 5},
            "sampling": {"every": 4, "steps": 3, "guidance": 2.0, **drawn},
        }
        merged = {key: base.get(key, {}) | sections.get(key, {}) for key in {**base, **sections}}
        return recipe_of(place / kind, place / "data", place / name, **merged)

    return make


@pytest.fixture(scope="module", params=["sd", pytest.param("dit", marks=pytest.mark.slow)])
def over_two(request, crew, recipe, place):
    """The finished run over two stages, and the kind of its model."""
    assert crew.run(train, recipe(f"over-two-{request.param}", kind=request.param)) == [4, 4]
    return place / f"over-two-{request.param}", request.param


@pytest.fixture(scope="module", params=["sd", pytest.param("dit", marks=pytest.mark.slow)])
def exact(request, crew, recipe, place):
    """The same with float64: Adam enlarges the rounding of float32 until no close tolerance holds everywhere."""
    assert crew.run(train, recipe(f"exact-{request.param}", kind=request.param, training=EXACT)) == [4, 4]
    return place / f"exact-{request.param}", request.param


def pictures_of(folder):
    return np.load(folder / "samples" / "step-00000004.npy")


def assert_near(found, expected, tolerance=1e-10):
    for key in ("loss", "validation_loss", "gradient_norm"):
        a, b = losses_of(found, key), losses_of(expected, key)
        assert a.keys() == b.keys()
        assert list(a.values()) == pytest.approx(list(b.values()), rel=tolerance), key


def assert_same_checkpoints(found, expected):
    a, b = tensors_of(latest(found)), tensors_of(latest(expected))
    assert a.keys() == b.keys()
    assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def test_two_stages_learn_and_draw_what_one_process_does(exact, recipe, tmp_path):
    folder, kind = exact
    assert train_here(recipe(tmp_path, kind=kind, training=EXACT)) == 4
    assert_near(folder, tmp_path)
    assert np.abs(pictures_of(folder).astype(int) - pictures_of(tmp_path)).max() <= 1


LAYOUTS = {
    "sharded": {"pipeline": {"data_parallel": 2, "sharded": True}},
    "data parallel": {"pipeline": {"data_parallel": 2}},
    "split": {"pipeline": {"schedule": "zb-h1"}},
    "filled": {"pipeline": {"fill": True}},
    "offloaded": {"pipeline": {"offload_frozen": True}},
    "post-validated": {"training": {"post_validation": True}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_change_nothing(crew, recipe, tmp_path, exact, layout):
    folder, kind = exact
    sections = LAYOUTS[layout] | {"training": EXACT | LAYOUTS[layout].get("training", {})}
    assert crew.run(train, recipe(tmp_path, kind=kind, **sections)) == [4, 4]
    assert_near(tmp_path, folder)


def test_a_trained_text_encoder_and_random_weights(crew, recipe, tmp_path):
    model = {"train": ["unet", "text_encoder"], "from_scratch": True}
    sections = {"model": model, "training": EXACT, "sampling": {"every": None}}
    assert crew.run(train, recipe(tmp_path / "two", **sections)) == [4, 4]
    assert train_here(recipe(tmp_path / "one", **sections)) == 4
    assert_near(tmp_path / "two", tmp_path / "one")


def test_bfloat16_stays_near_float32(crew, recipe, tmp_path, over_two):
    folder, kind = over_two
    narrow = recipe(tmp_path, kind=kind, training={"precision": "bfloat16"}, sampling={"every": None})
    assert crew.run(train, narrow) == [4, 4]
    assert list(losses_of(tmp_path).values()) == pytest.approx(list(losses_of(folder).values()), rel=0.03)


def test_a_plain_model_that_is_widened_has_the_losses_of_the_plain_one_bit_for_bit(crew, recipe, over_two, tmp_path):
    folder, kind = over_two
    plain = recipe(tmp_path, kind=kind, objective=PLAIN, training={"steps": 1},
                   validation={"every": 1}, sampling={"every": None})  # fmt: skip
    assert crew.run(train, plain) == [1, 1]
    assert losses_of(folder)[1] == losses_of(tmp_path)[1]
    assert losses_of(folder)[2] != losses_of(tmp_path)[1]


def test_a_run_that_was_interrupted_goes_on_bit_for_bit(crew, recipe, over_two, tmp_path):
    folder, kind = over_two
    assert crew.run(train, recipe(tmp_path, kind=kind), at={3: ask_to_save_and_quit}) == [3, 3]
    assert crew.run(train, recipe(tmp_path, kind=kind), "latest") == [4, 4]
    assert losses_of(tmp_path) == losses_of(folder)
    assert_same_checkpoints(tmp_path, folder)
    assert np.array_equal(pictures_of(tmp_path), pictures_of(folder))


def test_a_run_goes_on_with_the_same_share_alone(recipe, over_two, tmp_path):
    folder, kind = over_two
    shutil.copytree(folder, tmp_path / "copied")
    other = recipe(tmp_path / "copied", kind=kind, objective={"self_conditioning": 1.0}, training={"steps": 6})
    with pytest.raises(CheckpointError, match=r"objective\.self_conditioning was 0\.5 and is 1\.0"):
        train_here(other, "latest")


def test_the_export_is_widened_opens_in_diffusers_and_draws_the_pictures_of_the_run(over_two):
    import diffusers

    folder, kind = over_two
    component, convolution = MODELS[kind]
    opened = diffusers.DiffusionPipeline.from_pretrained(folder / "export")
    denoiser = getattr(opened, component)
    assert (denoiser.config.in_channels, denoiser.config.out_channels) == (8, 4)
    added = denoiser.get_submodule(convolution).weight[:, 4:]
    assert added.abs().max() > 0
    assert reads_estimate(folder / "export")
    wish = SampleRequest(prompts=("a b",)) if kind == "sd" else SampleRequest(labels=(1,))
    settings = SamplingSettings(steps=3, guidance=2.0, seed=0, scheduler=scheduler_config(folder / "export"))
    drawn = draw_from_folder(folder / "export", wish, settings, resolution=RESOLUTION, device=torch.device("cpu"))
    assert np.abs(np.stack(drawn).astype(int) - pictures_of(folder)).max() <= 1
    card = (folder / "export" / "README.md").read_text()
    assert "do not feed the estimate back" in card
    assert "from_pretrained" not in card


def test_training_goes_on_from_an_export(recipe, over_two, tmp_path):
    folder, kind = over_two
    again = recipe(tmp_path / "again", kind=kind, model={"path": str(folder / "export")}, sampling={"every": None})
    assert train_here(again) == 4
    plain = recipe(tmp_path / "plain", kind=kind, model={"path": str(folder / "export")}, objective=PLAIN)
    with pytest.raises(ModelError, match=r"set objective\.self_conditioning"):
        train_here(plain)


def test_the_estimate_counts_when_pictures_are_drawn(over_two, tmp_path):
    """Without its weights other pictures are drawn."""
    from safetensors.torch import load_file, save_file

    folder, kind = over_two
    component, convolution = MODELS[kind]
    shutil.copytree(folder / "export", tmp_path / "blind")
    file = tmp_path / "blind" / component / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors[f"{convolution}.weight"][:, 4:] = 0
    save_file(tensors, file)
    wish = SampleRequest(prompts=("a b",)) if kind == "sd" else SampleRequest(labels=(1,))
    settings = SamplingSettings(steps=3, guidance=2.0, seed=0, scheduler=scheduler_config(folder / "export"))
    drawn = [draw_from_folder(f, wish, settings, resolution=RESOLUTION, device=torch.device("cpu"))
             for f in (folder / "export", tmp_path / "blind")]  # fmt: skip
    assert not np.array_equal(*map(np.stack, drawn))


def test_what_cannot_be_is_refused_at_once(recipe, place):
    with pytest.raises(ValueError, match=r"0\.3 of a batch of 4 is not a whole number of samples; use e\.g\. 0\.25"):
        recipe("wrong", objective={"self_conditioning": 0.3})
    with pytest.raises(ValueError, match="less than or equal to 1"):
        recipe("wrong", objective={"self_conditioning": 1.5})
    with pytest.raises(ValueError) as caught:
        recipe("wrong", lora={"rank": 2})
    assert refusal(Feature.SELF_CONDITIONING, Feature.LORA) in str(caught.value)
    pipeline = flux()
    pipeline.save_pretrained(place / "flux")
    with pytest.raises(ConfigError, match="no first convolution that could read an estimate"):
        build_model(recipe_of(place / "flux", place / "data", place / "x", objective={"self_conditioning": 0.5}), "cpu")
