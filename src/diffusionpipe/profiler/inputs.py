"""Random raw inputs to run a model without data: they have the right shapes, and values that layers can read."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from diffusionpipe.costs import ModelGraph, TensorSpec
from diffusionpipe.models.graphs.graph import LayerGraph, attribute
from diffusionpipe.runtime.machine.free_memory import free_memory


def random_inputs(graph: LayerGraph, batch: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """A batch of random raw inputs of the graph, by name; the same for the same arguments.

    Numbers without dimensions (times) are uniform in [0, 1), others normal; whole numbers lie below the smallest table
    of embeddings among the layers that read them, so that each of them can be looked up.
    """
    generator = torch.Generator().manual_seed(0)
    return {spec.name: _random(graph, spec, batch, generator).to(device) for spec in graph.given}


def _random(graph: LayerGraph, spec: TensorSpec, batch: int, generator: torch.Generator) -> Tensor:
    shape, dtype = (batch, *spec.shape), getattr(torch, spec.dtype)
    if not dtype.is_floating_point:
        # Every table must have a row for each number.
        bound = 2 if dtype is torch.bool else min(_table_sizes(graph, spec.name), default=2)
        return torch.randint(bound, shape, generator=generator).to(dtype)
    if spec.shape == ():
        return torch.rand(shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator, dtype=dtype)


def _table_sizes(graph: LayerGraph, tensor: str) -> Iterator[int]:
    for layer in graph.layers:
        if tensor in layer.reads:
            for name in layer.modules:
                owned = attribute(graph.components[layer.component], name)
                if isinstance(owned, nn.Module):
                    yield from (m.num_embeddings for m in owned.modules() if isinstance(m, nn.Embedding))


def check_memory(model: ModelGraph, batch: int) -> None:
    """Check that the tensors of the largest layer, for `batch` samples, fit in the host's free memory.

    Linux hands out more memory than it has, and would kill the process later.

    Raises:
        MemoryError: there is less free memory.
    """
    free = free_memory()
    needed = batch * max(sum(model.tensor(t).num_bytes for t in {*one.reads, *one.writes}) for one in model.layers)
    if free is not None and needed > free:
        raise MemoryError(f"a layer's tensors take {needed} bytes, and {free} are free")
