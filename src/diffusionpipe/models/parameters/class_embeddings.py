"""Embeddings of classes that are read from a file: a prototype of each class in place of random numbers.

Source: Baykal et al., "ProtoDiffusion: Classifier-Free Diffusion Guidance with Prototype Learning", ACML 2023,
https://arxiv.org/abs/2307.01924. A diffusion model of classes has a table with a row for each class and one for no
class. The rows of classes are the prototypes, and the row of no class is their mean. Every table of a model gets the
same rows: a DiT has one in each block.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from diffusionpipe.errors import ModelError

PROTOTYPES = "prototypes"
"""The name of the tensor in the file, (classes, width)."""
_TABLES = ("class_embedder.embedding_table.weight", "class_embedding.weight")
"""The ends of the names of tables: a DiT's, a U-Net's."""


def class_tables(components: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Canonical name -> table of class embeddings, (classes + 1, width); {} for a model without classes."""
    return {
        f"{component}.{name}": parameter
        for component, module in components.items()
        for name, parameter in module.named_parameters()
        if name.endswith(_TABLES)
    }


def values_of_tables(path: Path, components: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Canonical name -> the first values of each table of class embeddings, from a file of prototypes.

    Raises:
        ModelError: the model has no classes, or the file has no prototypes for its classes and width.
    """
    tables = class_tables(components)
    if not tables:
        raise ModelError("model.class_embeddings: the model has no embeddings of classes; remove it")
    prototypes = read_prototypes(path)
    rows, width = next(iter(tables.values())).shape
    if prototypes.shape != (rows - 1, width):
        classes, own = prototypes.shape
        raise ModelError(
            f"model.class_embeddings: {path} has prototypes of {classes} classes and width {own}; the model has "
            f"{rows - 1} classes and width {width}: make them with `diffusionpipe prototypes --model`"
        )
    table = torch.cat([prototypes, prototypes.mean(0, keepdim=True)])  # (classes + 1, width)
    return {name: table.clone() for name in tables}  # each is a parameter of its own


def read_prototypes(path: Path) -> Tensor:
    """The prototypes in a file, (classes, width).

    Raises:
        ModelError: the file cannot be read, or has no prototypes.
    """
    try:
        found = load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"model.class_embeddings: {path} cannot be read: {error}; give a .safetensors file") from error
    prototypes: Tensor | None = found.get(PROTOTYPES)
    if prototypes is None or prototypes.ndim != 2 or not prototypes.is_floating_point():
        raise ModelError(
            f'model.class_embeddings: {path} has no matrix "{PROTOTYPES}"; make it with `diffusionpipe prototypes`'
        )
    if not prototypes.isfinite().all():
        raise ModelError(f"model.class_embeddings: {path} has numbers that are not finite; make it again")
    return prototypes
