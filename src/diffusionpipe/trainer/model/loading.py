"""Loads the weights of the layers that a rank runs, to the device or the host memory that the plan names."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from time import perf_counter

import torch
from torch import Tensor, nn

from diffusionpipe.costs import ModelGraph
from diffusionpipe.costs.graph import frozen_stores, wider_bytes
from diffusionpipe.errors import RecipeError
from diffusionpipe.holding.storage import storage_of
from diffusionpipe.ir import Plan
from diffusionpipe.ir.words import short_count
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.parameters.stored import StoredWeights
from diffusionpipe.models.parameters.weights import materialize
from diffusionpipe.runtime.comm.places import trained_blocks, trained_layers
from diffusionpipe.runtime.engine.sharder import Sharder
from diffusionpipe.runtime.weights.host_weights import hosted_parameters
from diffusionpipe.runtime.weights.node_memory import NodeMemory
from diffusionpipe.runtime.weights.owned import Divided
from diffusionpipe.trainer.reporting.screen import Screen, Work

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The stored weights of a model, the types that they get, and the seed of those that are not stored."""

    graph: LayerGraph
    model: ModelGraph
    sources: Mapping[str, StoredWeights | None]
    """The stored weights of each component, by component, as `materialize` takes them."""
    dtype: torch.dtype
    """The type of parameters for which the next two fields state no other type."""
    frozen_dtype: torch.dtype | None
    """The type of frozen linear layers and convolutions without a form of their own; None: `dtype`."""
    trained_dtype: torch.dtype | None
    """The type of trained weights; None: `dtype`."""
    gradient_dtype: torch.dtype
    """The type of the gradients of trained weights in bfloat16."""
    seed: int
    """The seed of weights that are not stored."""
    started: Mapping[str, Tensor]
    """Values of adapters that start from a file, by canonical name."""


def load_weights(
    weights: Weights,
    plan: Plan,
    sharder: Sharder,
    device: torch.device,
    screen: Screen,
    node: NodeMemory | None = None,
) -> dict[int, Divided] | None:
    """Loads the weights of the layers that a rank runs; returns its divided blocks by id, None where all stay whole.

    `sharder` divides blocks among the groups. Of weights that the plan leaves in host memory, only the machine's first
    rank reads the values if the ranks of the machine share this memory, `node`.

    Raises:
        ModelError: a weight is missing or cannot be read.
        RecipeError: this torch has no gradients of another type than their parameters, and they are wanted.
    """
    rank, frozen = sharder.rank, weights.model.frozen_layers
    layers = {*trained_layers(plan, rank), *frozen}
    started = perf_counter()
    with screen.work("loading weights") as work:
        count = _Count(_sizes(weights.model, layers), work)
        load = partial(_load, weights, count)
        divided = None
        hosted = storage_of(plan.encoders).hosted(plan.blocks[-1])
        if hosted:  # first, so that what other layers use too goes to the device after it
            others = node is not None and not node.is_first
            # The first rank of the machine reads them for all.
            load(layers=hosted, device="cpu", skip_values=hosted_parameters(weights.graph, hosted) if others else ())
            frozen = tuple(layer for layer in frozen if layer not in hosted)
        if plan.mesh.parts > 1:  # block by block, so that the whole model is in no rank's memory
            divided = {}
            for block in trained_blocks(plan, rank):
                load(layers=plan.blocks[block], device=device)
                divided[block] = sharder.divide(block)
            load(layers=frozen, device=device)
        else:
            load(layers={*trained_layers(plan, rank), *frozen}, device=device)
    logger.info("loaded weights parameters=%s load_s=%.1f", short_count(count.total), perf_counter() - started)
    wider, whole = wider_bytes(weights.model)
    if wider < whole:
        stores = frozen_stores(weights.model).items()
        forms = ", ".join(f"{form or 'as trained'} ({', '.join(components)})" for form, components in stores)
        logger.info('stored weights forms="%s" frozen_mib=%.3f wider_mib=%.3f', forms, whole / 2**20, wider / 2**20)
    return divided


def _load(
    weights: Weights,
    count: "_Count",
    *,
    layers: Collection[str],
    device: torch.device | str,
    skip_values: Collection[nn.Parameter] = (),
) -> None:
    """Load the weights of these layers to a device, and set the type of the gradients of trained weights in bfloat16.

    `count` is called for each parameter that has its value. `skip_values`: parameters whose values are not read.
    """
    materialize(
        weights.graph,
        layers=layers,
        sources=weights.sources,
        device=device,
        dtype=weights.dtype,
        seed=weights.seed,
        frozen_dtype=weights.frozen_dtype,
        trained_dtype=weights.trained_dtype,
        started=weights.started,
        skip_values=skip_values,
        on_value=count.add,
    )
    if weights.trained_dtype is not None:
        _keep_gradients(weights.graph, weights.gradient_dtype)


def _keep_gradients(graph: LayerGraph, dtype: torch.dtype) -> None:
    """Set `dtype` as the type of the gradients of trained weights in bfloat16; autograd adds in this type.

    Raises:
        RecipeError: this torch gives every gradient the type of its parameter.
    """
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise RecipeError('training.weights: "bfloat16" needs torch 2.10 or later; update torch, or remove the key')
    for component in graph.components.values():
        for parameter in component.parameters():
            # Layers of other ranks have no values here.
            if parameter.requires_grad and parameter.dtype is torch.bfloat16 and not parameter.is_meta:
                parameter.grad_dtype = dtype


def _sizes(model: ModelGraph, layers: Collection[str]) -> dict[str, int]:
    """The number of elements of each parameter of these layers, by canonical name."""
    names = model.parameters_of(layers)
    return {p.name: prod(p.shape) for p in model.parameters if p.name in names}


class _Count:
    """Counts the elements of the parameters whose values are loaded, and shows their sum on the screen."""

    def __init__(self, sizes: dict[str, int], work: Work) -> None:
        self.total = sum(sizes.values())
        self._left, self._work, self._done = sizes, work, 0

    def add(self, name: str) -> None:
        """Counts the parameter of this canonical name as loaded; ignores parameters of layers that are not counted."""
        self._done += self._left.pop(name, 0)
        words = {"parameters": f"{short_count(self._done)}/{short_count(self.total)}"}
        self._work.show(self._done, self.total, words)
