"""scikit-image's photographs at several aspects and two areas: the steps of a run over them, sample by sample."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from diffusionpipe.ir.size import Clip
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.trainer.data.batches.batch import BatchSource, Rows, make_batch
from diffusionpipe.trainer.data.batches.sized import sized
from diffusionpipe.trainer.data.decoding.images import upright_size
from diffusionpipe.trainer.data.scan.dataset import scan
from diffusionpipe.trainer.data.sizes.order import SizeOrder
from diffusionpipe.trainer.data.sizes.sizes import Assignment, SizeRules, areas_of, assign, stated_size

STATED = ("20x16", "24x12", "16x16", "20x12", "12x12", "16x8", "12x8")
SIZES = tuple(map(stated_size, STATED))
"""Largest first. Two areas of about 120 and 280 pixels, and the aspects 1, 1.25, 1.5, 1.67 and 2."""
NAMES = (
    "astronaut",
    "cat",
    "coffee",
    "rocket",
    "hubble_deep_field",
    "immunohistochemistry",
    "colorwheel",
    "camera",
    "coins",
    "page",
    "text",
    "clock",
    "moon",
)
"""Functions of skimage.data whose pictures come with the package."""


def save_real(folder: Path) -> Path:
    """A folder of these pictures, each with its name as its caption."""
    from skimage import data

    folder.mkdir(parents=True)
    lines = []
    for name in NAMES:
        Image.fromarray(getattr(data, name)()).convert("RGB").save(folder / f"{name}.png", compress_level=1)
        lines.append(json.dumps({"file_name": f"{name}.png", "text": name}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def letters(texts: Sequence[str], *, max_length: int, **_: Any) -> dict[str, list[list[int]]]:
    """Each letter is one of ten tokens, and a one fills up."""
    return {"input_ids": [([ord(one) % 10 for one in text] + [1] * max_length)[:max_length] for text in texts]}


@dataclass(frozen=True, slots=True, kw_only=True)
class RealSteps:
    """The steps of a run over a folder."""

    assignment: Assignment
    steps: tuple[tuple[tuple[int, ...], list[dict[str, Tensor]]], ...]
    """By step: the number of each sample's size in the graph, and its raw inputs with a batch dimension of one."""


def steps_over(folder: Path, graph: LayerGraph, sizes: Sequence[Clip], *, batch: int, steps: int) -> RealSteps:
    """Mixed steps of a graph that is built for `sizes`; two samples in a row have one size."""
    dataset = scan(folder, "text")
    found = [upright_size(dataset.path(number)) for number in range(len(dataset.samples))]
    assignment = assign(found, SizeRules(areas=areas_of(STATED, None)), 2)
    inputs = {size: own.inputs for size, own in zip(sizes, graph.of_sizes, strict=True)}
    tokenizers: Mapping[str, Callable[..., Any]] = {
        spec.name: letters for spec in graph.inputs if spec.name.startswith("input_ids")
    }
    source = BatchSource(dataset=dataset, inputs=graph.inputs, seed=3, tokenizers=tokenizers)
    samples = sized(source, SizeOrder(assignment=assignment, seed=3, run=2), inputs)

    def sample(step: int, position: int) -> tuple[int, dict[str, Tensor]]:
        place = samples.order.at(step * batch + position)
        number = samples.numbers[place.size]
        rows = Rows(samples=(place.sample,), passes=(place.epoch,), positions=(position,), step=step)
        made = make_batch(samples.sources[number], rows, has_levels=False)
        dtypes = {spec.name: getattr(torch, spec.dtype) for spec in graph.inputs}
        return number, {name: value.to(dtypes[name]) for name, value in made.items()}

    return RealSteps(
        assignment=assignment,
        steps=tuple(
            (tuple(number for number, _ in own), [inputs for _, inputs in own])
            for own in ([sample(step, position) for position in range(batch)] for step in range(steps))
        ),
    )
