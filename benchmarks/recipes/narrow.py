"""Narrow exports of the digits: their bytes, their errors, and whether the classifier still reads what they draw."""

import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import numpy as np
import torch
from PIL import Image

from benchmarks.recipes.digits import EXAMPLE, data_of, trained
from diffusionpipe.models.opening.folder import scheduler_config
from diffusionpipe.models.parameters.exported_layers import Width
from diffusionpipe.trainer.inference.calibration import WatchedTimes
from diffusionpipe.trainer.inference.conditions import SampleRequest
from diffusionpipe.trainer.inference.denoise import SamplingSettings
from diffusionpipe.trainer.inference.drawing import PLAIN
from diffusionpipe.trainer.inference.folder_drawing import Source, draw_from_folder, open_source
from diffusionpipe.workflows.drawing.request import DrawingOptions
from diffusionpipe.workflows.exporting.narrow import narrow_export_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diffusionpipe.trainer.inference.cascade_drawing import OnStep

STEPS, SIDE, GUIDANCE = 20, 32, 1.5
PICTURES, HELD_OUT = 1000, 256
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Noisy held-out digits."""

    captions: tuple[str, ...]
    noisy: torch.Tensor
    """(N, channels, H, W)."""
    times: torch.Tensor
    """(N,)."""


def narrow(folder: Path, steps: int) -> list[str]:
    """The lines about narrow exports of a new run."""
    return narrow_lines(trained(folder, steps), data_of(folder), folder)


def narrow_lines(run: Path, data: Path, folder: Path, pictures: int = PICTURES) -> list[str]:
    """The lines about narrow exports of a run, which are written into `folder`."""
    export, points = run / "export", held_out(data, run / "export")
    truth = predictions(export, points)
    lines = [f"wide: {recognised(export, pictures):.1%} recognised"]
    for width in Width:
        found = exported(run, folder / width, width)
        lines.append(
            f"{width}: {recognised(folder / width, pictures):.1%} recognised, {found.narrow / found.numbers:.1%} of "
            f"{found.numbers:,} numbers narrow, {found.narrow_bytes / found.wide_bytes:.3f} of the bytes, error "
            f"{error(predictions(folder / width, points), truth):.4f}"
        )
    for times in (WatchedTimes.UNIFORM, WatchedTimes.ONE):
        exported(run, folder / times, Width.W8A8, times)
        lines.append(f"w8a8, ranges at {times} times: error {error(predictions(folder / times, points), truth):.4f}")
    return lines


def exported(run: Path, out: Path, width: Width, times: WatchedTimes = WatchedTimes.NORMAL) -> Any:
    """A narrow export of a run."""

    @contextmanager
    def no_work(_rank: int | None) -> "Iterator[OnStep]":
        yield lambda _done, _total: None

    return narrow_export_of(run, out, width, DrawingOptions(steps=STEPS, guidance=GUIDANCE), no_work, times=times)


def held_out(data: Path, export: Path) -> Points:
    """Held-out digits with noise at uniform times; 180 digits, some twice with other noise."""
    rows = [json.loads(line) for line in (data / "validation" / "metadata.jsonl").read_text("utf-8").splitlines()]
    rows = [rows[number % len(rows)] for number in range(HELD_OUT)]
    pixels = np.stack([np.asarray(Image.open(data / "validation" / row["file_name"]).convert("RGB")) for row in rows])
    vae: Any = diffusers.AutoencoderKL.from_pretrained(export / "vae")
    scheduler = diffusers.DDPMScheduler.from_pretrained(export / "scheduler")
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        values = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
        latents = vae.encode(values).latent_dist.mean * vae.config.scaling_factor
    times = torch.randint(0, 1000, (HELD_OUT,), generator=draws)
    noise = torch.randn(latents.shape, generator=draws)
    return Points(
        captions=tuple(row["text"] for row in rows), noisy=scheduler.add_noise(latents, noise, times), times=times
    )


def predictions(folder: Path, points: Points) -> torch.Tensor:
    """What a folder's denoiser says about the points."""
    settings = SamplingSettings(steps=STEPS, guidance=1.0, seed=0, scheduler=scheduler_config(folder))
    source = Source(folder=folder, resolution=SIDE)
    opened = open_source(source, SampleRequest(prompts=points.captions), settings)
    opened.store()
    with torch.no_grad():
        predict = opened.predictor(CPU, PLAIN)
        return predict.predicted({"noisy": points.noisy, "timesteps": points.times})


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The norm of the difference beside that of the truth."""
    return float((found - truth).norm() / truth.norm())


def recognised(folder: Path, pictures: int) -> float:
    """The share of drawn digits that the example's classifier takes for the digit of their caption."""
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    judge: Any = import_module("score")
    words: Any = import_module("dataset").WORDS
    captions = [f"a handwritten {words[number % len(words)]}" for number in range(pictures)]
    settings = SamplingSettings(steps=STEPS, guidance=GUIDANCE, seed=0, scheduler=scheduler_config(folder))
    drawn: list[Any] = draw_from_folder(
        folder, SampleRequest(prompts=tuple(captions)), settings, resolution=SIDE, device=CPU
    )
    return float(judge.score([Image.fromarray(picture) for picture in drawn], captions).recognised)
