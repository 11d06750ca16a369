"""The digits of `examples/digits`, with all that is frozen encoded once: a smaller U-Net, its batches and its judge."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.asynchronous.settings import Task
from diffusionpipe.costs import ModelGraph
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.graphs.run import needed_layers, run_layers
from diffusionpipe.models.opening.folder import weight_sources
from diffusionpipe.models.parameters.weights import materialize
from diffusionpipe.trainer.data.batches.batch import BatchSource, Rows, make_batch, sample_indices
from diffusionpipe.trainer.data.scan.dataset import Condition, scan
from diffusionpipe.trainer.inference.conditions import open_tokenizer
from diffusionpipe.trainer.model.members import build_model
from diffusionpipe.trainer.recipe import Recipe, load_recipe

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"
SMALLER = {"block_out_channels": [16, 32], "layers_per_block": 1, "norm_num_groups": 8}
"""Of the benchmark's U-Net, in place of two layers of 32 and 64 channels."""
DIGITS = {Task.DIGITS: range(10), Task.BASE: range(5), Task.ADAPTERS: range(5, 10)}
ADAPTERS = {"rank": 4, "target_modules": ["to_q", "to_k", "to_v", "to_out.0", "conv1", "conv2"]}
"""Also of convolutions, because the last stage has no attention."""
BATCH = 32
ENCODED = ("moments", "text_states")
"""What the encoders make of a picture and of a caption."""
DENOISED = ("noisy", "timesteps", "target", "loss_weight", "text_states")
"""What the trained layers read."""
SAMPLING_STEPS, GUIDANCE, DRAWN = 15, 1.5, 100

Tensors = dict[str, Tensor]


def prepare(folder: Path) -> None:
    """Write the pictures and the folder of the smaller model."""
    if not (folder / "data" / "validation" / "metadata.jsonl").is_file():
        command = (sys.executable, str(EXAMPLE / "dataset.py"), "--out", str(folder / "data"))
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for task in (Task.BASE, Task.ADAPTERS):
        if not _data_of(folder, task).is_dir():
            _select(folder / "data", _data_of(folder, task), DIGITS[task])
    if not (folder / "model").is_dir():
        shutil.copytree(EXAMPLE / "model", folder / "model")
        config = folder / "model" / "unet" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text(encoding="utf-8")) | SMALLER), encoding="utf-8")


def base_of(folder: Path) -> Path:
    """The model that adapters are trained for."""
    return folder / "base"


def write_model(graph: LayerGraph, digits: "Digits", folder: Path) -> None:
    """The run's model with the weights that it has now."""
    shutil.copytree(digits.model_folder, folder)
    unet: Any = graph.components["unet"]
    unet.save_pretrained(folder / "unet")


def _data_of(folder: Path, task: Task) -> Path:
    return folder / "data" if task is Task.DIGITS else folder / f"data-{task}"


def _select(data: Path, out: Path, digits: range) -> None:
    """Copy the pictures of some digits."""
    dataset = _example("dataset")
    for split in ("train", "validation"):
        (out / split).mkdir(parents=True)
        rows = (data / split / "metadata.jsonl").read_text(encoding="utf-8").splitlines()
        kept = [row for row in rows if dataset.digit_of_caption(json.loads(row)["text"]) in digits]
        for row in kept:
            name = json.loads(row)["file_name"]
            shutil.copy(data / split / name, out / split / name)
        (out / split / "metadata.jsonl").write_text("\n".join(kept) + "\n", encoding="utf-8")


def _example(name: str) -> Any:
    """A script of the example."""
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    return import_module(name)


@dataclass(frozen=True)
class Digits:
    """The example with another seed and a smaller model; `folder` is one that `prepare` has written."""

    folder: Path
    seed: int
    task: Task = Task.DIGITS
    _made: list[Tensors] = field(default_factory=list)
    """Batches of the first steps."""

    @cached_property
    def recipe(self) -> Recipe:
        """The example's."""
        data = _data_of(self.folder, self.task)
        overrides: tuple[str, ...] = (
            f"model.path={self.model_folder}",
            f"data.train={data / 'train'}",
            f"data.validation={data / 'validation'}",
            f"training.batch={BATCH}",
            f"training.seed={self.seed}",
        )
        if self.task is Task.ADAPTERS:
            overrides += ("model.from_scratch=false", *(f"lora.{key}={value}" for key, value in ADAPTERS.items()))
        return load_recipe(EXAMPLE / "recipe.toml", overrides)

    @property
    def model_folder(self) -> Path:
        """Of the configuration, and of the weights that are not drawn."""
        return base_of(self.folder) if self.task is Task.ADAPTERS else self.folder / "model"

    def model(self) -> tuple[LayerGraph, ModelGraph]:
        """The model with its weights at the start of a run."""
        opened = build_model(self.recipe, "cpu")
        graph = opened.graph
        sources = weight_sources(self.model_folder, graph, from_scratch=True)
        if self.task is not Task.ADAPTERS:
            sources["unet"] = None
        names = [layer.name for layer in graph.layers]
        materialize(graph, names, sources, device="cpu", dtype=torch.float32, seed=self.seed)
        return graph, opened.model

    def batches(self, steps: int) -> tuple[Tensors, ...]:
        """What the trained layers read in each step, as in a run of the trainer with this seed."""
        encoder, positions = self._training, tuple(range(BATCH))
        samples = len(encoder.source.dataset.samples)
        for step in range(len(self._made), steps):
            taken = sample_indices(samples, seed=self.seed, batch=BATCH, step=step, positions=positions)
            self._made.append(encoder.encode(Rows(samples=taken, positions=positions, step=step)))
        return tuple(self._made[:steps])

    @cached_property
    def _training(self) -> "_Encoder":
        recipe, graph = self.recipe, self.model()[0]
        return _Encoder(graph, self._source(graph, recipe.data.train, dropout=recipe.data.caption_dropout))

    @cached_property
    def validation(self) -> tuple[Tensors, ...]:
        """The held-out pictures at the recipe's times, in batches of 150 rows: the trainer's validation of them all."""
        recipe, graph = self.recipe, self.model()[0]
        encoder = _Encoder(graph, self._source(graph, recipe.data.validation, dropout=0.0))
        times = recipe.validation.timesteps
        numbers, found = range(len(encoder.source.dataset.samples) * len(times)), []
        for start in range(0, len(numbers), 150):
            part = tuple(numbers[start : start + 150])
            rows = Rows(
                samples=tuple(number // len(times) for number in part),
                positions=part,
                step=0,
                purpose="validation.",
                times=tuple(times[number % len(times)] for number in part),
            )
            found.append(encoder.encode(rows))
        return tuple(found)

    def _source(self, graph: LayerGraph, folder: Path | None, *, dropout: float) -> BatchSource:
        assert folder is not None, "the recipe names both"
        plain = BatchSource(
            dataset=scan(folder, Condition.TEXT),
            inputs=graph.inputs,
            seed=self.seed,
            tokenizers={"input_ids": open_tokenizer(self.folder / "model")},
        )
        return replace(plain, augmentation=replace(plain.augmentation, condition_dropout=dropout))


class _Encoder:
    """Batches through the frozen layers, each picture and each caption only once."""

    def __init__(self, graph: LayerGraph, source: BatchSource) -> None:
        self.source, self._graph = source, graph
        self._drawn = replace(source, inputs=tuple(spec for spec in graph.inputs if spec.name != "pixels"))
        self._text: dict[tuple[int, ...], Tensor] = {}
        pictures = replace(source, inputs=tuple(spec for spec in graph.inputs if spec.name == "pixels"))
        count, moments = len(source.dataset.samples), []
        for start in range(0, count, 64):
            taken = tuple(range(start, min(start + 64, count)))
            raw = make_batch(pictures, Rows(samples=taken, positions=taken, step=0))
            moments.append(self._run(raw, "moments"))
        self._moments = torch.cat(moments)  # (N, 8, 8, 8)

    def encode(self, rows: Rows) -> Tensors:
        """What the trained layers read of these rows."""
        raw = make_batch(self._drawn, rows)
        captions = [tuple(ids.tolist()) for ids in raw.pop("input_ids")]
        if missing := sorted(set(captions) - self._text.keys()):
            states = self._run({"input_ids": torch.tensor(missing)}, "text_states")
            self._text.update(zip(missing, states, strict=True))
        raw["moments"] = self._moments[list(rows.samples)]
        found = self._run(raw, *DENOISED[:-1])
        return {**found, "text_states": torch.stack([self._text[ids] for ids in captions])}

    @torch.no_grad()
    def _run(self, tensors: Tensors, *targets: str) -> Any:
        layers = needed_layers(self._graph.layers, targets, tensors)
        found = run_layers(layers, self._graph.components, tensors, targets=targets)
        return found if len(targets) > 1 else found[targets[0]]


def loss_layers(graph: LayerGraph) -> tuple[Any, ...]:
    """The layers from what the encoders made to the loss of each sample."""
    return needed_layers(graph.layers, ["loss"], DENOISED)


@torch.no_grad()
def validation_loss(graph: LayerGraph, batches: Sequence[Tensors]) -> float:
    """The mean loss of all rows."""
    layers = loss_layers(graph)
    losses = [run_layers(layers, graph.components, batch, targets=["loss"])["loss"] for batch in batches]
    return float(torch.cat(losses).double().mean())


def recognised(graph: LayerGraph, digits: Digits) -> float:
    """The share of generated digits that the example's classifier reads as their caption says; as many of each."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline
    from transformers import CLIPTextModel, CLIPTokenizer

    dataset, score = _example("dataset"), _example("score").score
    model = digits.folder / "model"
    pipeline = StableDiffusionPipeline(
        vae=AutoencoderKL.from_pretrained(model / "vae"),
        text_encoder=CLIPTextModel.from_pretrained(model / "text_encoder"),
        tokenizer=CLIPTokenizer.from_pretrained(model / "tokenizer"),
        unet=graph.components["unet"],
        scheduler=DDIMScheduler.from_pretrained(model / "scheduler"),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    shown, wordings = DIGITS[digits.task], len(dataset.WORDINGS)
    captions = [dataset.caption(shown[i % len(shown)], i // len(shown) % wordings) for i in range(DRAWN)]
    drawn = (
        pipeline(
            captions[start : start + 50],
            num_inference_steps=SAMPLING_STEPS,
            guidance_scale=GUIDANCE,
            generator=[torch.Generator().manual_seed(i) for i in range(start, start + 50)],
            height=dataset.PICTURE_SIDE,
            width=dataset.PICTURE_SIDE,
        ).images
        for start in range(0, DRAWN, 50)
    )
    return float(score(list(chain.from_iterable(drawn)), captions).recognised)
