"""Holes of pictures, filled: what the denoiser reads and draws is what diffusers' own pipelines read and draw."""

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from kit.tiny_models import randomise_pipeline
from kit.tiny_pipelines import FILLING
from PIL import Image

from diffusionpipe.errors import RecipeError
from diffusionpipe.models.opening.folder import scheduler_config
from diffusionpipe.models.parts.masks import CHANNELS
from diffusionpipe.trainer.data.randomness import normal
from diffusionpipe.trainer.inference.conditions import SampleRequest
from diffusionpipe.trainer.inference.denoise import SamplingSettings
from diffusionpipe.trainer.inference.drawing import PLAIN
from diffusionpipe.trainer.inference.folder_drawing import Source, draw_from_folder, latents_from_folder, open_source
from diffusionpipe.trainer.inference.known_pixels import KnownPixels

pytestmark = pytest.mark.usefixtures("one_thread", "one_trace")
SIDE, STEPS, SEED = 16, 3, 5
CPU = torch.device("cpu")


def save_known(folder, side=SIDE, hole=(5, 2, 14, 11)):
    """A random picture and a mask with a box of odd borders."""
    folder.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    mask = np.zeros((side, side), dtype=np.uint8)
    left, top, right, bottom = hole
    mask[top:bottom, left:right] = 255
    Image.fromarray(values).save(folder / "picture.png")
    Image.fromarray(mask).save(folder / "mask.png")
    return KnownPixels(folder / "picture.png", folder / "mask.png"), values, mask == 255


@pytest.fixture(scope="module", params=FILLING)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    pipeline = FILLING[request.param]()
    randomise_pipeline(pipeline)
    pipeline.save_pretrained(folder)
    return request.param, folder


def settings_of(kind, folder):
    is_flux = kind == "flux fill"
    return SamplingSettings(
        steps=STEPS,
        guidance=1.0 if is_flux else 2.0,
        seed=SEED,
        scheduler=scheduler_config(folder),
        embedded_guidance=30.0 if is_flux else None,
    )


def by_diffusers(kind, folder, known, settings, monkeypatch):
    """The latents that diffusers' pipeline draws with the same noise, and what its denoiser reads first."""
    pipeline = getattr(diffusers, type(FILLING[kind]()).__name__).from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    denoiser = pipeline.transformer if kind == "flux fill" else pipeline.unet
    read = []

    def watch(module, arguments, keywords):
        read.append(keywords["hidden_states"] if "hidden_states" in keywords else arguments[0])

    denoiser.register_forward_pre_hook(watch, with_kwargs=True)
    shape = (4, SIDE // 2, SIDE // 2)
    noise = {
        name: normal(seed=SEED, purpose=name, step=0, positions=(0,), shape=shape) for name in ("sampling", "masked")
    }
    monkeypatch.setattr(
        DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mean + self.std * noise["masked"]
    )
    latents = noise["sampling"]
    if kind == "flux fill":
        latents = pipeline._pack_latents(latents, 1, *shape)
    drawn = pipeline(
        prompt="a cat",
        image=Image.open(known.picture),
        mask_image=Image.open(known.mask),
        latents=latents,
        num_inference_steps=STEPS,
        height=SIDE,
        width=SIDE,
        guidance_scale=30.0 if kind == "flux fill" else settings.guidance,
        output_type="latent",
        **({"max_sequence_length": 512} if kind == "flux fill" else {"strength": 1.0}),
    ).images
    if kind == "flux fill":
        drawn = drawn.view(1, 8 // 2, 8 // 2, 4, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(1, *shape)
    return drawn, read[0][-1:]


def test_the_denoiser_reads_and_draws_what_diffusers_pipeline_does(saved, tmp_path, monkeypatch):
    kind, folder = saved
    known, _, _ = save_known(tmp_path)
    settings = settings_of(kind, folder)
    wish = SampleRequest(prompts=("a cat",), known=(known,))
    source = Source(folder=folder, resolution=SIDE)
    ours = open_source(source, wish, settings).conditions(CPU, PLAIN)[CHANNELS][-1:]
    drawn = latents_from_folder(source, wish, settings, device=CPU)
    theirs, read = by_diffusers(kind, folder, known, settings, monkeypatch)
    if kind == "flux fill":
        tokens = read[..., 16:]  # (1, T, 32)
        read = tokens.view(1, 4, 4, 8, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(1, 8, 8, 8)
    else:
        read = read[:, 4:]
    assert ours.shape == read.shape
    assert (ours - read).abs().max() < 1e-5
    assert (drawn - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_known_pixels_come_back_bit_for_bit_and_the_hole_does_not(saved, tmp_path):
    kind, folder = saved
    known, values, hole = save_known(tmp_path)
    wish = SampleRequest(prompts=("a cat", "dog"), known=(known, known))
    drawn = draw_from_folder(folder, wish, settings_of(kind, folder), resolution=SIDE, device=CPU)
    for picture in drawn:
        assert np.array_equal(picture[~hole], values[~hole])
        assert (picture[hole] != values[hole]).mean() > 0.5


def test_a_model_that_fills_holes_wants_pictures_and_no_other_does(saved, tmp_path):
    kind, folder = saved
    with pytest.raises(RecipeError, match="fills holes of pictures: give --image and --mask to sample"):
        open_source(Source(folder=folder, resolution=SIDE), SampleRequest(prompts=("a",)), settings_of(kind, folder))
