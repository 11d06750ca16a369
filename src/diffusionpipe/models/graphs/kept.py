"""The tensors of a frozen part that are the same each time that a sample is seen, so that a cache can keep them.

    pixels ──> vae ──> moments ─┐                             moments and text_states follow from what a sample is
                                ├──> latents ──> noisy        latents and noisy also follow from drawn numbers
    posterior_noise ────────────┘

A posterior is kept as its mean and deviation, so each pass draws its own latents from it.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from diffusionpipe.models.graphs.graph import Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTensor:
    """A tensor of the frozen part that a cache can keep: its name, its raw inputs, and the layers that make it."""

    name: str
    """The name of the tensor in the graph."""
    reads: tuple[str, ...]
    """The names of the raw inputs on which it depends, in the order of the graph."""
    layers: tuple[Layer, ...]
    """The layers that compute it from these inputs, in order."""


def in_parts(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """The layers, with each layer that has `parts` replaced by them."""
    return tuple(part for layer in layers for part in (layer.parts or (layer,)))


def kept_tensors(
    layers: Sequence[Layer], outputs: Collection[str], inputs: Sequence[str], is_content: Callable[[str], bool]
) -> tuple[KeptTensor, ...]:
    """The last tensors of the frozen part that depend on content alone, through at least one layer with weights.

    `layers`: the frozen part, `in_parts`. `outputs`: its tensors that trained layers read. `inputs`: the names of the
    raw inputs. `is_content(name)`: whether a sample's own files and texts alone decide that raw input.
    """
    origins: dict[str, frozenset[str]] = {name: frozenset({name}) for name in inputs if is_content(name)}
    makers: dict[str, dict[str, Layer]] = {name: {} for name in origins}
    wanted = dict.fromkeys(outputs)
    for layer in layers:
        # All that it reads follows from content, so what it writes does too.
        if all(name in origins for name in layer.reads):
            above = {name: maker for read in layer.reads for name, maker in makers[read].items()}
            origins |= dict.fromkeys(layer.writes, frozenset().union(*(origins[name] for name in layer.reads)))
            makers |= dict.fromkeys(layer.writes, above | {layer.name: layer})
        else:
            wanted |= dict.fromkeys(layer.reads)
    return tuple(
        KeptTensor(
            name=name,
            reads=tuple(one for one in inputs if one in origins[name]),
            layers=tuple(makers[name].values()),
        )
        for name in origins
        if name in wanted and any(maker.modules for maker in makers[name].values())
    )
