"""Adapters on a base in bfloat16 and in nf4: a U-Net of the digits, of which four fifths are linear layers."""

import json
import shutil
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel

from benchmarks.recipes.digits import EXAMPLE, trained
from benchmarks.recipes.weights import recognised

FORMS = ("bfloat16", "nf4")
DEPTH = 8
"""Transformer layers of each attention: more linear layers beside the same convolutions."""
PICTURES = 200


def deep_model(folder: Path) -> Path:
    """A copy of the example's folder with a deeper U-Net, which has no weights."""
    shutil.copytree(EXAMPLE / "model", folder)
    path = folder / "unet" / "config.json"
    changes = {"layers_per_block": 1, "transformer_layers_per_block": DEPTH, "use_linear_projection": True}
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    return folder


def linear_share(folder: Path) -> float:
    """The share of the U-Net's numbers in weights of linear layers, which frozen bases store in nf4."""
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(folder / "unet"))
    linear: int = sum(one.weight.numel() for one in unet.modules() if isinstance(one, torch.nn.Linear))
    total: int = sum(parameter.numel() for parameter in unet.parameters())
    return linear / total


def adapters(folder: Path, steps: int) -> list[str]:
    """The lines about adapters: the share of drawn digits that are recognised, by the form of the base."""
    model = deep_model(folder / "deep")
    own = ("training.batch=32", "training.precision=bfloat16", f"validation.every={steps}")
    base = trained(folder, steps, *own, f"model.path={model}")
    share, count = recognised(base, PICTURES)
    linear = f"{linear_share(model):.1%} of the numbers of its U-Net in linear layers"
    lines = [f"base: {share:.1%} of {count} digits recognised, {linear}"]
    for form in FORMS:
        based = (f"model.path={base / 'export'}", "model.from_scratch=false", f"model.frozen_dtype={form}")
        run = trained(folder, steps, *own, *based, "lora.rank=16", "lora.merge=true")
        share, count = recognised(run, PICTURES)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        last = [row for row in rows if "validation_loss" in row][-1]
        lines.append(
            f"adapters on {form}: loss {last['validation_loss']:.5f} after {last['step']} steps, "
            f"{share:.1%} of {count} digits recognised"
        )
    return lines
