"""Recipes with [lora]: runs over stages, checkpoints of adapters, the export that diffusers loads, drawing from it."""

import shutil
import sys

import diffusers
import numpy as np
import pytest
import torch
from kit.card_code import picture_of
from kit.tiny_models import randomise_pipeline
from kit.tiny_pipelines import PIPELINES, flux
from kit.tiny_runs import (
    RESOLUTION,
    draw_untrained,
    losses_of,
    recipe_of,
    save_dit,
    save_pictures,
    save_stable_diffusion,
    tensors_of,
    train,
    train_here,
)
from typer.testing import CliRunner

from diffusionpipe import cli
from diffusionpipe.errors import CheckpointError, ConfigError, ModelError
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.models.parameters.lora import is_adapter, is_second_matrix
from diffusionpipe.runtime.job.membership import membership
from diffusionpipe.runtime.job.process_group import joined
from diffusionpipe.trainer.checkpoints.checkpoint import latest
from diffusionpipe.trainer.checkpoints.training_state import load_training
from diffusionpipe.trainer.model.members import build_model
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.trainer.setup.planning import Planning
from diffusionpipe.trainer.setup.session import open_session

pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("peft")
DENOISERS = {"sd": "unet", "flux": "transformer"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    save_stable_diffusion(folder / "sd")
    save_dit(folder / "dit")
    pipeline = flux()
    randomise_pipeline(pipeline)
    pipeline.save_pretrained(folder / "flux")
    save_pictures(folder / "data", count=8)
    return folder


@pytest.fixture(scope="module")
def recipe(place):
    """A recipe of a run of 4 steps called `name` that trains adapters of rank 2."""

    def make(name, *, kind="sd", **sections):
        drawn = {"prompts": ("a b",), "every": 4, "steps": 2, "guidance": 2.0}
        base = {
            "lora": {"rank": 2, "alpha": 6.0},
            "training": {"steps": 4, "clip_norm": 0.1},
            "checkpoint": {"every": 2, "keep": 5},
            "sampling": drawn,
        }
        merged = {key: base.get(key, {}) | sections.get(key, {}) for key in {**base, **sections}}
        return recipe_of(place / kind, place / "data", place / name, **merged)

    return make


@pytest.fixture(scope="module", params=DENOISERS)
def finished(request, crew, recipe, place):
    """A finished run over two stages with a split backward, and the kind of its model."""
    made = recipe(f"over-two-{request.param}", kind=request.param, pipeline={"schedule": "zb-h1"})
    assert crew.run(train, made) == [4, 4]
    return made, request.param


def weights_of(checkpoint, prefix):
    return {n.removeprefix(prefix): t for n, t in tensors_of(checkpoint).items() if n.startswith(prefix)}


def test_two_stages_learn_what_one_process_learns(finished, recipe):
    over_two, kind = finished
    in_one = recipe(f"in-one-{kind}", kind=kind)
    assert train_here(in_one) == 4
    losses = losses_of(in_one.run.folder)
    assert losses_of(over_two.run.folder) == pytest.approx(losses, rel=1e-5)
    assert len(set(losses.values())) == 4
    pictures = [np.load(r.run.folder / "samples" / "step-00000004.npy").astype(int) for r in (over_two, in_one)]
    assert np.abs(pictures[0] - pictures[1]).max() <= 1
    a, b = weights_of(latest(over_two.run.folder), "ema."), weights_of(latest(in_one.run.folder), "ema.")
    assert a.keys() == b.keys()
    assert all(torch.allclose(a[name], b[name], atol=1e-4) for name in a)


@pytest.mark.parametrize("kind", DENOISERS)
def test_frozen_layers_of_the_denoiser_draw_the_same_from_host_memory(recipe, kind):
    """They run at every time step, before the first layer with an adapter."""
    pictures = []
    for name, offload in (("whole", False), ("offloaded", True)):
        made = recipe(f"{name}-{kind}", kind=kind, pipeline={"offload_frozen": offload, "stages": 1})
        with joined(membership({}), device="cpu") as job:
            pictures.append(draw_untrained(job, made))
    assert np.array_equal(*pictures)


def test_a_checkpoint_holds_adapters_and_what_belongs_to_them_alone(finished):
    made, kind = finished
    tensors = tensors_of(latest(made.run.folder))
    assert {name.partition(".")[0] for name in tensors} == {"model", "ema", "optimizer"}
    assert all(f".{DENOISERS[kind]}." in name and is_adapter(name) for name in tensors)
    assert all(tensor.abs().max() > 0 for name, tensor in tensors.items() if name.startswith("model."))


def test_a_run_over_two_stages_goes_on_in_one_process(finished, recipe):
    over_two, kind = finished
    again = recipe(f"again-{kind}", kind=kind)
    assert train_here(again, str(over_two.run.folder / "checkpoints" / "step-00000002")) == 4
    expected = {step: loss for step, loss in losses_of(over_two.run.folder).items() if step > 2}
    assert losses_of(again.run.folder) == pytest.approx(expected, rel=1e-4)


def _denoise(made: Recipe):
    """Inputs of the denoiser and what our own module, with the run's averages, predicts from them."""
    from diffusionpipe.planner.unequal.cutting import cutting_of
    from diffusionpipe.workflows.training.run_plan import make_plan

    with joined(membership({}), device="cpu") as job:
        session = open_session(made, job, Planning(make_plan=make_plan, make_cutting=cutting_of))
        load_training(latest(made.run.folder), session.state)
        assert session.ema is not None
        with session.ema.swapped(), torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            layers = [layer for layer in session.graph.layers if layer.component in ("unet", "transformer")]
            written = {name for layer in layers for name in layer.writes}
            shapes = {spec.name: spec.shape for spec in session.model.tensors}
            reads = {name for layer in layers for name in layer.reads} - written
            inputs = {name: torch.rand((2, *shapes[name]), generator=generator) for name in sorted(reads)}
            inputs["timesteps"] = torch.tensor([7.0, 500.0])
            return inputs, run_layers(layers, session.graph.components, inputs, targets=["prediction"])["prediction"]


def _predict(pipeline, inputs):
    """The same prediction by diffusers."""
    with torch.no_grad():
        if hasattr(pipeline, "unet"):
            return pipeline.unet(inputs["noisy"], inputs["timesteps"], inputs["text_states"], return_dict=False)[0]
        B, C, H, W = inputs["noisy"].shape
        packed = pipeline._pack_latents(inputs["noisy"], B, C, H, W)
        out = pipeline.transformer(
            hidden_states=packed,
            timestep=inputs["timesteps"] / 1000,
            guidance=inputs["guidance"],
            pooled_projections=inputs["pooled_text"],
            encoder_hidden_states=inputs["text_states"],
            txt_ids=torch.zeros(inputs["text_states"].shape[1], 3),
            img_ids=pipeline._prepare_latent_image_ids(B, H // 2, W // 2, "cpu", torch.float32),
            return_dict=False,
        )[0]
        return out.reshape(B, H // 2, W // 2, C, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(B, C, H, W)


def test_diffusers_loads_the_export_and_predicts_what_our_module_does(finished, place, tmp_path):
    made, kind = finished
    export = made.run.folder / "export"
    assert sorted(path.name for path in export.iterdir()) == ["README.md", "pytorch_lora_weights.safetensors"]
    inputs, expected = _denoise(made)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(place / kind)
    plain = _predict(pipeline, inputs)
    pipeline.load_lora_weights(export)
    assert torch.allclose(_predict(pipeline, inputs), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(plain, expected, rtol=0, atol=1e-3)
    card = (export / "README.md").read_text()
    for text in ("load_lora_weights", "rank 2", f"Adapters for {kind}", "- lora", "moving average"):
        assert text in card
    assert str(place) not in card
    assert picture_of(card, export, tmp_path, **{kind: place / kind}).size == (RESOLUTION, RESOLUTION)


def test_what_is_drawn_while_training_is_what_sample_draws_from_the_export(recipe, crew, place, tmp_path):
    made = recipe("drawn")
    assert crew.run(train, made) == [4, 4]
    (drawn,) = np.load(made.run.folder / "samples" / "step-00000004.npy")
    with joined(membership({}), device="cpu") as job:
        (untrained,) = draw_untrained(job, made)
    assert np.abs(drawn.astype(int) - untrained).max() > 1
    kept = {}

    def keep(pictures, path, **options):
        kept["pictures"] = pictures
        path.touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffusionpipe.viz.grid.sample_grid", keep)
        words = ["--prompt", "a b", "--steps", "2", "--guidance", "2", "--out", str(tmp_path / "grid.png")]
        result = CliRunner().invoke(cli.app, ["sample", str(made.run.folder), *words, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    ((_, found),) = kept["pictures"]
    assert np.abs(found.astype(int) - drawn).max() <= 1


def test_a_merged_export_is_a_whole_model_with_the_same_predictions(recipe, place):
    made = recipe("merged", lora={"merge": True}, sampling={"every": "none"}, training={"steps": 2})
    assert train_here(made) == 2
    inputs, expected = _denoise(made)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(made.run.folder / "export")
    assert torch.allclose(_predict(pipeline, inputs), expected, rtol=0, atol=1e-5)
    assert not list((made.run.folder / "export").rglob("pytorch_lora_weights*"))
    assert "added to the base model" in (made.run.folder / "export" / "README.md").read_text()


def test_base_weights_kept_in_bfloat16_give_the_same_run_bit_for_bit(crew, recipe):
    found = []
    for name, frozen in (("wide", "none"), ("narrow", "bfloat16")):
        made = recipe(name, training={"precision": "bfloat16", "steps": 2}, model={"frozen_dtype": frozen})
        assert crew.run(train, made) == [2, 2]
        drawn = np.load(made.run.folder / "samples" / "step-00000002.npy")
        found.append((losses_of(made.run.folder), tensors_of(latest(made.run.folder)), drawn))
    (losses, tensors, drawn), (narrow_losses, narrow_tensors, narrow_drawn) = found
    assert narrow_losses == losses
    assert narrow_tensors.keys() == tensors.keys()
    assert all(torch.equal(narrow_tensors[name], tensor) for name, tensor in tensors.items())
    assert {tensor.dtype for tensor in narrow_tensors.values()} == {torch.float32}
    assert np.array_equal(narrow_drawn, drawn)


@pytest.mark.parametrize(("kind", "targets"), [("sdxl", ("to_q", "to_out.0", "proj_in", "conv1")), ("sd3", ())])
def test_adapters_of_the_other_pipelines_are_loaded_by_diffusers(kind, targets, recipe, place):
    pipeline = PIPELINES[kind]()
    pipeline.save_pretrained(place / kind)
    lora = {"target_modules": targets}
    made = recipe(f"one-{kind}", kind=kind, lora=lora, training={"steps": 1, "ema_decay": "none"})
    assert train_here(made) == 1
    pipeline.load_lora_weights(made.run.folder / "export")
    denoiser = pipeline.unet if kind == "sdxl" else pipeline.transformer
    loaded = {n.replace(".default_0.", ".default."): p for n, p in denoiser.named_parameters() if is_adapter(n)}
    saved = weights_of(latest(made.run.folder), "model." + ("unet." if kind == "sdxl" else "transformer."))
    assert loaded.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], 3.0 * tensor if is_second_matrix(name) else tensor), name


def test_a_filled_run_learns_the_same_and_adapters_alone_say_what_they_belong_to(recipe, place, tmp_path):
    made = recipe("filled", pipeline={"fill": True, "stages": 1}, training={"steps": 2}, sampling={"every": "none"})
    plain = recipe("plain", training={"steps": 2}, sampling={"every": "none"})
    assert [train_here(made), train_here(plain)] == [2, 2]
    assert losses_of(made.run.folder) == pytest.approx(losses_of(plain.run.folder), rel=1e-5)
    alone = tmp_path / "elsewhere" / "adapters"
    shutil.copytree(made.run.folder / "export", alone)
    result = CliRunner().invoke(cli.app, ["sample", str(alone), "--prompt", "a"])
    assert isinstance(result.exception, ConfigError)
    assert "no recipe.toml beside it names their base model" in str(result.exception)


@pytest.mark.parametrize(
    ("trained", "resumed", "message"),
    [
        ({}, {"rank": "none", "alpha": "none"}, "lora.rank was 2 and is none"),
        ({}, {"rank": 4}, "lora.rank was 2 and is 4"),
        ({}, {"target_modules": ("to_q", "ff.net.2")}, "lora was .* to_out.0' and is .*on to_q, ff.net.2'"),
        ({}, {"alpha": 2.0}, "lora was 'rank 2, alpha 6, on to_q.*and is 'rank 2, alpha 2"),
        ({}, {"target_modules": ("to_q",)}, "on to_q, to_k, to_v, to_out.0' and is .* on to_q'"),
        ({"rank": "none", "alpha": "none"}, {}, "lora.rank was none and is 2"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused(place, recipe, trained, resumed, message):
    folder = place / ("adapters" if not trained else "whole")
    short = {"training": {"steps": 1}, "sampling": {"every": "none"}}
    if latest(folder) is None:
        assert train_here(recipe(folder.name, lora=trained, **short), exports=False) == 1
    with pytest.raises(CheckpointError, match=message):
        train_here(recipe(folder.name, lora=resumed, **short), "latest", exports=False)


@pytest.mark.parametrize(
    ("kind", "sections", "error", "message"),
    [
        ("sd", {"lora": {"rank": 9}}, ModelError, "rank 9 is larger than unet.down_blocks.*use at most 8"),
        (
            "sd",
            {"model": {"train": ("unet", "vae")}},
            ModelError,
            "vae can have no adapters; in model.train choose from unet, text_encoder",
        ),
        ("sd", {"lora": {"target_modules": ("to_w",)}}, ModelError, "unet has no modules named to_w"),
        ("sd", {"lora": {"target_modules": ("norm1",)}}, ModelError, "is a LayerNorm; name linear layers"),
        ("dit", {}, ModelError, "DiTTransformer2DModel, for which diffusers cannot load adapters; remove .lora."),
    ],
)
def test_what_cannot_have_adapters_is_refused_before_anything_is_read(recipe, place, kind, sections, error, message):
    made = recipe("refused", kind=kind, **sections)
    with pytest.raises(error, match=message):
        build_model(made, "cpu")


def test_without_peft_its_package_is_named(recipe, place, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install peft"):
        build_model(recipe("no-peft"), "cpu")
