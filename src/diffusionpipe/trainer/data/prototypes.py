"""Prototypes of classes of pictures: means of a frozen encoder's features, projected to a model's width."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.errors import DataError, ModelError
from diffusionpipe.models.opening.folder import open_component, open_components
from diffusionpipe.models.parameters.class_embeddings import class_tables
from diffusionpipe.trainer.data.decoding.images import load_pixels
from diffusionpipe.trainer.data.randomness import normal
from diffusionpipe.trainer.data.scan.dataset import Condition, scan
from diffusionpipe.trainer.data.scan.dataset_problems import problems_of_labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Prototypes:
    """The prototype of each class of a model, and the numbers of pictures and features from which they are made."""

    values: Tensor
    """The prototypes, (classes, width), with mean 0 over the classes and standard deviation 1."""
    pictures: int
    """The number of pictures."""
    features: int
    """The number of features of a picture that were averaged and projected."""


def prototypes_of(
    data: Path,
    model: Path,
    *,
    resolution: int,
    seed: int,
    device: torch.device,
    on_picture: Callable[[int, int], None] | None = None,
) -> Prototypes:
    """The prototype of each class of a model, from the labelled pictures in the folder `data`.

    `model` is a diffusers folder. The features of a picture are the means of its latents in the model's own VAE, or its
    pixels where it has none. The class means lose their common mean; a matrix of normal numbers, keyed by the seed,
    projects them to the width of the model's class embeddings. `on_picture` is called with (pictures done, all).

    Raises:
        DataError: a picture has no label or cannot be decoded, or a class of the model has no picture.
        ModelError: the model has no classes.
    """
    components = open_components(model)
    tables = class_tables(components)
    if not tables:
        raise ModelError(f"{model} has no embeddings of classes; give a model of classes, e.g. a DiT")
    rows, width = next(iter(tables.values())).shape
    dataset = scan(data, Condition.LABEL, check_headers=False)  # each picture is decoded below anyway
    if problems := problems_of_labels(dataset, rows - 1):
        raise DataError("\n".join(problems))
    vae = open_component(model, "vae", device=device) if "vae" in components else None
    sums: dict[int, Tensor] = {}
    counts = [0] * (rows - 1)  # the last row is for no class
    for number, sample in enumerate(dataset.samples):
        pixels = load_pixels(dataset.path(number), resolution=resolution).unsqueeze(0).to(device)
        label = int(sample.label or 0)
        features = _features(vae, pixels).double().cpu()  # sums of thousands of pictures in float32 would lose digits
        sums[label] = sums[label] + features if label in sums else features
        counts[label] += 1
        if on_picture is not None:
            on_picture(number + 1, len(dataset.samples))
    if missing := [label for label, count in enumerate(counts) if not count]:
        shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise DataError(f"{data}: no picture has the label {shown}; a prototype is the mean of a class's pictures")
    means = torch.stack([sums[label] / counts[label] for label in range(rows - 1)])  # (classes, features)
    means = means - means.mean(0)
    # (features, width)
    matrix = normal(seed=seed, purpose="prototypes", step=0, positions=range(means.shape[1]), shape=(width,)).double()
    projected = means @ matrix  # (classes, width)
    spread = projected.std(unbiased=False)
    if not spread > 0:
        raise DataError(f"{data}: the mean pictures of all classes are equal, so prototypes would be too")
    return Prototypes(values=(projected / spread).float(), pictures=len(dataset.samples), features=means.shape[1])


def _features(vae: Any, pixels: Tensor) -> Tensor:
    """The features of a picture, (features,): its latents' mean, or its pixels where `vae` is None.

    `pixels`: (1, 3, H, W).
    """
    if vae is None:
        return pixels.flatten()
    with torch.no_grad():
        mean: Tensor = vae.encode(pixels).latent_dist.mean
    return mean.flatten()
