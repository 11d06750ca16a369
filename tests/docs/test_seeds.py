"""The code of the documents that draws the same picture in diffusers."""

import re
from pathlib import Path

import diffusers
import numpy as np
import torch
from kit.tiny_runs import RESOLUTION, save_stable_diffusion

from diffusionpipe.models.opening.folder import scheduler_config
from diffusionpipe.trainer.inference.conditions import SampleRequest
from diffusionpipe.trainer.inference.denoise import SamplingSettings
from diffusionpipe.trainer.inference.folder_drawing import draw_from_folder

PAGE = Path(__file__).parents[2] / "docs" / "recipe.md"


def documented():
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "first_noise" in block]
    exec(code, names := {})
    return names["first_noise"]


def test_the_documented_noise_gives_diffusers_the_second_picture_of_sample(tmp_path):
    save_stable_diffusion(tmp_path / "sd")
    settings = SamplingSettings(steps=3, guidance=2.0, seed=7, scheduler=scheduler_config(tmp_path / "sd"))
    wish = SampleRequest(prompts=("a b", "c"))
    ours = draw_from_folder(tmp_path / "sd", wish, settings, resolution=RESOLUTION, device=torch.device("cpu"))[1]
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "sd", safety_checker=None)
    pipeline.set_progress_bar_config(disable=True)
    side = RESOLUTION // pipeline.vae_scale_factor
    latents = documented()(7, 1, (pipeline.unet.config.in_channels, side, side))
    drawn = pipeline(
        "c", latents=latents, height=RESOLUTION, width=RESOLUTION, num_inference_steps=3, guidance_scale=2.0,
        output_type="np", generator=torch.Generator().manual_seed(7),
    ).images[0]  # fmt: skip
    assert np.abs(np.round(drawn * 255) - np.asarray(ours).astype(float)).max() <= 1
