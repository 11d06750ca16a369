"""Runs of models that fill holes of pictures, from the recipe to the export and back."""

import re
import subprocess
import sys

import diffusers
import numpy as np
import pytest
from kit.tiny_clips import save_clips
from kit.tiny_described import save_described
from kit.tiny_models import FILLING_UNET, randomise_pipeline, tiny_unet
from kit.tiny_pipelines import FILLING
from kit.tiny_runs import losses_of, recipe_of, save_pictures, save_stable_diffusion, train, train_here
from PIL import Image
from pydantic import ValidationError

from diffusionpipe import cli
from diffusionpipe.errors import DataError, RecipeError
from diffusionpipe.trainer.inference.sample_file import read_origin
from diffusionpipe.trainer.model.members import check_masks
from diffusionpipe.trainer.recipe import recipe_to_toml

pytestmark = pytest.mark.usefixtures("one_thread")
SIDE = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder of plain Stable Diffusion whose U-Net has nine channels: they decide, not the pipeline's name."""
    folder = save_stable_diffusion(tmp_path_factory.mktemp("model") / "sd")
    unet = tiny_unet(**FILLING_UNET)
    unet.save_pretrained(folder / "unet")
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Pictures with captions and, beside them, masks: the right half is the hole."""
    folder = save_pictures(tmp_path_factory.mktemp("data") / "pictures", count=6, resolution=SIDE)
    masks = folder.parent / "masks"
    masks.mkdir()
    levels = np.zeros((SIDE, SIDE), dtype=np.uint8)
    levels[:, SIDE // 2 :] = 255
    for path in folder.glob("*.png"):
        Image.fromarray(levels).save(masks / path.name)
    return folder


def known_of(pictures):
    return {"images": str(pictures / "000.png"), "masks": str(pictures.parent / "masks" / "000.png")}


def command(*words):
    """The exit status of our command."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    return ended.value.code


def filling(model, pictures, folder, **sections):
    data = {"masks": "edges", "random_crop": True, "flip": True, **sections.pop("data", {})}
    return recipe_of(model, pictures, folder, data=data, **sections)


def test_a_run_fills_holes_of_files_and_its_export_draws_in_diffusers(model, pictures, tmp_path):
    sampling = {"every": 2, "prompts": ["a cat", "b"], "steps": 2, "guidance": 2.0, **known_of(pictures)}
    data = {"masks": "file", "mask_file": str(pictures.parent / "masks" / "{name}.png")}
    recipe = filling(model, pictures, tmp_path / "run", data=data, training={"steps": 2}, sampling=sampling)
    assert train_here(recipe) == 2
    original = np.asarray(Image.open(pictures / "000.png"))
    kept = sorted((tmp_path / "run" / "samples" / "step-00000002").glob("*.png"))
    assert len(kept) == 2
    for file in kept:
        drawn = np.asarray(Image.open(file))
        assert np.array_equal(drawn[:, : SIDE // 2], original[:, : SIDE // 2])
        assert not np.array_equal(drawn[:, SIDE // 2 :], original[:, SIDE // 2 :])
    origin = read_origin(kept[0])
    assert (origin.image, origin.mask) == tuple(known_of(pictures).values())
    export = tmp_path / "run" / "export"
    assert "StableDiffusionInpaintPipeline" in (export / "README.md").read_text(encoding="utf-8")
    pipeline = diffusers.StableDiffusionInpaintPipeline.from_pretrained(export)
    assert pipeline.unet.config.in_channels == 9
    again = tmp_path / "again.png"
    assert command("sample", tmp_path / "run", "--like", kept[1], "--out", again, "--device", "cpu") == 0
    assert np.array_equal(np.asarray(Image.open(again)), np.asarray(Image.open(kept[1])))


def test_sample_fills_a_hole_on_the_command_line(model, pictures, tmp_path, capsys):
    known = known_of(pictures)
    words = ["sample", model, "--prompt", "a", "--steps", 1, "--resolution", SIDE, "--device", "cpu"]
    words += ["--out", tmp_path / "grid.png", "--keep", tmp_path / "kept"]
    assert command(*words, "--image", known["images"], "--mask", known["masks"], "--count", 2) == 0
    for file in (tmp_path / "kept").glob("*.png"):
        drawn, original = np.asarray(Image.open(file)), np.asarray(Image.open(known["images"]))
        assert np.array_equal(drawn[:, : SIDE // 2], original[:, : SIDE // 2])
    capsys.readouterr()
    grey = tmp_path / "grey.png"
    Image.fromarray(np.full((SIDE, SIDE), 100, dtype=np.uint8)).save(grey)
    for more, says in (
        ([], "fills holes of pictures: give --image and --mask to sample"),
        (["--image", known["images"]], "a picture without a mask has no hole to fill; give --mask too"),
        (["--image", known["images"], "--mask", tmp_path / "no.png"], "there is no file"),
        (["--image", known["images"], "--mask", grey], "64 grey pixels, e.g. of level 100"),
    ):
        assert command(*words, *more) == 2
        assert says in " ".join(capsys.readouterr().err.split())


def test_masks_and_channels_that_do_not_fit_are_refused(model, pictures, tmp_path):
    plain = save_stable_diffusion(tmp_path / "plain")
    says = r"data.masks: .*reads no masks .unet: in_channels 4.; use a folder of Stable"
    with pytest.raises(ValidationError, match=says):
        filling(plain, pictures, tmp_path / "run")
    with pytest.raises(RecipeError, match=says):
        check_masks(plain, is_masked=True, is_placed=False)
    with pytest.raises(
        ValidationError, match=r"fills holes of pictures .unet: in_channels 9.; set it to .edges., .boxes."
    ):
        recipe_of(model, pictures, tmp_path / "run")


def test_masks_that_do_not_fit_are_refused_before_a_model_library_is_imported(model, pictures, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(recipe_to_toml(filling(model, pictures, tmp_path / "run")).replace('masks = "edges"', ""))
    program = f"""
import sys
from diffusionpipe.errors import RecipeError
from diffusionpipe.trainer.recipe import load_recipe
try:
    load_recipe({str(recipe)!r})
except RecipeError as error:
    print(error, "diffusers" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert re.search(r"data.masks: .* fills holes of pictures .unet: in_channels 9.; set it to .* False$", run.stdout)


def test_every_missing_or_wrong_mask_is_named_before_the_training(model, pictures, tmp_path):
    masks = tmp_path / "masks"
    masks.mkdir()
    for number in (0, 3):
        levels = np.full((SIDE, SIDE), 255 * (number == 3), dtype=np.uint8)
        levels[0, 0] = 255
        Image.fromarray(levels).save(masks / f"{number:03d}.png")
    recipe = filling(model, pictures, tmp_path / "run", data={"masks": "file", "mask_file": str(masks / "{name}.png")})
    with pytest.raises(DataError) as error:
        train_here(recipe)
    text = str(error.value)
    assert all(
        f"{number:03d}.png: its mask {masks / f'{number:03d}.png'} is missing" in text for number in (1, 2, 4, 5)
    )
    assert "003.png: the mask has no known pixels" in text
    assert "000.png: " not in text


@pytest.mark.slow
def test_a_run_resumes_with_the_masks_that_it_would_have_had(model, pictures, tmp_path):
    whole = filling(model, pictures, tmp_path / "whole", training={"steps": 4}, checkpoint={"every": 2})
    assert train_here(whole) == 4
    (tmp_path / "whole").rename(tmp_path / "half")
    losses = losses_of(tmp_path / "half")
    again = filling(model, pictures, tmp_path / "half", training={"steps": 4}, checkpoint={"every": 2})
    assert train_here(again, "2") == 4
    assert losses_of(tmp_path / "half") == losses
    inverted = filling(model, pictures, tmp_path / "boxes", data={"masks": "boxes"}, training={"steps": 1})
    train_here(inverted)
    assert losses_of(tmp_path / "boxes")[1] != losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*FILLING, "WanImageToVideoPipeline"])
def test_two_stages_learn_what_one_process_learns(kind, crew, pictures, tmp_path):
    own, keys = pictures, {}
    if kind in FILLING:
        pipeline = FILLING[kind]()
        randomise_pipeline(pipeline)
        pipeline.save_pretrained(tmp_path / "model")
    else:
        save_described(kind, tmp_path / "model")
        own = save_clips(tmp_path / "clips", 4, frames=8, width=32, height=16)
        keys = {"resolution": 32, "height": 16, "frames": 5}

    def recipe(name, **more):
        return filling(tmp_path / "model", own, tmp_path / name, data=keys, training={"steps": 2}, **more)

    filled = {"pipeline": {"fill": True, "stages": 2, "microbatches": 2, "schedule": "1f1b"}}
    assert crew.run(train, recipe("over-two")) == [2, 2]
    assert crew.run(train, recipe("filled", **filled)) == [2, 2]
    assert train_here(recipe("in-one")) == 2
    in_one = losses_of(tmp_path / "in-one")
    assert losses_of(tmp_path / "over-two") == pytest.approx(in_one, rel=1e-5)
    assert losses_of(tmp_path / "filled") == pytest.approx(in_one, rel=1e-5)
    adapted = recipe("adapted", lora={"rank": 2}, pipeline={"stages": 2})
    assert crew.run(train, adapted) == [2, 2]
    assert train_here(replace_folder(adapted, tmp_path / "adapted-in-one")) == 2
    assert losses_of(tmp_path / "adapted") == pytest.approx(losses_of(tmp_path / "adapted-in-one"), rel=1e-5)
    opened = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "model")
    opened.load_lora_weights(str(tmp_path / "adapted" / "export"))


def replace_folder(recipe, folder):
    """The recipe on one rank, in another folder."""
    run = recipe.run.model_copy(update={"folder": folder})
    pipeline = recipe.pipeline.model_copy(update={"stages": 1})
    return recipe.model_copy(update={"run": run, "pipeline": pipeline})
