"""Narrow exports hold the bytes of their forms, are drawn on any number of ranks, and are good for nothing else."""

import json
import shutil
from contextlib import contextmanager
from math import ceil, prod
from unittest import mock

import diffusers
import numpy as np
import pytest
import torch
from kit.drawn_families import asked_of, difference, drawn_everywhere, drawn_here
from kit.tiers import quick_and_slow
from kit.tiny_models import randomise_pipeline
from kit.tiny_pipelines import flux, sdxl
from kit.tiny_runs import RESOLUTION, recipe_of, save_dit, save_pictures, save_stable_diffusion, train_here
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from diffusionpipe import cli
from diffusionpipe.errors import ConfigError, ModelError
from diffusionpipe.models.parameters.exported_layers import Width
from diffusionpipe.models.parameters.forms import nf4_values
from diffusionpipe.trainer.inference.calibration import WatchedTimes, steps_watched
from diffusionpipe.workflows.drawing import request as sample_request
from diffusionpipe.workflows.drawing.request import DrawingOptions
from diffusionpipe.workflows.exporting.narrow import narrow_export_of

pytestmark = pytest.mark.usefixtures("one_thread", "one_trace")


def saved(pipeline):
    def save(folder):
        made = pipeline()
        randomise_pipeline(made)
        made.save_pretrained(folder)
        return folder

    return save


MODELS = {
    "StableDiffusionPipeline": (save_stable_diffusion, 8, "unet"),
    "DiTPipeline": (save_dit, 8, "transformer"),
    "StableDiffusionXLPipeline": (saved(sdxl), 16, "unet"),
    "FluxPipeline": (saved(flux), 16, "transformer"),
}


@contextmanager
def no_work(_rank):
    yield lambda done, total: None


def narrow(model, out, width, size=8, **more):
    asked = DrawingOptions(prompts=("a cat", "b"), resolution=size, steps=4)
    if (model / "transformer").is_dir() and not (model / "tokenizer").is_dir():
        asked = DrawingOptions(labels=(0, 1), resolution=size, steps=4)
    return narrow_export_of(model, out, Width(width), asked, no_work, pictures=4, **more)


def tensors_of(folder, component):
    return load_file(folder / component / "diffusion_pytorch_model.safetensors")


def widened(found, like):
    """The wide tensors of a narrow file by hand, in the shapes of `like`."""
    wide = {}
    for name, shape in ((name, tuple(tensor.shape)) for name, tensor in like.items()):
        layer = name.removesuffix(".weight")
        if f"{layer}.codes" not in found or not name.endswith(".weight"):
            wide[name] = found[name]
            continue
        codes, scales = (found[f"{layer}.{part}"].numpy() for part in ("codes", "scales"))
        count = prod(shape)
        if codes.ndim == 2:
            numbers = codes.view(np.int8) * np.repeat(scales, 128, 1)[:, : codes.shape[1]]
        else:
            pairs, steps = codes[: ceil(count / 2)], codes[ceil(count / 2) :]
            places = np.stack([pairs >> 4, pairs & 15], 1).ravel()[:count]
            of_blocks = (steps / 255.0) ** 2 * np.repeat(scales, 256)[: len(steps)]
            numbers = np.array(nf4_values())[places] * np.repeat(of_blocks, 64)[:count]
        wide[name] = torch.from_numpy(numbers.astype(np.float32).reshape(shape))
    return wide


@pytest.mark.parametrize("width", ["w8", "w4"])
@pytest.mark.parametrize("kind", quick_and_slow(MODELS, quick=["StableDiffusionPipeline"]))
def test_pictures_are_those_of_the_wide_model_with_rounded_weights(kind, width, tmp_path):
    save, size, component = MODELS[kind]
    model = save(tmp_path / "model")
    narrow(model, tmp_path / "narrow", width, size)
    rounded = shutil.copytree(model, tmp_path / "rounded")
    wide = widened(tensors_of(tmp_path / "narrow", component), tensors_of(model, component))
    save_file(wide, rounded / component / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    ours, theirs, before = (drawn_here(asked_of(tmp_path / name, size)) for name in ("narrow", "rounded", "model"))
    assert difference(ours, theirs) < 1e-5 < difference(ours, before)


@pytest.mark.parametrize("width", ["w8", "w8a8", "w4"])
def test_a_file_holds_the_bytes_of_its_form(width, tmp_path):
    model = save_stable_diffusion(tmp_path / "model")
    found = narrow(model, tmp_path / "narrow", width)
    before, after = (tensors_of(tmp_path / name, "unet") for name in ("model", "narrow"))
    expected = stored = 0
    for name, tensor in before.items():
        rows, columns = len(tensor), tensor[0].numel()
        if tensor.ndim < 2 or "norm" in name:
            expected += tensor.nbytes
            continue
        stored += tensor.numel()
        expected += 4 * (width == "w8a8")
        if width == "w4":
            blocks = ceil(rows * columns / 64)
            expected += ceil(rows * columns / 2) + blocks + 4 * ceil(blocks / 256)
        else:
            expected += rows * columns + 4 * rows * ceil(columns / 128)
    assert sum(tensor.nbytes for tensor in after.values()) == expected == found.narrow_bytes
    assert found.numbers == sum(tensor.numel() for tensor in before.values())
    assert found.narrow == stored > 0.8 * found.numbers
    assert found.wide_bytes == 4 * found.numbers


@pytest.mark.slow
@pytest.mark.parametrize("width", ["w8", "w8a8", "w4"])
def test_1_to_3_ranks_draw_the_same(width, tmp_path):
    model = save_stable_diffusion(tmp_path / "model")
    narrow(model, tmp_path / "narrow", width)
    (drawn,) = drawn_everywhere([asked_of(tmp_path / "narrow", 8)], None)
    assert max(difference(drawn.here, one) for one in drawn.ranks) < 1e-5
    assert [difference(drawn.narrow[0], one) for one in drawn.narrow] == [0.0] * len(drawn.narrow)


def test_a_changed_scale_changes_the_picture(tmp_path):
    model = save_stable_diffusion(tmp_path / "model")
    narrow(model, tmp_path / "narrow", "w8a8")
    before = drawn_here(asked_of(tmp_path / "narrow", 8))
    tensors = tensors_of(tmp_path / "narrow", "unet")
    for name in ("conv_in.scales", "conv_in.input_scale"):
        changed = tensors | {name: tensors[name] * 2}
        save_file(changed, tmp_path / "narrow/unet/diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
        assert difference(before, drawn_here(asked_of(tmp_path / "narrow", 8))) > 1e-3


def test_the_command_exports_a_runs_model_and_its_merged_adapters(tmp_path):
    model, data = save_stable_diffusion(tmp_path / "model"), save_pictures(tmp_path / "data")
    lora = {"rank": 2, "target_modules": ["to_q"]}
    sampling = {"prompts": ["a"], "steps": 2}
    recipe = recipe_of(model, data, tmp_path / "run", lora=lora, sampling=sampling, training={"steps": 1})
    train_here(recipe)
    words = ["export", str(tmp_path / "run"), "--quantize", "w8a8", "--out", str(tmp_path / "narrow"), "--pictures=2"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    assert "96% of the numbers of unet are in w8a8; 0.1 MB in place of 0.2" in done.output
    config = json.loads((tmp_path / "narrow/unet/config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "diffusionpipe", "width": "w8a8"}
    again = ["export", str(tmp_path / "narrow"), "--quantize", "w8", "--out", str(tmp_path / "twice")]
    assert isinstance(CliRunner().invoke(cli.app, again).exception, ModelError)
    assert not (tmp_path / "twice").exists()


def test_a_narrow_export_is_drawn_and_nothing_else(tmp_path):
    model, data = save_stable_diffusion(tmp_path / "model"), save_pictures(tmp_path / "data")
    narrow(model, tmp_path / "narrow", "w8")
    recipe = recipe_of(tmp_path / "narrow", data, tmp_path / "run")
    for refused in (
        lambda: train_here(recipe),
        lambda: train_here(recipe_of(tmp_path / "narrow", data, tmp_path / "run", lora={"rank": 2})),
        lambda: narrow(tmp_path / "narrow", tmp_path / "twice", "w4"),
    ):
        with pytest.raises(ConfigError, match=r"is a narrow export \(unet in w8\), from which pictures are drawn"):
            refused()
    with pytest.raises(ConfigError, match=r"takes no adapters; add them to the wide model"):
        drawn_here(asked_of(tmp_path / "narrow", 8, adapters=tmp_path))
    with pytest.raises(ConfigError, match=r"--out .* exists; give a folder that does not"):
        narrow(model, tmp_path / "narrow", "w8")
    with pytest.raises(ValueError, match="got diffusionpipe"):
        diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "narrow/unet")


def test_a_single_file_of_a_narrow_export_is_refused(tmp_path):
    narrow(save_stable_diffusion(tmp_path / "model"), tmp_path / "narrow", "w8")
    words = ["export", str(tmp_path / "narrow"), "--single-file", str(tmp_path / "one.safetensors")]
    assert "is a narrow export" in str(CliRunner().invoke(cli.app, words).exception)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "say what to write"),
        (["--quantize", "w8", "--single-file", "a.safetensors"], "say what to write"),
        (["--quantize", "w3", "--out", "x"], "--quantize w3: the widths are w8, w8a8, w4"),
        (["--quantize", "w8"], "name it by --out FOLDER"),
        (["--quantize", "w8", "--out", "x", "--label", "1"], "are for w8a8"),
        (["--single-file", "a.safetensors", "--out", "x"], "belong to --quantize"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_read(words, said, tmp_path):
    assert said in str(CliRunner().invoke(cli.app, ["export", str(tmp_path / "none"), *words]).exception)


def test_a_model_of_texts_needs_texts_to_be_watched(tmp_path):
    model = save_stable_diffusion(tmp_path / "model")
    with pytest.raises(ConfigError, match="--prompts FILE with a caption in each line"):
        narrow_export_of(model, tmp_path / "narrow", Width.W8A8, DrawingOptions(resolution=RESOLUTION), no_work)


def test_a_file_of_prompts_is_drawn_as_often_as_pictures_are_asked_for(tmp_path):
    model, prompts = save_stable_diffusion(tmp_path / "model"), tmp_path / "prompts.txt"
    prompts.write_text("a cat\nb\nc\n", encoding="utf-8")
    asked = DrawingOptions(prompts_file=prompts, resolution=RESOLUTION, steps=2)
    with mock.patch.object(sample_request, "drawing_of", wraps=sample_request.drawing_of) as made:
        narrow_export_of(model, tmp_path / "narrow", Width.W8A8, asked, no_work, pictures=7)
    assert made.call_args.args[1].count == 2  # three prompts twice are as near to 7 as whole rounds come


def test_watched_times_are_normal_with_the_mean_and_deviation_of_the_steps_own():
    times = torch.arange(980, -1, -20.0)
    chosen = times[steps_watched(times, 20_000, WatchedTimes.NORMAL, 3)].numpy()
    # By numpy: the same normal distribution without the draws beyond the ends.
    normal = np.random.default_rng(0).normal(times.numpy().mean(), times.numpy().std(), 100_000)
    kept = normal[(normal >= 0) & (normal <= 980)]
    assert abs(chosen.mean() - kept.mean()) < 8
    assert abs(chosen.std() - kept.std()) < 8
    assert len(set(steps_watched(times, 500, WatchedTimes.UNIFORM, 3))) == 50
