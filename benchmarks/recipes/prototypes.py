"""ProtoDiffusion: a small DiT of the digits whose embeddings of classes are means of pictures."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel

from benchmarks.recipes.digits import EXAMPLE, data_of, losses, reached
from diffusionpipe.workflows.exporting.prototypes import write_prototypes

SIDE, WIDTH = 32, 64


def model_of(folder: Path) -> Path:
    """A DiT of ten classes over the example's autoencoder, with random weights."""
    transformer = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=WIDTH // 4,
        in_channels=4,
        num_layers=4,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    vae = AutoencoderKL.from_pretrained(EXAMPLE / "model" / "vae")
    scheduler = DDIMScheduler.from_pretrained(EXAMPLE / "model" / "scheduler")
    DiTPipeline(transformer=transformer, vae=vae, scheduler=scheduler).save_pretrained(folder)
    return folder


def labelled(data: Path) -> None:
    """Give each picture the digit of its caption as a label."""
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    dataset: Any = import_module("dataset")
    for file in data.glob("*/metadata.jsonl"):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        rows = [{**row, "label": dataset.digit_of_caption(row["text"])} for row in rows]
        file.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")


def prototypes(folder: Path, steps: int) -> list[str]:
    """The lines about prototypes."""
    data, model = data_of(folder), model_of(folder / "dit")
    labelled(data)
    file = folder / "prototypes.safetensors"
    write_prototypes(data / "train", str(model), file, resolution=SIDE, seed=0, device="cpu")
    of_dit = (f"model.path={model}",)
    plain = losses(folder, steps, *of_dit)
    final = plain[max(plain)]
    lines = [f"random embeddings: loss {final:.5f} after {max(plain)} steps"]
    for is_frozen in (True, False):
        more = (f"model.class_embeddings={file}", f"model.freeze_class_embeddings={str(is_frozen).lower()}")
        found = losses(folder, steps, *of_dit, *more)
        name = "frozen prototypes" if is_frozen else "trained prototypes"
        last = max(found)
        lines.append(f"{name}: loss {found[last]:.5f} after {last} steps, {final:.5f} by {reached(found, final)}")
    return lines
