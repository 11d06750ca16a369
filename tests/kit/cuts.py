"""Cut transformers, each traced once in a process: tracing takes longer than most trainings of tiny models.

So does counting the memory of a VAE that decodes, which is done once for all processes.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from kit.descriptions import configuration_of
from kit.kept_results import kept
from torch import Tensor, nn

from diffusionpipe.costs.decoding import Decoding
from diffusionpipe.models.cut.cutting import cut
from diffusionpipe.models.cut.exporting import Forward
from diffusionpipe.models.families import class_unet, deepfloyd, described
from diffusionpipe.models.graphs.graph import Layer
from diffusionpipe.profiler.decoding import decoding_of
from diffusionpipe.trainer.inference import decoding


@dataclass(frozen=True, slots=True)
class _Cut:
    layers: tuple[Layer, ...]
    trained: tuple[bool, ...]
    """Whether each parameter is trained afterwards."""
    kept: tuple[object, ...]
    """What the key names by identity: while it lives, nothing else gets its identity."""


_CUTS: dict[str, _Cut] = {}


def cut_once(
    root: nn.Module,
    forward: Forward,
    inputs: Mapping[str, Tensor],
    *,
    component: str = "transformer",
    output: str = "prediction",
    joined: Collection[str] = (),
) -> tuple[Layer, ...]:
    """As `cut`, which is asked once for all models that are alike but for the values of their weights."""
    given = [(name, tensor.shape, tensor.dtype) for name, tensor in inputs.items()]
    modules = [(name, type(module), module.training) for name, module in root.named_modules()]
    tensors = [
        (name, t.shape, t.dtype, t.requires_grad) for name, t in (*root.named_parameters(), *root.named_buffers())
    ]
    key = repr((modules, tensors, configuration_of(root), forward, given, component, output, joined))
    if key not in _CUTS:
        layers = cut(root, forward, inputs, component=component, output=output, joined=joined)
        after = tuple(parameter.requires_grad for parameter in root.parameters())
        _CUTS[key] = _Cut(layers, after, (root, forward))
    found = _CUTS[key]
    for parameter, is_trained in zip(root.parameters(), found.trained, strict=True):
        parameter.requires_grad_(is_trained)
    return found.layers


def counted_once(vae: nn.Module, latents: Sequence[int], dtype: torch.dtype = torch.float32) -> Decoding:
    """As `decoding_of`, which is asked once for all VAEs of a configuration."""
    key = ("decoding", type(vae), configuration_of(vae), tuple(latents), dtype)
    return kept(key, lambda: decoding_of(vae, latents, dtype))


@contextmanager
def traced_once() -> Iterator[None]:
    """Models are opened with `cut_once` in place of `cut`, and pictures decoded by what `counted_once` says."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(decoding, "decoding_of", counted_once))
        for module in (class_unet, deepfloyd, described):
            patches.enter_context(mock.patch.object(module, "cut", cut_once))
        yield
