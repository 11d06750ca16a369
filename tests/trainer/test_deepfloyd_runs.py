"""A cascade in pixel space: trained together, drawn one after the other, opened and drawn by diffusers."""

import shutil

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.deepfloyd_if import pipeline_if_superresolution
from kit.tiers import quick_and_slow
from kit.tiny_deepfloyd import save_cascade
from kit.tiny_runs import losses_of, save_pictures, tensors_of, train, train_here
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from diffusionpipe import cli
from diffusionpipe.errors import ConfigError, ModelError, RecipeError
from diffusionpipe.models.compose.cascade import cascade_graph
from diffusionpipe.models.compose.common_encoders import OpenedModel, common_encoders
from diffusionpipe.models.opening.folder import scheduler_config
from diffusionpipe.trainer.checkpoints.checkpoint_folder import latest
from diffusionpipe.trainer.inference.conditions import SampleRequest
from diffusionpipe.trainer.inference.denoise import SamplingSettings, drawn_noise, step_noise
from diffusionpipe.trainer.inference.drawing import decode_exactly
from diffusionpipe.trainer.inference.folder_drawing import Source, latents_from_folder
from diffusionpipe.trainer.model.members import build_model, open_member
from diffusionpipe.trainer.recipe.recipe_file import recipe_from_table
from diffusionpipe.workflows.drawing.trained_model import trained_model

pytestmark = pytest.mark.usefixtures("one_thread", "one_trace")

PROMPTS = ("a b", "c")
STEPS = 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepfloyd")
    save_cascade(folder)
    save_pictures(folder / "data", count=8, resolution=16)
    return folder


def recipe_of(place, name, base=(), large=(), **sections):
    table = {
        "models": {
            "base": {"path": str(place / "base"), "resolution": 8, **dict(base)},
            "super": {"path": str(place / "super"), "noise_augmentation": 0.3, **dict(large)},
        },
        "data": {"train": str(place / "data"), "resolution": 16, "workers": 0},
        "training": {"steps": 2, "batch": 4, "ema_decay": 0.5, "precision": "float64"},
        "optimizer": {"learning_rate": 0.01},
        "pipeline": {"microbatches": 2, "encode_chunk": 2},
        "sampling": {"every": 2, "prompts": list(PROMPTS), "steps": STEPS, "guidance": 2.0},
        "run": {"folder": str(place / name)},
    }
    table = {**table, **{key: table.get(key, {}) | value for key, value in sections.items()}}
    return recipe_from_table(table, source="cascade.toml")


@pytest.fixture(scope="module")
def alone(place):
    """The run in one process."""
    assert train_here(recipe_of(place, "alone")) == 2
    return place / "alone"


@pytest.mark.slow
def test_the_second_model_learns_from_the_pictures_made_small_with_noise_keyed_by_sample(alone, place):
    """Another augmentation changes its losses and no bit of the first model."""
    assert train_here(recipe_of(place, "other", large={"noise_augmentation": 0.9}, sampling={"every": "none"})) == 2
    for name, is_same in (("base", True), ("super", False)):
        assert (losses_of(place / "other", f"loss/{name}") == losses_of(alone, f"loss/{name}")) is is_same
        first, second = losses_of(alone, f"loss/{name}").values()
        assert first != second


def test_exports_are_the_averages_and_draw_with_the_variances_that_they_have_learnt(alone):
    for name, kind in (("base", "IFPipeline"), ("super", "IFSuperResolutionPipeline")):
        opened = diffusers.DiffusionPipeline.from_pretrained(alone / "export" / name, use_safetensors=True)
        assert type(opened).__name__ == kind
        assert opened.scheduler.config.variance_type == "learned_range"
        averages = {key: value for key, value in tensors_of(latest(alone)).items() if key.startswith(f"ema.{name}/")}
        stored = dict(opened.unet.named_parameters())
        assert len(averages) == len(stored)
        for key, average in averages.items():
            torch.testing.assert_close(stored[key.partition("/")[2].partition(".")[2]], average.float())
    assert "\nlow_resolution = 8\n" in (alone / "export" / "super" / "README.md").read_text()  # no model is before it


@pytest.mark.parametrize(
    ("variance", "guidance"),
    quick_and_slow(
        [("learned_range", 3.0), ("learned_range", 1.0), ("fixed", 3.0), ("fixed", 1.0)],
        quick=[("learned_range", 3.0)],
    ),
)
def test_sample_draws_what_diffusers_two_pipelines_draw(alone, place, variance, guidance, monkeypatch, tmp_path):
    """Base, then super-resolved: the same first noise, the same noise of the steps, within 1e-5 of [0, 1]."""
    run = alone
    if variance == "fixed":
        run = place / "fixed"
        if not run.is_dir():
            train_here(recipe_of(place, "fixed", objective={"variance": "fixed"}, training={"steps": 1}))
        assert scheduler_config(run / "export" / "base")["variance_type"] == "fixed_small"
    ours, theirs = None, None
    for name, side in (("base", 8), ("super", 16)):
        folder, low = run / "export" / name, None if name == "base" else 8
        settings = SamplingSettings(
            steps=STEPS, guidance=guidance, seed=3, scheduler=scheduler_config(folder), noise_level=40
        )
        source = Source(folder=folder, resolution=side, name=name, small=low)
        ours = latents_from_folder(source, SampleRequest(prompts=PROMPTS), settings, ours, device=CPU)
        pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
        first = drawn_noise("sampling", settings, 2, (3, side, side), name)
        options = {"num_inference_steps": STEPS, "guidance_scale": guidance, "output_type": "pt"}
        options["clean_caption"] = False
        if name == "super":
            noise = drawn_noise("augmentation", settings, 2, (3, side, side), name)
            monkeypatch.setattr(pipeline_if_superresolution, "randn_tensor", lambda *_, **__: noise)  # noqa: B023
            options |= {"image": theirs, "noise_level": 40}
        start = "prepare_intermediate_images"
        monkeypatch.setattr(pipeline, start, lambda *_: first)  # noqa: B023
        pipeline.set_progress_bar_config(disable=True)
        theirs = pipeline(list(PROMPTS), generator=step_noise(settings, name), **options).images
        assert ours.shape == theirs.shape == (2, 3, side, side)
        assert ours.std() > 0.1
        torch.testing.assert_close(ours / 2, theirs / 2, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_command_draws_the_cascade_or_its_beginning(alone, tmp_path):
    def draw(*words):
        arguments = ["sample", str(alone), "--prompt", "a b", "--keep", str(tmp_path / "kept"), *words]
        return CliRunner().invoke(cli.app, [*arguments, "--steps", "2", "--out", str(tmp_path / "grid.png")])

    assert draw().exit_code == 0
    (kept,) = (tmp_path / "kept").iterdir()
    from PIL import Image

    assert Image.open(kept).size == (16, 16)
    assert draw("--until", "base").exit_code == 0
    assert Image.open(kept).size == (8, 8)
    assert "its models are base, super" in str(draw("--until", "large").exception)
    assert "leave out --resolution" in str(draw("--resolution", "32").exception)
    assert "above the last level, 999" in str(draw("--noise-level", "1000").exception)


@pytest.mark.slow
def test_the_command_names_the_parts_of_its_pictures_from_the_left(alone, tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr("diffusionpipe.viz.grid.sample_grid", lambda pictures, *_, **__: kept.extend(pictures))
    words = ["sample", str(alone), "--prompt", "a b", "--steps", "1", "--out", str(tmp_path / "grid.png")]
    assert CliRunner().invoke(cli.app, words).exit_code == 0
    ((caption, picture),) = kept
    assert (caption, picture.shape) == ("base | super | bicubic: a b", (16, 48, 3))


def test_pictures_of_a_run_are_base_super_resolved_and_bicubic(alone):
    pictures = np.load(alone / "samples" / "step-00000002.npy")
    assert pictures.shape == (2, 16, 48, 3)
    assert len(list((alone / "samples" / "step-00000002").iterdir())) == 2
    base = pictures[:, ::2, :16:2]
    assert np.array_equal(pictures[:, :, :16], base.repeat(2, axis=1).repeat(2, axis=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "pipeline",
    [
        {"schedule": "opposed", "fill": True},
        {"schedule": "together"},
        {"schedule": "1f1b", "fill": True},
        {"stages": 1, "data_parallel": 2},
        {"stages": 1, "data_parallel": 2, "sharded": True},
        {"stages": 1, "replicas": [2], "microbatches": 1},
    ],
    ids=["opposed, filled", "together", "in turn, filled", "copies", "sharded", "replicas"],
)
def test_two_ranks_learn_and_draw_what_one_does(alone, place, crew, pipeline):
    name = "-".join(map(str, pipeline.values()))
    microbatches = {} if "data_parallel" not in pipeline else {"microbatches": 1}
    assert crew.run(train, recipe_of(place, name, pipeline=pipeline | microbatches)) == [2, 2]
    for key in ("loss/base", "loss/super", "gradient_norm/base", "gradient_norm/super"):
        found, expected = (list(losses_of(folder, key).values()) for folder in (place / name, alone))
        assert found == pytest.approx(expected, rel=1e-9)
    pictures = [np.load(folder / "samples" / "step-00000002.npy").astype(int) for folder in (place / name, alone)]
    assert abs(pictures[0] - pictures[1]).max() <= 1


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(alone, place):
    assert train_here(recipe_of(place, "again", training={"steps": 1}, sampling={"every": "none"})) == 1
    assert train_here(recipe_of(place, "again"), "latest") == 2
    found, expected = tensors_of(latest(place / "again")), tensors_of(latest(alone))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.slow
def test_both_models_start_from_scratch(place):
    recipe = recipe_of(
        place,
        "scratch",
        {"from_scratch": True},
        {"from_scratch": True},
        training={"steps": 1},
        sampling={"every": "none"},
    )
    assert train_here(recipe) == 1


REFUSED = {
    "models.super.low_resolution: 4 are not the 8 pixels that base draws": {"large": {"low_resolution": 4}},
    "models.base.low_resolution: ": {"base": {"low_resolution": 4}},
    "noise_level: 1000 is above the last level, 999": {"sampling": {"noise_level": 1000}},
    "draws no flows": {"objective": {"kind": "flow_matching"}},
    "low_resolution: 16 is not below": {"large": {"low_resolution": 16}},
}


@pytest.mark.parametrize(("says", "sections"), REFUSED.items(), ids=list(REFUSED))
def test_what_does_not_fit_is_refused_before_anything_is_trained(place, says, sections):
    with pytest.raises((ModelError, RecipeError)) as caught:
        train_here(recipe_of(place, "refused", **sections))
    assert says in str(caught.value)
    assert not (place / "refused" / "metrics.jsonl").exists()


def test_a_model_that_reads_what_no_model_before_it_draws_is_named_with_its_key(place):
    recipe = recipe_of(place, "turned", {"path": str(place / "super")}, {"path": str(place / "base")})
    with pytest.raises(RecipeError, match=r"models.base.low_resolution: .*or put \[models.base\] after the section"):
        build_model(recipe, "cpu")


def test_super_resolution_alone_needs_the_size_of_its_pictures_and_another_model_to_draw(place):
    table = {
        "model": {"path": str(place / "super")},
        "data": {"train": str(place / "data"), "resolution": 16},
        "training": {"steps": 1, "batch": 4},
        "run": {"folder": str(place / "single")},
    }
    with pytest.raises(RecipeError, match=r"model.low_resolution: .* reads small pictures; set their side, e.g. 4"):
        build_model(recipe_from_table(table, source="one.toml"), "cpu")
    table["model"]["low_resolution"] = 8
    opened = build_model(recipe_from_table(table, source="one.toml"), "cpu")
    assert opened.members[0].low.resolution == 8
    result = CliRunner().invoke(
        cli.app, ["sample", str(place / "super"), "--prompt", "a", "--out", str(place / "x.png")]
    )
    assert isinstance(result.exception, ConfigError)
    assert "draws from small pictures" in str(result.exception)


def test_the_last_model_of_a_run_knows_those_before_it(alone):
    for folder in (alone, alone / "export"):
        found = trained_model(folder)
        assert [(one.name, one.resolution) for one in found.chain] == [("base", 8), ("super", 16)]


def test_pictures_without_an_autoencoder_are_decoded_as_they_are(alone):
    latents = torch.linspace(-1.5, 1.5, 48).reshape(1, 3, 4, 4)
    found = decode_exactly(alone / "export" / "base", latents)
    torch.testing.assert_close(found, (latents / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1))


def test_models_with_the_same_text_encoder_hold_and_run_it_once(place, tmp_path):
    recipe = recipe_of(place, "common")
    graphs = {name: open_member(recipe.alone(name), place / name, name, before=8).graph for name in ("base", "super")}
    opened = {name: OpenedModel(place / name, graph) for name, graph in graphs.items()}
    common = common_encoders(opened)
    assert common == {"base": {}, "super": {"text_encoder": "base"}}
    both = cascade_graph(graphs, common)
    assert "super/text_encoder" not in both.components
    assert [spec.name for spec in both.inputs if "input_ids" in spec.name] == ["base/input_ids"]
    shutil.copytree(place / "super", tmp_path / "other")
    weights = tmp_path / "other" / "text_encoder" / "model.safetensors"
    tensors = load_file(weights)
    next(iter(tensors.values())).view(-1)[-1] += 1  # one number, as in a model that learned one word
    save_file(tensors, weights, metadata={"format": "pt"})
    common = common_encoders({**opened, "super": OpenedModel(tmp_path / "other", graphs["super"])})
    assert common == {"base": {}, "super": {}}
    assert {"base/text_encoder", "super/text_encoder"} <= cascade_graph(graphs, common).components.keys()
