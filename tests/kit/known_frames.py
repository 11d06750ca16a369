"""Clips from their first frame, drawn by us and by diffusers' pipeline: their differences in float32 or float64.

    python tests/kit/known_frames.py FOLDER PICTURE      in float64, as two numbers: transformer's inputs, frames

In float64 every float32 of torch is one, in our code, in diffusers' and in transformers'. So rounding is 1e-16, and a
greater difference is a fault. A process of its own, since modules keep the types with which they were imported.
"""

import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.wan import pipeline_wan_i2v
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from diffusionpipe.ir.size import Clip
from diffusionpipe.models.opening.folder import scheduler_config
from diffusionpipe.models.parts.masks import CHANNELS
from diffusionpipe.trainer.data.randomness import normal
from diffusionpipe.trainer.inference.conditions import SampleRequest
from diffusionpipe.trainer.inference.denoise import SamplingSettings
from diffusionpipe.trainer.inference.drawing import PLAIN
from diffusionpipe.trainer.inference.folder_drawing import Source, open_source
from diffusionpipe.trainer.inference.known_pixels import KnownPixels

CLIP = Clip(width=32, height=16, frames=5)
CPU = torch.device("cpu")
STEPS, SEED = 2, 5


def settings_of(folder: Path) -> SamplingSettings:
    """The settings with which both draw."""
    return SamplingSettings(steps=STEPS, guidance=2.0, seed=SEED, scheduler=scheduler_config(folder))


def by_diffusers(folder: Path, first: Path, **more: Any) -> tuple[NDArray[np.floating], Tensor]:
    """The clip that diffusers' pipeline draws with the same noise, and what its transformer reads first."""
    if not hasattr(pipeline_wan_i2v, "ftfy"):  # which it calls also where it is not installed
        pipeline_wan_i2v.ftfy = SimpleNamespace(fix_text=str)
    pipeline = diffusers.WanImageToVideoPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    read: list[Tensor] = []
    pipeline.transformer.register_forward_pre_hook(
        lambda module, arguments, keywords: read.append(keywords["hidden_states"]), with_kwargs=True
    )
    noise = normal(seed=SEED, purpose="sampling", step=0, positions=(0,), shape=(4, 3, 4, 8))
    drawn = pipeline(
        image=Image.open(first),
        prompt="a cat",
        latents=noise,
        num_inference_steps=STEPS,
        height=CLIP.height,
        width=CLIP.width,
        num_frames=CLIP.frames,
        guidance_scale=2.0,
        output_type="np",
        **more,
    ).frames
    return drawn, read[0][:1, 4:]


def differences(folder: Path, first: Path) -> tuple[float, float]:
    """The largest one in the transformer's inputs, and the largest one in frames of values in [0, 1]."""
    wish, settings = SampleRequest(prompts=("a cat",), known=(KnownPixels(first),)), settings_of(folder)
    opened = open_source(Source(folder=folder, resolution=CLIP.width, clip=CLIP), wish, settings)
    own = {key: value.to(torch.float32) if value.is_floating_point() else value for key, value in opened.raw.items()}
    opened = replace(opened, raw=own)
    ours = opened.conditions(CPU, PLAIN)[CHANNELS][:1]
    again = open_source(opened.source, wish, settings)
    again = replace(again, raw=own)
    drawn = again.latents(again.predictor(CPU, PLAIN), settings, 1, CPU)
    theirs, read = by_diffusers(folder, first)
    assert ours.shape == read.shape
    assert ours.dtype == read.dtype == drawn.dtype == torch.from_numpy(theirs).dtype == torch.float32
    return float((ours - read).abs().max()), float(abs(drawn.numpy() - theirs).max())


def main(folder: Path, first: Path) -> None:
    """Writes the differences in float64."""
    pipeline = diffusers.WanImageToVideoPipeline.from_pretrained(folder)
    with TemporaryDirectory() as place:
        for part in (pipeline.vae, pipeline.text_encoder, pipeline.transformer):
            part.double()
        pipeline.save_pretrained(place)
        torch.set_default_dtype(torch.float64)
        torch.Tensor.float = torch.Tensor.double
        torch.float32 = torch.float64
        VaeImageProcessor.pil_to_numpy = staticmethod(lambda images: np.stack([np.array(one) for one in images]) / 255)
        sys.stdout.write("{} {}\n".format(*differences(Path(place), first)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
