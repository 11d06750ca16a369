"""Holes of pictures: the demo's weights learn to draw the right half of a digit from its left half."""

import json
import shutil
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from PIL import Image

from benchmarks.recipes.digits import EXAMPLE, data_of, trained
from diffusionpipe.models.opening.folder import scheduler_config
from diffusionpipe.trainer.inference.conditions import SampleRequest
from diffusionpipe.trainer.inference.denoise import SamplingSettings
from diffusionpipe.trainer.inference.folder_drawing import draw_from_folder
from diffusionpipe.trainer.inference.known_pixels import KnownPixels

STEPS = 20
SIDE = 32


def widened(export: Path, folder: Path) -> Path:
    """A copy of the folder whose U-Net reads five more channels, with weights of zero."""
    shutil.copytree(export, folder)
    unet = UNet2DConditionModel.from_pretrained(folder / "unet")
    weights = dict(unet.state_dict())
    old = weights["conv_in.weight"]
    weights["conv_in.weight"] = torch.cat([old, old.new_zeros(len(old), 5, *old.shape[2:])], dim=1)
    wide = UNet2DConditionModel.from_config({**unet.config, "in_channels": 9})
    wide.load_state_dict(weights)
    shutil.rmtree(folder / "unet")
    wide.save_pretrained(folder / "unet")
    return folder


def right_halves(data: Path, folder: Path) -> Path:
    """A mask for each picture of the digits: its right half is the hole."""
    folder.mkdir()
    mask = Image.new("L", (SIDE, SIDE), 0)
    mask.paste(255, (SIDE // 2, 0, SIDE, SIDE))
    for path in data.glob("*/*.png"):
        mask.save(folder / path.name)
    return folder


def masks(folder: Path, steps: int) -> list[str]:
    """The lines about holes."""
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    judge: Any = import_module("score")
    data = data_of(folder)
    base = trained(folder, steps)
    model = widened(base / "export", folder / "wide")
    holes = right_halves(data, folder / "masks")
    masked = ("data.masks=file", f"data.mask_file={holes / '{name}.png'}")
    run = trained(folder, steps, f"model.path={model}", "model.from_scratch=false", *masked)
    rows = [json.loads(line) for line in (data / "validation" / "metadata.jsonl").read_text("utf-8").splitlines()]
    captions = [row["text"] for row in rows]
    files = [data / "validation" / row["file_name"] for row in rows]
    known = [KnownPixels(path, holes / path.name) for path in files]
    whole = [Image.open(path).convert("RGB") for path in files]
    grey = [picture.copy() for picture in whole]
    for picture in grey:
        picture.paste((128, 128, 128), (SIDE // 2, 0, SIDE, SIDE))
    shown = {
        "whole digits": whole,
        "right halves left grey": grey,
        "right halves drawn without a caption": _drawn(run, known, [""] * len(known), guidance=1.0),
        "right halves drawn with the caption": _drawn(run, known, captions, guidance=1.5),
    }
    return [f"{name}: {judge.score(some, captions).recognised:.1%} recognised" for name, some in shown.items()]


def _drawn(run: Path, known: Sequence[KnownPixels], captions: Sequence[str], *, guidance: float) -> list[Image.Image]:
    """The digits with their right halves drawn."""
    settings = SamplingSettings(steps=STEPS, guidance=guidance, seed=0, scheduler=scheduler_config(run / "export"))
    wish = SampleRequest(prompts=tuple(captions), known=tuple(known))
    pictures = draw_from_folder(run / "export", wish, settings, resolution=SIDE, device=torch.device("cpu"))
    return [Image.fromarray(picture) for picture in pictures]
