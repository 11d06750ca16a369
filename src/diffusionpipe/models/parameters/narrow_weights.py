"""Weights that stay as narrow as a folder stores them, in layers that compute in float32.

    stored   bfloat16   [ layer 0 | layer 1 | layer 2 ]
    run      float32      [  layer 0  ]  [  layer 1  ]  [  layer 2  ]      one at a time, gone when the layer has run

The bits are the same as with weights that are all wide from the start: a narrower number has exactly one wide equal.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.models.graphs.graph import Layer, own_parameters


def is_narrow(tensor: Tensor) -> bool:
    """Whether a tensor holds floating numbers of fewer bytes than float32.

    >>> [is_narrow(torch.zeros(1, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32, torch.int8)]
    [True, False, False]
    """
    return tensor.is_floating_point() and tensor.dtype.itemsize < torch.float32.itemsize


def upcast_in_forward(layer: Layer) -> Layer:
    """The layer with another `run`, which widens narrow weights to float32 while it runs.

    Under autocast they stay narrow, because autocast reads them so. It is not for training: values that are written to
    the weights are lost.
    """
    return replace(layer, run=_Widening(layer))


@dataclass(frozen=True, slots=True)
class _Widening:
    """The `run` of a layer whose narrow weights are float32 while it runs."""

    layer: Layer
    """The layer with its own `run`."""

    @property
    def tables(self) -> Any:
        """The `ConstantTables` of the layer's own `run`; None if it has none."""
        return getattr(self.layer.run, "tables", None)

    def __call__(self, component: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the layer's own `run`, with its narrow weights in float32 outside autocast."""
        narrow = dict.fromkeys(p for p in own_parameters(self.layer, component) if is_narrow(p))
        # One parameter tells the device of all.
        if not narrow or torch.is_autocast_enabled(next(iter(narrow)).device.type):
            return self.layer.run(component, *tensors)
        with _wide(tuple(narrow)):
            return self.layer.run(component, *tensors)


@contextmanager
def _wide(parameters: tuple[nn.Parameter, ...]) -> Iterator[None]:
    """Within the block, the parameters hold their values in float32; after it, their own tensors again."""
    stored = [parameter.data for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.data = parameter.data.float()
        yield
    finally:
        for parameter, value in zip(parameters, stored, strict=True):
            parameter.data = value
