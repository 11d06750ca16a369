"""The profile of a cascaded model from those of its backbones.

Names of layers, tensors and parameters begin with the backbone's: "base/unet.conv_in". A frozen component with weights
that both have alike exists once, as does its raw input: the text encoder of both reads the same caption.

    base                tokens > text_encoder > unet > loss          tokens > text_encoder > base/unet > base/loss
    super_resolution    tokens > text_encoder > unet > loss                                > super_resolution/unet > ...
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from diffusionpipe.costs.graph import Backbone, LayerSpec, ModelGraph, ParameterSpec, TensorSpec
from diffusionpipe.costs.profile import LayerProfile, Profile
from diffusionpipe.errors import ConfigError


def joined_profile(parts: Mapping[str, Profile]) -> Profile:
    """The profile of a cascade from the profiles of its backbones, by name, in the order of sampling.

    Names of layers and tensors get the backbone's name in front; equal frozen components exist once. Batch sizes are
    the ones that all profiles have.

    Raises:
        ConfigError: the profiles are of several devices or precisions, have no batch size in common, or are of several
            backbones already.
    """
    _check(parts)
    sizes = tuple(sorted(set.intersection(*(set(profile.batch_sizes) for profile in parts.values()))))
    shared = _shared_layers(parts)
    layers: dict[str, tuple[LayerSpec, LayerProfile]] = {}
    graphs = []
    for name, profile in parts.items():
        rename = _renaming(name, profile.graph, shared)
        chosen = _at_sizes(profile, sizes)
        graphs.append(_renamed(name, profile.graph, rename))
        # Layers that several backbones share are kept once, as the first one has them.
        for spec, layer in zip(graphs[-1].layers, chosen.layers, strict=True):
            kept_reads = tuple(map(rename, layer.kept_reads))
            layers.setdefault(spec.name, (spec, replace(layer, name=spec.name, kept_reads=kept_reads)))
    first = next(iter(parts.values()))
    graph = ModelGraph(
        layers=tuple(spec for spec, _ in layers.values()),
        tensors=tuple({t.name: t for graph in graphs for t in graph.tensors}.values()),
        parameters=tuple({p.name: p for graph in graphs for p in graph.parameters}.values()),
        inputs=tuple(dict.fromkeys(name for graph in graphs for name in graph.inputs)),
        backbones=tuple(backbone for graph in graphs for backbone in graph.backbones),
    )
    return replace(
        first,
        graph=graph,
        batch_sizes=sizes,
        layers=tuple(layer for _, layer in layers.values()),
        # One number for all parameters: the slowest optimizer's.
        update=max(profile.update for profile in parts.values()),
    )


def _check(parts: Mapping[str, Profile]) -> None:
    problems = []
    for field in ("device", "device_type", "precision"):
        values = {name: getattr(profile, field) for name, profile in parts.items()}
        if len(set(values.values())) > 1:
            found = ", ".join(f"{name} {value}" for name, value in values.items())
            problems.append(f"profiles of backbones differ in their {field}: {found}; profile all of them alike")
    if not set.intersection(*(set(profile.batch_sizes) for profile in parts.values())):
        problems.append("profiles of backbones have no batch size in common; profile all of them with the same sizes")
    problems += [
        f"the profile of {name} is of several backbones already; give one for each"
        for name, profile in parts.items()
        if len(profile.graph.backbones) > 1
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _shared_layers(parts: Mapping[str, Profile]) -> set[str]:
    """Layers of the frozen components with weights that all parts have alike."""
    components = [dict(_components(profile)) for profile in parts.values()]
    alike = [name for name, own in components[0].items() if all(other.get(name) == own for other in components[1:])]
    return {spec.name for name in alike for spec, *_ in components[0][name]}


_Comparable: TypeAlias = tuple[LayerSpec, tuple[TensorSpec, ...], tuple[ParameterSpec, ...]]


def _components(profile: Profile) -> Iterator[tuple[str, list[_Comparable]]]:
    """Each frozen component with weights that reads raw inputs and itself alone, as what can be compared."""
    graph = profile.graph
    frozen, of_name = set(graph.frozen_layers), {p.name: p for p in graph.parameters}
    for component in dict.fromkeys(layer.component for layer in graph.layers):
        own = [layer for layer in graph.layers if layer.component == component]
        written = {name for layer in own for name in layer.writes}
        is_closed = all(name in written or name in graph.inputs for layer in own for name in layer.reads)
        if is_closed and all(layer.name in frozen for layer in own) and any(layer.parameters for layer in own):
            yield component, [_comparable(layer, graph, of_name) for layer in own]


def _comparable(layer: LayerSpec, graph: ModelGraph, of_name: Mapping[str, ParameterSpec]) -> _Comparable:
    tensors = tuple(graph.tensor(name) for name in (*layer.reads, *layer.writes))
    return layer, tensors, tuple(of_name[name] for name in layer.parameters)


def _renaming(name: str, graph: ModelGraph, shared: set[str]) -> Callable[[str], str]:
    """A function that puts a backbone's name in front of every name that is not shared."""
    common = {n for layer in graph.layers if layer.name in shared for n in (*layer.reads, *layer.writes)}
    common |= graph.parameters_of(shared) | shared
    return lambda one: one if one in common else f"{name}/{one}"


def _renamed(name: str, graph: ModelGraph, rename: Callable[[str], str]) -> ModelGraph:
    def all_of(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(rename, names))

    layers = [
        replace(
            layer,
            name=rename(layer.name),
            component=layer.component if rename(layer.name) == layer.name else rename(layer.component),
            reads=all_of(layer.reads),
            writes=all_of(layer.writes),
            parameters=all_of(layer.parameters),
        )
        for layer in graph.layers
    ]
    return replace(
        graph,
        layers=tuple(layers),
        tensors=tuple(replace(tensor, name=rename(tensor.name)) for tensor in graph.tensors),
        parameters=tuple(replace(parameter, name=rename(parameter.name)) for parameter in graph.parameters),
        inputs=all_of(graph.inputs),
        backbones=tuple(_named(name, backbone, rename) for backbone in graph.backbones),
    )


def _named(name: str, backbone: Backbone, rename: Callable[[str], str]) -> Backbone:
    def of(tensor: str | None) -> str | None:
        return None if tensor is None else rename(tensor)

    return replace(
        backbone,
        name=name,
        loss=rename(backbone.loss),
        prediction=of(backbone.prediction),
        noisy=rename(backbone.noisy),
        timesteps=rename(backbone.timesteps),
        estimate=of(backbone.estimate),
    )


def _at_sizes(profile: Profile, sizes: tuple[int, ...]) -> Profile:
    """The profile of these batch sizes alone."""
    chosen = [profile.batch_sizes.index(size) for size in sizes]

    def of(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(values[i] for i in chosen) if values else ()

    layers = [
        replace(
            layer,
            forward=of(layer.forward),
            input_grad=of(layer.input_grad),
            weight_grad=of(layer.weight_grad),
            forward_only=of(layer.forward_only),
            activation=tuple(layer.activation[i] for i in chosen),
            workspace=tuple(layer.workspace[i] for i in chosen),
            drawing=tuple(layer.drawing[i] for i in chosen) if layer.drawing else (),
            kept=tuple(layer.kept[i] for i in chosen) if layer.kept else (),
            forward_spread=of(layer.forward_spread),
            backward_spread=of(layer.backward_spread),
        )
        for layer in profile.layers
    ]
    return replace(profile, batch_sizes=sizes, layers=tuple(layers))
