"""What is mutated: one honest input of every kind, and what a mutated one is."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from kit.old_checkpoints import save_by_torch
from kit.tiny_clips import CODECS, grey_frames, write_clip
from kit.tiny_runs import save_pictures, save_stable_diffusion

from diffusionpipe.trainer.checkpoints.checkpoint import save

FILES = Path(__file__).parents[1] / "files"
HALF = {"forward": 2, "input_grad": 1.5, "weight_grad": 1, "activation": 2, "kept_after_input_grad": 1}
INSTANCE = {
    "ranks": 2, "microbatches": 4, "placement": "any", "stages": [HALF] * 4, "comm": 0.5, "memory_limit": [9, 9],
    "objective": "makespan", "seconds": 0.05,
}  # fmt: skip
RECIPE = """[model]
path = "{model}"
train = ["unet"]

[objective]
kind = "auto"
snr_gamma = 5.0

[data]
train = "{data}"
validation = "{data}"
resolution = 16
caption_dropout = 0.1
random_crop = true
flip = false
workers = 0

[training]
steps = 6
batch = 4
seed = 0
clip_norm = 1.0
ema_decay = 0.9
precision = "float32"
activation_checkpointing = ["unet.down*"]

[optimizer]
name = "AdamW"
learning_rate = 2e-3
arguments = {{ weight_decay = 0.01, betas = [0.9, 0.99] }}

[learning_rate]
schedule = "cosine"
warmup_steps = 2

[lora]
rank = 4
alpha = 2.0

[pipeline]
stages = 2
replicas = [1, 1]
data_parallel = 1
schedule = "1f1b"
microbatches = 2
encode_chunk = 2
fill = false
sharded = false
offload_frozen = false

[validation]
every = 3
samples = 4
timesteps = [0.25, 0.5]

[sampling]
every = 3
prompts = ["abc", "d"]
negative_prompt = "x"
steps = 2
guidance = 1.5
scheduler = "DDIMScheduler"
seed = 3

[checkpoint]
every = 2
keep = 2

[run]
folder = "{run}"
trackers = []
"""
KEYS = tuple(
    f"{section.split(']')[0]}.{line.split(' =')[0]}"
    for section in RECIPE.split("[")[1:]
    for line in section.split("\n")[1:]
    if " = " in line and not line.startswith(" ")
)
RUN_FILES = {
    "metrics.jsonl": "".join(json.dumps({"step": step, "loss": 0.5, "step_s": 0.1}) + "\n" for step in range(1, 5)),
    "skipped.jsonl": json.dumps({"step": 0, "position": 1, "skipped": "a.png", "instead": "b.png", "reason": "x"})
    + "\n",
    "run.lock": json.dumps({"host": "h", "pid": 1, "machine": "m/1", "started": 0.0}) + "\n",
}
"""What a run leaves beside its checkpoints, as text."""


_STATE = {"step": 1, "seed": 0, "past_values": {"loss": [0.5, 0.25], "gradient_norm": [1.0]}}


@dataclass(frozen=True)
class Case:
    """One mutated input."""

    act: Callable[[], object]
    names: tuple[str, ...] = ()
    """A refusal has one of them in its text: the file, or the option."""


@dataclass(frozen=True)
class Originals:
    """What is mutated; `folder` holds it."""

    folder: Path
    model: Path
    data: Path
    run: Path
    """A run's folder with one checkpoint."""
    old: Path
    """A run's folder with a checkpoint in the form of before."""
    recipe: str

    def copy(self, name: str, to: Path) -> Path:
        """A copy of the file or folder; large files are shared."""
        source = self.folder / name
        return Path(shutil.copytree(source, to / name, copy_function=os.link))


Kind = Callable[[Originals, Random, Path], Case]


def make_originals(folder: Path) -> Originals:
    """Honest inputs."""
    model = save_stable_diffusion(folder / "model")
    data = save_pictures(folder / "data", count=4)
    _save_further_pictures(data)
    (folder / "clips").mkdir()
    for ending, codec in CODECS.items():
        path = write_clip(folder / "clips" / f"c.{ending}", grey_frames(8), codec=codec)
        path.with_suffix(".txt").write_text("abc", encoding="utf-8")
    tensors = {"model.a": torch.zeros(50), "ema.b": torch.ones(3, 4)}
    save(folder / "run", 1, tensors, _STATE, keep=1)
    save_by_torch(folder / "old", 1, tensors, _STATE)
    recipe = RECIPE.format(model=model, data=data, run=folder / "new")
    for name, text in {"recipe.toml": recipe, **RUN_FILES}.items():
        (folder / "run" / name).write_text(text, encoding="utf-8")
    (folder / "files").mkdir()
    for name in ("plan.json", "cluster.json"):
        shutil.copy(FILES / name, folder / "files")
    (folder / "files" / "recipe.toml").write_text(recipe, encoding="utf-8")
    return Originals(folder=folder, model=model, data=data, run=folder / "run", old=folder / "old", recipe=recipe)


def _save_further_pictures(data: Path) -> None:
    from PIL import Image

    with Image.open(data / "000.png") as picture:
        for name in ("p.jpg", "p.webp", "p.bmp"):
            picture.save(data / name)
            (data / name).with_suffix(".txt").write_text("abc", encoding="utf-8")
        picture.convert("P").save(data / "p.png", transparency=0)


def rewrite(path: Path, content: str | bytes) -> Path:
    """Replaces a file, which may be a hard link to an original."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return path
