"""Descriptions of models, each made once: describing takes longer than most tests of tiny models."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kit.kept_results import kept
from torch import nn

from diffusionpipe.costs import ModelGraph
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.models.graphs.graph import LayerGraph, canonical_names

_DESCRIPTIONS: dict[str, ModelGraph] = {}


def configuration_of(module: nn.Module) -> object:
    """The module's configuration, wherever it was read from; None of one that has none."""
    config = getattr(module, "config", None)
    return {**config, "_name_or_path": ""} if isinstance(config, Mapping) else config


def described(graph: LayerGraph, **options: Any) -> ModelGraph:
    """As `describe`, which is asked once for all graphs that are alike but for the values of their weights."""
    layers = [(one.name, one.component, one.reads, one.writes, one.modules, one.run) for one in graph.layers]
    modules = [
        (name, str(module), configuration_of(module), getattr(module, "settings", None))
        for name, module in graph.components.items()
    ]
    tensors = [(n, p.shape, p.dtype, p.requires_grad) for p, n in canonical_names(graph.components).items()]
    others = [getattr(graph, field.name) for field in fields(graph) if field.name not in ("layers", "components")]
    parts = (layers, modules, tensors, others, options)
    key = repr(parts)
    if key not in _DESCRIPTIONS:
        _DESCRIPTIONS[key] = kept(("description", parts), lambda: describe(graph, **options))
    return _DESCRIPTIONS[key]
