"""A model as layers that torch can run.

An adapter turns a diffusers or transformers model into a `LayerGraph`: layers with the names of the tensors that they
read and write, over modules that stay diffusers' own. The data path is part of the graph: adding noise is a frozen
layer, the loss is the last layer.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod

from torch import Tensor, nn

from diffusionpipe.costs import Backbone, TensorSpec
from diffusionpipe.ir.size import Clip


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of a model, the smallest piece that is profiled and placed: named tensors in, named tensors out."""

    name: str
    """The name of the layer, unique in the graph, e.g. "unet.down_blocks.0.resnets.1"."""
    component: str
    """The key in `LayerGraph.components` of the module that `run` gets."""
    reads: tuple[str, ...]
    """The names of the tensors that it reads."""
    writes: tuple[str, ...]
    """The names of the tensors that it writes."""
    modules: tuple[str, ...] = ()
    """Dotted names below the component of the submodules or parameters that `run` uses; "" is the component itself."""
    run: Callable[..., tuple[Tensor, ...]]
    """`run(component, *tensors in the order of reads)` returns the tensors in the order of `writes`. Dimension 0 of
    every tensor is the batch. It must not read the global random generator and must not write to its inputs."""
    parts: tuple["Layer", ...] = ()
    """Several layers that do the same work one after the other, the first ones without random numbers; () for most."""
    between: tuple[TensorSpec, ...] = ()
    """Descriptions of the tensors that one of the parts writes and another one reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGraph:
    """A model as layers, with the modules that they use, the raw inputs that they read, and its backbones."""

    layers: tuple[Layer, ...]
    """The layers of the graph, in an order in which they can run."""
    components: Mapping[str, nn.Module]
    """Component -> its whole module; parameters may be on the meta device. A canonical parameter name is
    "<component>.<name in the component>"."""
    inputs: tuple[TensorSpec, ...]
    """Raw inputs: the tensors that the data loader yields."""
    backbones: tuple[Backbone, ...] = (Backbone(),)
    """The backbones of the graph, in the order of sampling."""
    fed_back: tuple[TensorSpec, ...] = ()
    """The tensors that backbones read of their own pass before (`Backbone.estimate`): layers read them before the loss
    writes them."""
    widened: frozenset[str] = frozenset()
    """Canonical names of weights that may have more inputs than in the files: for these inputs the weights are zero."""
    patch: int | None = None
    """Side of the square of latents that is one token of the denoiser; None if it has no tokens."""
    size: Clip | None = None
    """The size of the samples if the graph has `others`; else None."""
    others: tuple["LayerGraph", ...] = ()
    """The same model over the same modules, built for further sizes of samples. Layers, their reads and writes have the
    same names; the functions differ, because a trace keeps the numbers of the size for which it was made."""
    has_even_sigmas: bool = False
    """Whether diffusers' pipeline gives a flow's scheduler the noise levels 1, (n - 1) / n, ..., 1 / n to shift, and
    does not leave their choice to it."""

    @property
    def of_sizes(self) -> tuple["LayerGraph", ...]:
        """The graphs for all sizes of samples: this one, then `others`."""
        return (self, *self.others)

    @property
    def given(self) -> tuple[TensorSpec, ...]:
        """The tensors that layers read and that no layer before them writes: raw inputs and fed-back estimates."""
        return (*self.inputs, *self.fed_back)

    @property
    def num_tokens(self) -> int | None:
        """The number of tokens that the denoiser makes of a sample; None if it has no tokens.

        The graph must have the raw input "noise".
        """
        return next(num_tokens(spec.shape, self.patch) for spec in self.inputs if spec.name == "noise")


def num_tokens(latents: Sequence[int], patch: int | None) -> int | None:
    """The number of tokens in a sample's latents of the shape (C, H, W), or (C, F, H, W) for a clip.

    `patch`: side of the square of latents that is one token; None gives None.
    """
    # The product of no frames is 1, for pictures.
    return None if patch is None else prod(latents[1:-2]) * (latents[-2] // patch) * (latents[-1] // patch)


def canonical_names(components: Mapping[str, nn.Module]) -> dict[nn.Parameter, str]:
    """Parameter -> canonical name, for all components; a tied parameter has the first of its names."""
    names: dict[nn.Parameter, str] = {}
    for component, module in components.items():
        for name, parameter in module.named_parameters():
            # Components may share a module: the name that was found first stays.
            names.setdefault(parameter, f"{component}.{name}")
    return names


def layer_parameters(graph: LayerGraph, layers: Collection[str]) -> dict[str, nn.Parameter]:
    """Canonical name -> parameter, for the parameters that these layers use, in the order of the layers."""
    names = canonical_names(graph.components)
    return {
        names[parameter]: parameter
        for layer in graph.layers
        if layer.name in layers
        for parameter in own_parameters(layer, graph.components[layer.component])
    }


def parameter_names(graph: LayerGraph, layers: Collection[str]) -> tuple[str, ...]:
    """The canonical names of the parameters that these layers use, in the order of the layers."""
    return tuple(layer_parameters(graph, layers))


def own_parameters(layer: Layer, component: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters in the submodules that the layer names.

    Raises AttributeError for a name that the component does not have.
    """
    for name in layer.modules:
        owned = attribute(component, name)
        if isinstance(owned, nn.Module):
            yield from owned.parameters()
        elif isinstance(owned, nn.Parameter):
            yield owned


def modules_of(layer: Layer, component: nn.Module) -> Iterator[nn.Module]:
    """The modules that a layer names, and all modules below them."""
    for name in layer.modules:
        owned = attribute(component, name)
        if isinstance(owned, nn.Module):
            yield from owned.modules()


def attribute(component: nn.Module, name: str) -> object:
    """The component's submodule, parameter or buffer with this dotted name; the component itself for "".

    Raises AttributeError if there is none.
    """
    return reduce(getattr, name.split("."), component) if name else component
