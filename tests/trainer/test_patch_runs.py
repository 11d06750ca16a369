"""Runs on patches of pictures, from the recipe to the export and back."""

import json
import shlex

import numpy as np
import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler
from kit.tiny_class_unet import save_class_pair, tiny_class_unet
from kit.tiny_pipelines import inpainting
from kit.tiny_runs import losses_of, recipe_of, save_dit, save_pictures, save_stable_diffusion, train, train_here
from PIL import Image
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from diffusionpipe import cli
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.errors import ModelError, RecipeError
from diffusionpipe.holding.sizes import at_size
from diffusionpipe.models.objectives.objective import ObjectiveSettings
from diffusionpipe.models.opening.folder import build_graph
from diffusionpipe.planner import Layout, plan_from_profile
from diffusionpipe.planner.mixed import mean_step
from diffusionpipe.profiler import analytic_profile
from diffusionpipe.trainer.data.batches.patch_order import PatchOrder
from diffusionpipe.trainer.data.sizes.patches import patch_sizes, shares_of
from diffusionpipe.trainer.model.members import build_model, check_masks
from diffusionpipe.trainer.recipe.size_rules import run_of
from diffusionpipe.trainer.reporting.metrics import read_metrics
from diffusionpipe.workflows.planning.recipe_profile import make_profile_of

pytestmark = pytest.mark.usefixtures("one_thread", "one_trace")
SIDE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_stable_diffusion(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return save_pictures(tmp_path_factory.mktemp("data") / "pictures", count=6, resolution=SIDE)


def patched(model, pictures, folder, /, share=0.5, **sections):
    data = {"resolution": SIDE, "patches": {"share_whole": share}, **sections.pop("data", {})}
    return recipe_of(model, pictures, folder, data=data, **sections)


def sizes_of_steps(settings, num_sizes, count):
    order = PatchOrder(
        sizes=(None,) * num_sizes,
        shares=shares_of(settings.data.patches.share_whole, num_sizes),
        num_samples=6,
        growth=(),
        seed=settings.training.seed,
        run=settings.training.batch,
    )
    return order.size_numbers(range(0, count * settings.training.batch, settings.training.batch))


@pytest.mark.parametrize("family", ["stable diffusion", "class U-Net"])
def test_steps_on_whole_pictures_have_the_bits_of_the_plain_model(family, model, pictures, tmp_path):
    """Until the first patch, whose gradients give the coordinates weights that are not zero."""
    source = model if family == "stable diffusion" else save_class_pair(tmp_path / "model") / "base"
    sections = {"training": {"steps": 1, "clip_norm": "none"}, "validation": {"every": 1, "timesteps": [0.3]}}
    data = {"validation": str(pictures)}
    first = next(
        seed
        for seed in range(20)
        if sizes_of_steps(patched(source, pictures, tmp_path, training={"seed": seed}), 3, 1) == (0,)
    )
    sections["training"]["seed"] = first
    train_here(patched(source, pictures, tmp_path / "patches", data=data, **sections))
    train_here(recipe_of(source, pictures, tmp_path / "plain", data={"resolution": SIDE, **data}, **sections))
    assert losses_of(tmp_path / "patches") == losses_of(tmp_path / "plain")
    stored = "export/unet/diffusion_pytorch_model.safetensors"
    found, expected = (load_file(tmp_path / run / stored) for run in ("patches", "plain"))
    wide = found["conv_in.weight"]
    assert wide[:, -2:].abs().min() > 0
    found["conv_in.weight"] = wide[:, :-2]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_patches_train_validate_and_resume_on_two_stages_as_on_one_rank(model, pictures, tmp_path, crew):
    sections = {
        "data": {"validation": str(pictures), "random_crop": True, "flip": True},
        "validation": {"every": 3, "timesteps": [0.3]},
        "training": {"precision": "float64"},
    }
    one = patched(model, pictures, tmp_path / "one", **sections)
    assert set(sizes_of_steps(one, 2, 6)) == {0, 1}
    assert train_here(one) == 6
    half = {**sections, "training": {"precision": "float64", "steps": 3}}
    train_here(patched(model, pictures, tmp_path / "two", **half))
    two = patched(model, pictures, tmp_path / "two", pipeline={"microbatches": 4, "fill": True}, **sections)
    assert crew.run(train, two, "latest") == [6, 6]
    sides = [(SIDE, SIDE // 2)[number] for number in sizes_of_steps(one, 2, 6)]
    assert [row["patch"] for row in read_metrics(tmp_path / "two") if "patch" in row] == sides
    for key in ("loss", "validation_loss"):
        expected, found = losses_of(tmp_path / "one", key), losses_of(tmp_path / "two", key)
        assert found[6] == pytest.approx(expected[6], rel=1e-12)
    assert losses_of(tmp_path / "one")[5] == pytest.approx(losses_of(tmp_path / "two")[5], rel=1e-12)


def test_an_export_draws_whole_pictures_and_trains_on(model, pictures, tmp_path):
    drawn = {"every": 2, "steps": 2, "prompts": ["a"], "guidance": 2.0}
    train_here(patched(model, pictures, tmp_path / "run", training={"steps": 2}, sampling=drawn))
    export = tmp_path / "run" / "export"
    assert json.loads((export / "unet" / "config.json").read_text())["in_channels"] == 6
    assert "diffusionpipe sample" in (export / "README.md").read_text(encoding="utf-8")
    again = tmp_path / "again.png"
    words = ["sample", str(export), "--prompt", "a", "--steps", "2", "--guidance", "2.0", "--resolution", str(SIDE)]
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--device", "cpu", "--keep", str(tmp_path / "kept"), "--out", str(again)])
    assert ended.value.code == 0
    (kept,) = (tmp_path / "run" / "samples" / "step-00000002").glob("*.png")
    (found,) = (tmp_path / "kept").glob("*.png")
    assert np.array_equal(np.asarray(Image.open(found)), np.asarray(Image.open(kept)))
    weights = export / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    assert tensors["conv_in.weight"].shape[1] == 6
    tensors["conv_in.weight"][:, 4:] += 10
    save_file(tensors, weights)
    with pytest.raises(SystemExit):
        cli.main([*words, "--device", "cpu", "--keep", str(tmp_path / "other"), "--out", str(again)])
    (other,) = (tmp_path / "other").glob("*.png")
    assert not np.array_equal(np.asarray(Image.open(other)), np.asarray(Image.open(kept)))
    assert train_here(patched(export, pictures, tmp_path / "more", training={"steps": 1})) == 1
    with pytest.raises(ModelError, match=r"in_channels and out_channels .6, 4.*on patches.*data.patches"):
        train_here(recipe_of(export, pictures, tmp_path / "plain", data={"resolution": SIDE}))


@pytest.mark.parametrize(
    ("data", "others", "says"),
    [
        ({"frames": 5}, {}, "patches of clips are not supported; remove patches, or frames"),
        ({"height": 8}, {}, "they are cut from squares; remove height"),
        ({"resolution": [16, 8]}, {}, "they are cut from squares of one size; give one side in resolution alone"),
        ({"resolution": 18}, {}, "patches need a multiple of 4, not 18, and of 8 or more where .*; use e.g. 16"),
        ({"resolution": 34}, {}, "patches need a multiple of 4, not 34, .*; use e.g. 32"),
        (
            {"aspects": [0.5, 2.0], "enlarge": False},
            {},
            "give one side in resolution alone, and remove aspects, enlarge",
        ),
        ({"batching": "tokens"}, {}, "batching: all patches of a step have one size; remove batching, or patches"),
        ({"weigh": "tokens"}, {}, "weigh: all patches of a step have one size; remove weigh, or patches"),
        ({"multiple": 32}, {}, "multiple: only sizes of an area have it; remove multiple"),
        ({"frame_rate": 8}, {}, "frame_rate: only clips have frames; remove frame_rate"),
        (
            {},
            {"sampling": {"every": 1, "prompts": ["a"], "sizes": ["8x8"]}},
            "sampling.sizes: all pictures have one size; remove sizes",
        ),
        ({"masks": "edges"}, {}, "a model that fills holes reads no coordinates"),
        ({"loss_mask": "masks/{name}.png"}, {}, "masks of the loss belong to whole pictures"),
        ({}, {"objective": {"self_conditioning": 0.5}}, "estimates are read at one size alone"),
        ({}, {"lora": {"rank": 2}}, "adapters leave the first convolution as it is"),
        ({}, {"pipeline": {"versions": "stashed", "microbatches": 2}}, "training without a flush has one size"),
    ],
)
def test_keys_that_do_not_go_with_patches_are_refused(model, pictures, tmp_path, data, others, says):
    with pytest.raises(ValidationError, match=says):
        patched(model, pictures, tmp_path / "run", data=data, **others)


def test_a_model_with_absolute_positions_is_refused_by_name(pictures, tmp_path):
    dit = save_dit(tmp_path / "dit")
    able = "StableDiffusionPipeline, StableDiffusionXLPipeline, DDPMPipeline: remove patches"
    with pytest.raises(ModelError, match=rf"data.patches: the denoiser has absolute positions.* are {able}"):
        train_here(patched(dit, pictures, tmp_path / "run"))


def test_a_model_that_fills_holes_is_refused_without_a_word_of_masks(pictures, tmp_path):
    inpainting().save_pretrained(tmp_path / "model")
    says = r"data.patches: .* fills holes .unet: in_channels 9., and .* reads no coordinates; remove patches"
    with pytest.raises(ValidationError, match=says) as refused:
        patched(tmp_path / "model", pictures, tmp_path / "run")
    assert "data.masks" not in str(refused.value)
    with pytest.raises(RecipeError, match=says):
        check_masks(tmp_path / "model", is_masked=False, is_placed=True)


@pytest.mark.parametrize(
    ("family", "resolution", "says"),
    [
        ("class U-Net", 36, r"patches of 36 / 4 are 9 x 9 pixels: .*9 is not a multiple of 2; set it to 32 or 40$"),
        (
            "stable diffusion",
            18,
            r"patches of 18 / 2 are 9 x 9 pixels: .*9 is not a multiple of 2; set it to 16 or 24$",
        ),
        ("stable diffusion", 21, r"21 x 21 pixels: .*21 is not a multiple of 2; set it to 16 or 24$"),
    ],
)
def test_a_patch_that_does_not_fit_is_refused_with_resolutions_that_fit(family, resolution, says, model, tmp_path):
    source = model if family == "stable diffusion" else save_class_pair(tmp_path / "model") / "base"
    sizes = patch_sizes(resolution, is_encoded=family == "stable diffusion")
    with pytest.raises(ModelError, match=f"data.resolution: {says}"):
        build_graph(source, objective=ObjectiveSettings(), resolution=resolution, others=sizes[1:], is_placed=True)


def test_a_model_that_no_resolution_would_help_is_refused_by_its_own_fault(tmp_path):
    unet = tiny_class_unet(is_super=False)
    unet.register_to_config(num_class_embeds=None)
    DDPMPipeline(unet, DDPMScheduler()).save_pretrained(tmp_path / "model")
    others = patch_sizes(32, is_encoded=False)[1:]
    with pytest.raises(ModelError, match=r"model: unet: num_class_embeds is None; it must be ") as refused:
        build_graph(tmp_path / "model", objective=ObjectiveSettings(), resolution=32, others=others, is_placed=True)
    assert "resolution" not in str(refused.value)


def test_the_command_on_the_card_of_a_class_model_draws(pictures, tmp_path, monkeypatch):
    """As it stands on the card, in the folder that the card is in."""
    base = save_class_pair(tmp_path / "model") / "base"
    train_here(patched(base, pictures, tmp_path / "run", training={"steps": 1}, sampling={"steps": 2}))
    (row,) = (one for one in read_metrics(tmp_path / "run") if "loss" in one)
    assert row["patch"] in (SIDE, SIDE // 2, SIDE // 4)
    export = tmp_path / "run" / "export"
    card = (export / "README.md").read_text(encoding="utf-8")
    (command,) = (line for line in card.splitlines() if line.startswith("diffusionpipe sample"))
    monkeypatch.chdir(tmp_path)
    _, *words = shlex.split(command.replace("path/to/this/folder", str(export)))
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--device", "cpu"])
    assert ended.value.code == 0
    assert (tmp_path / "picture.png").is_file()


@pytest.mark.slow
def test_a_plan_prices_patches_by_their_shares_and_has_room_for_whole_pictures(model, pictures, tmp_path):
    share = 0.2
    settings = patched(model, pictures, tmp_path / "run", share=share)
    profile = make_profile_of(settings, load_cluster("rtx3090x2"), uses_cache=False)
    opened = build_model(settings, "cpu")
    graphs, models = opened.graph.of_sizes, (opened.model, *opened.others)
    assert [size.share for size in profile.sizes] == [share, 1 - share]
    alone = [
        analytic_profile(graph, own, device="rtx3090", precision="float32", batch_sizes=profile.batch_sizes)
        for graph, own in zip(graphs, models, strict=True)
    ]
    names = profile.graph.backbone_layers
    whole, half = (sum(own.forward(name, 2) + own.weight_grad(name, 2) for name in names) for own in alone)
    found = sum(profile.forward(name, 2) + profile.weight_grad(name, 2) for name in names)
    assert found == pytest.approx(share * whole + (1 - share) * half, rel=0.05)
    for name in names:
        assert profile.activation(name, 2) == alone[0].activation(name, 2)
    plan = plan_from_profile(profile, Layout(batch=4, stages=2, microbatches=2))
    of_each = [mean_step(at_size(profile, number), plan, run_of(settings), steps=1) for number in (0, 1)]
    assert run_of(settings) == 4
    assert mean_step(profile, plan, run_of(settings), steps=20) == pytest.approx(
        share * of_each[0] + (1 - share) * of_each[1], rel=0.01
    )
