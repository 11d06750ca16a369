"""Masks that cannot be used are named in one sentence before weights are read: no weights here can be."""

import numpy as np
import pytest
from kit.tiny_described import save_described
from kit.tiny_models import FILLING_UNET, tiny_unet
from kit.tiny_runs import recipe_of, save_pictures, save_stable_diffusion, train_here
from PIL import Image
from pydantic import ValidationError

from diffusionpipe import cli
from diffusionpipe.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")
SIDE = 8


def without_weights(folder):
    """The folder, whose weights are no weights."""
    for path in folder.glob("*/*.safetensors"):
        path.write_bytes(b"no weights")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Stable Diffusion of nine channels."""
    folder = save_stable_diffusion(tmp_path_factory.mktemp("model") / "sd")
    tiny_unet(**FILLING_UNET).save_pretrained(folder / "unet")
    return without_weights(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A Stable Diffusion of four channels."""
    return without_weights(save_stable_diffusion(tmp_path_factory.mktemp("model") / "plain"))


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    """A Wan from known frames."""
    return without_weights(save_described("WanImageToVideoPipeline", tmp_path_factory.mktemp("wan")))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Pictures, and beside them a good mask and bad ones."""
    folder = save_pictures(tmp_path_factory.mktemp("data") / "pictures", count=2, resolution=SIDE)
    for name, (shape, level, corner) in MASKS.items():
        levels = np.full(shape, level, dtype=np.uint8)
        levels[0, 0] = corner
        Image.fromarray(levels).save(folder.parent / f"{name}.png")
    return folder


MASKS = {
    "good": ((SIDE, SIDE), 0, 255),
    "no hole": ((SIDE, SIDE), 0, 0),
    "no known": ((SIDE, SIDE), 255, 255),
    "small": ((SIDE, SIDE // 2), 0, 255),
    "grey": ((SIDE, SIDE), 0, 100),
}
"""Shape and level of a mask, and the level of its first pixel."""
BAD = {
    "no hole": "no hole.png: the mask has no hole; make the pixels that a model shall draw white",
    "no known": "no known.png: the mask has no known pixels; make the pixels that shall stay black",
    "small": "small.png: the mask has 4 x 8 pixels and its picture 8 x 8; make it as large",
    "grey": "grey.png: the mask has 1 grey pixels, e.g. of level 100; a mask has levels 0 (known) and 255 (hole) "
    "alone: set levels from 128 on to 255 and others to 0",
}


def refusal_of(train):
    """The lines of the error of a training."""
    with pytest.raises((ConfigError, ValidationError)) as error:
        train()
    found = error.value
    return [one["msg"] for one in found.errors()] if isinstance(found, ValidationError) else str(found).splitlines()


@pytest.mark.parametrize("name", BAD)
def test_a_bad_mask_of_the_data_is_named_before_weights_are_read(name, model, pictures, tmp_path):
    masks = tmp_path / "masks"
    masks.mkdir()
    for path, own in zip(sorted(pictures.glob("*.png")), ("good", name), strict=True):
        (masks / path.name).write_bytes((pictures.parent / f"{own}.png").read_bytes())
    data = {"masks": "file", "mask_file": str(masks / "{name}.png")}
    (line,) = refusal_of(lambda: train_here(recipe_of(model, pictures, tmp_path / "run", data=data)))
    assert line == f"{masks}/{BAD[name].replace(name, '001', 1)}"


def test_all_missing_masks_are_listed_before_weights_are_read(model, pictures, tmp_path):
    data = {"masks": "file", "mask_file": str(tmp_path / "{name}.png")}
    lines = refusal_of(lambda: train_here(recipe_of(model, pictures, tmp_path / "run", data=data)))
    assert lines == [f"{pictures / name}: its mask {tmp_path / name} is missing" for name in ("000.png", "001.png")]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_mask_of_samples_is_named_before_weights_are_read(name, model, pictures, tmp_path, capsys):
    picture, mask = pictures / "000.png", pictures.parent / f"{name}.png"
    sampling = {"every": 2, "prompts": ["a"], "images": str(picture), "masks": str(mask)}
    run = recipe_of(model, pictures, tmp_path / "run", data={"masks": "edges"}, sampling=sampling)
    (line,) = refusal_of(lambda: train_here(run))
    assert line == f"{pictures.parent}/{BAD[name]}"
    assert BAD[name] in said(capsys, model, "--image", picture, "--mask", mask)


def said(capsys, model, *words):
    """What `sample` says where it refuses."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in ("sample", model, "--prompt", "a", "--resolution", SIDE, *words)])
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_pictures_and_masks_that_do_not_belong_to_a_model_are_refused(model, plain, wan, pictures, tmp_path):
    picture = str(pictures / "000.png")
    drawn = {"every": 2, "prompts": ["a"]}
    clip = {"resolution": 32, "height": 16, "frames": 5}
    cases = (
        (plain, {"data": {"masks": "edges"}}, "data.masks: {} reads no masks (unet: in_channels 4); use a folder of"),
        (model, {}, "data.masks: {} fills holes of pictures (unet: in_channels 9); set it to"),
        (wan, {"data": clip}, "data.masks: {} fills holes of clips (transformer: in_channels 10); set it to"),
        (plain, {"sampling": drawn | {"images": picture}}, "sampling.images: models that fill holes read them; remove"),
        (model, {"data": {"masks": "boxes"}, "sampling": drawn}, "sampling.images: the model fills holes; name a"),
        (
            model,
            {"data": {"masks": "boxes"}, "sampling": drawn | {"images": picture}},
            "sampling.masks: a picture without a mask has no hole to fill; name the masks of images",
        ),
        (wan, {"data": clip | {"masks": "first"}, "sampling": drawn}, "sampling.images: clips are drawn from their"),
        (
            wan,
            {"data": clip | {"masks": "file", "mask_file": "{name}.png"}},
            "masks: holes of clips are not read from files; set masks to",
        ),
        (wan, {"data": {"masks": "first"}}, 'masks: "first" is the first frame of a clip; set frames'),
    )
    for folder, sections, says in cases:
        (line,) = refusal_of(lambda: recipe_of(folder, pictures, tmp_path / "run", **sections))  # noqa: B023
        assert says.format(folder) in line


@pytest.mark.slow
def test_sample_refuses_pictures_and_masks_that_do_not_belong_to_a_model(model, plain, wan, pictures, capsys):
    picture, mask = str(pictures / "000.png"), str(pictures.parent / "good.png")
    for folder, words, says in (
        (model, (), "fills holes of pictures: give --image and --mask to sample"),
        (model, ("--image", picture), "a picture without a mask has no hole to fill; give --mask too, in a run"),
        (model, ("--image", picture, "--mask", picture + "0"), "there is no file"),
        (plain, ("--image", picture, "--mask", mask), "fills no holes of pictures; leave out pictures and masks"),
        (wan, ("--frames", 5), "draws clips from their first frames: give --image to sample"),
        (wan, ("--image", picture), "give --mask too, or --frames for a clip from its first frame"),
    ):
        assert says in said(capsys, folder, *words)
