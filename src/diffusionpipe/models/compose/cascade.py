"""Several models as one graph with several backbones, which train together on the same pictures.

    pixels ──┬── data/base.pixels ──> base/pixels ──> the layers of base ──> base/loss
             └────────────────────────────────────> the layers of super ──> super/loss

Every name of a member gets the member's name before it: the layer "base/unet.conv_in", the component "base/unet", the
tensor "base/noisy". The pictures are shared: the raw input "pixels" has the resolution of the largest member, and a
frozen layer reduces it for each of the others. Encoders that members have alike (`common_encoders`) keep the name of
the first of them, which encodes for all. So members need not know of each other.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from diffusionpipe.costs import Backbone, TensorSpec
from diffusionpipe.errors import ModelError
from diffusionpipe.models.compose.common_encoders import common_tensors
from diffusionpipe.models.families.deepfloyd import reduced
from diffusionpipe.models.graphs.graph import Layer, LayerGraph

PIXELS = "pixels"
DATA = "data"
"""The component of the layers that reduce pictures; it has no parameters."""


def cascade_graph(
    members: Mapping[str, LayerGraph], common: Mapping[str, Mapping[str, str]] | None = None
) -> LayerGraph:
    """One graph of all these models; the backbones have the keys of `members` as names, in the order of sampling.

    `common`: member -> component -> name of the other member whose equal encoder is used in its place.

    Raises:
        ModelError: a member has several backbones itself or reads no pictures, or their pictures differ in more than
            the resolution.
    """
    pictures = _pictures(members)
    largest = max(pictures.values(), key=lambda spec: spec.shape[-1])
    reductions = [_reduction(name, spec) for name, spec in pictures.items() if spec.shape[-1] < largest.shape[-1]]
    is_reduced = {layer.writes[0] for layer in reductions}
    layers: list[Layer] = []
    inputs: list[TensorSpec] = [largest]
    components: dict[str, nn.Module] = {DATA: nn.Identity()}
    for name, member in members.items():
        taken = (common or {}).get(name, {})
        elsewhere = names_elsewhere(member, taken)
        own = partial(_own, name, is_reduced, elsewhere)
        layers += [
            replace(
                layer,
                name=_inside(name, layer.name),
                component=_inside(name, layer.component),
                reads=tuple(map(own, layer.reads)),
                writes=tuple(map(own, layer.writes)),
            )
            for layer in member.layers
            if layer.component not in taken
        ]
        components |= {_inside(name, key): module for key, module in member.components.items() if key not in taken}
        # The shared pictures are an input of the cascade already; tokens of a common encoder are its owner's.
        known = {PIXELS, *elsewhere}
        inputs += [replace(spec, name=own(spec.name)) for spec in member.inputs if spec.name not in known]
    return LayerGraph(
        layers=(*reductions, *layers),
        components=components,
        inputs=tuple(inputs),
        backbones=tuple(_backbone(name, member.backbones[0]) for name, member in members.items()),
        fed_back=tuple(
            replace(spec, name=_inside(name, spec.name)) for name, member in members.items() for spec in member.fed_back
        ),
        widened=frozenset(_inside(name, weight) for name, member in members.items() for weight in member.widened),
    )


def _inside(member: str, name: str) -> str:
    return f"{member}/{name}"


def names_elsewhere(member: LayerGraph, taken: Mapping[str, str]) -> dict[str, str]:
    """Name -> name in the cascade, of the components that another member provides, and of their tensors.

    `taken`: component -> the member that provides it.
    """
    found = {component: _inside(owner, component) for component, owner in taken.items()}
    for component, owner in taken.items():
        found |= {name: _inside(owner, name) for name in common_tensors(member, component)}
    return found


def _own(member: str, is_reduced: set[str], elsewhere: Mapping[str, str], name: str) -> str:
    """The name in the cascade of the tensor that the member calls `name`.

    `is_reduced`: the tensors that reductions write. `elsewhere`: see `names_elsewhere`.
    """
    if name in elsewhere:
        return elsewhere[name]
    # A reduction writes the member's own pictures; the members of the largest size read the raw input.
    inside = _inside(member, name)
    return name if name == PIXELS and inside not in is_reduced else inside


def _backbone(name: str, alone: Backbone) -> Backbone:
    return replace(
        alone,
        name=name,
        loss=_inside(name, alone.loss),
        prediction=None if alone.prediction is None else _inside(name, alone.prediction),
        noisy=_inside(name, alone.noisy),
        timesteps=_inside(name, alone.timesteps),
        estimate=None if alone.estimate is None else _inside(name, alone.estimate),
    )


def _pictures(members: Mapping[str, LayerGraph]) -> dict[str, TensorSpec]:
    """Member -> description of the raw input with its pictures.

    Raises:
        ModelError: the members cannot form a cascade; names every problem.
    """
    found: dict[str, TensorSpec] = {}
    problems = []
    for name, member in members.items():
        if len(member.backbones) > 1:
            problems.append(f"{name} has {len(member.backbones)} backbones; name each of them as a model of its own")
        specs = [spec for spec in member.inputs if spec.name == PIXELS]
        if len(members) > 1 and any(spec.name == "time_ids" for spec in member.inputs):
            problems.append(f"{name} reads the sizes of its pictures, which other models do not; train it alone")
        if specs:
            found[name] = specs[0]
        else:
            problems.append(f"{name} reads no pictures; every model of a cascade must")
    kinds = {(spec.shape[0], spec.dtype) for spec in found.values()}
    if len(kinds) > 1:
        shown = "; ".join(f"{name} {spec.shape[0]} of {spec.dtype}" for name, spec in found.items())
        problems.append(f"the models read pictures of different channels: {shown}; use models of the same channels")
    if problems:
        raise ModelError("\n".join(problems))
    return found


def _reduction(name: str, spec: TensorSpec) -> Layer:
    """The frozen layer that shrinks the shared pictures to the size of the member `name`, which is in `spec`."""
    return Layer(
        name=f"{DATA}/{name}.{PIXELS}",
        component=DATA,
        reads=(PIXELS,),
        writes=(_inside(name, PIXELS),),
        run=partial(_reduce, spec.shape[-1]),
    )


def _reduce(resolution: int, _: nn.Module, pixels: Tensor) -> tuple[Tensor, ...]:
    return (reduced(pixels, resolution),)
