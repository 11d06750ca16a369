"""Trained weights in bfloat16, and Muon beside AdamW, on the digits at equal steps."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.recipes.digits import EXAMPLE, data_of, losses, trained
from benchmarks.recipes.prototypes import labelled, model_of

WAYS = {
    "float32": ("training.weights=float32",),
    "bfloat16, stochastic": ("training.weights=bfloat16",),
    "bfloat16, kahan": ("training.weights=bfloat16", "training.rounding=kahan"),
}
OPTIMIZERS = {
    "AdamW": (),
    "Muon, AdamW for the rest": (
        "optimizer.name=Muon",
        "optimizer.arguments={weight_decay = 0.01, adjust_lr_fn = 'match_rms_adamw'}",
        "optimizer.rest.name=AdamW",
        "optimizer.rest.arguments={weight_decay = 0.01}",
    ),
}


def weights(folder: Path, steps: int) -> list[str]:
    """The lines about ways to keep the weights: the share of drawn digits that are recognised, and the loss."""
    lines = []
    for name, own in WAYS.items():
        run = trained(folder, steps, "training.precision=bfloat16", *own)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        last = [row for row in rows if "validation_loss" in row][-1]
        share, count = recognised(run)
        lines.append(
            f"{name}: loss {last['validation_loss']:.5f} after {last['step']} steps, "
            f"{share:.1%} of {count} digits recognised"
        )
    return lines


def muon(folder: Path, steps: int) -> list[str]:
    """The lines about Muon and AdamW on a small DiT."""
    data, model = data_of(folder), model_of(folder / "dit")
    labelled(data)
    lines = []
    for name, own in OPTIMIZERS.items():
        found = losses(folder, steps, f"model.path={model}", *own)
        lines.append(f"{name}: loss {found[max(found)]:.5f} after {max(found)} steps")
    return lines


def recognised(run: Path, count: int = 1000) -> tuple[float, int]:
    """The share of digits that the run's export draws and the example's classifier reads, and their number."""
    command = [sys.executable, str(EXAMPLE / "score.py"), "--export", str(run / "export"), "--count", str(count)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    return float(found["recognised"]), count
