"""A layer graph as plain data: the planning half's view of a model.

The layers run on fake tensors, which have a shape, a dtype and a device but no memory, so a model of any size is
described within seconds and without weights.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from diffusionpipe.costs import LayerSpec, ModelGraph, ParameterSpec, TensorSpec
from diffusionpipe.costs.forms import Form
from diffusionpipe.costs.graph import BYTES_OF_DTYPE
from diffusionpipe.errors import ConfigError, ModelError
from diffusionpipe.models.graphs.conduct import Conduct, mixes_samples
from diffusionpipe.models.graphs.graph import Layer, LayerGraph, attribute, canonical_names, own_parameters

_ATTENTION_OF_CPUS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The attention of CPUs: torch's counter counts the attention of GPUs alone."""


def describe(
    graph: LayerGraph, batch: int = 2, autocast: torch.dtype | None = None, *, device: str = "cpu"
) -> ModelGraph:
    """The graph as a `ModelGraph`: shape, dtype and need of a gradient of every tensor, and each layer's parameters.

    `autocast` is the dtype of torch.autocast that the layers will run under on `device` (torch casts other operations
    on a GPU than on a CPU, so the dtypes between layers depend on it); None for none. Parameters that no layer uses,
    such as a VAE's decoder, are left out. `batch`: the number of samples with which layers are run.

    Raises ModelError with every problem found, ConfigError for a device that this machine does not have.
    """
    if device != "cpu" and not torch.get_device_module(device).is_available():
        raise ConfigError(f"a model for {device} must be described on a machine with {device}; this machine has none")
    _raise(_problems_of_names(graph) + _problems_of_parameters(graph))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, _fake_weights(graph.components, device) as weights, torch.no_grad():
        # Only the first run is counted. The second one, of another size, shows where the batch is.
        counter = _Operations()
        with counter:
            first = _run_fake(graph, batch, autocast, device, counter)
        counter.conduct.changed = _changed(weights)
        second = _run_fake(graph, batch + 1, autocast, device)
    _raise(_problems_of_shapes(graph, first, second, batch))
    _raise(list(counter.conduct.problems(graph.layers, graph.components)))
    _raise(list(_problems_of_samples(graph, first, autocast)))
    model = _model_graph(graph, first, {name: count // batch for name, count in counter.of_layer.items()})
    _raise(_problems_of_backbones(model))
    return model


def dtype_name(dtype: torch.dtype) -> str:
    """The name of the dtype as `TensorSpec` writes it, e.g. "float32"."""
    return str(dtype).removeprefix("torch.")


def _raise(problems: list[str]) -> None:
    if problems:
        raise ModelError("the layers do not form a model:\n" + "\n".join(f"  {problem}" for problem in problems))


def _problems_of_names(graph: LayerGraph) -> list[str]:
    problems = []
    seen: set[str] = set()
    fed_back = {spec.name for spec in graph.fed_back}
    written = {spec.name: "the raw inputs" for spec in graph.inputs} | dict.fromkeys(fed_back, "")
    for layer in graph.layers:
        if layer.name in seen:
            problems.append(f"two layers have the name {layer.name}")
        if layer.component not in graph.components:
            problems.append(f"{layer.name} belongs to the component {layer.component}, which the graph does not have")
        seen.add(layer.name)
        problems += [f"{layer.name} reads {name}, which nothing before it writes" for name in layer.reads
                     if name not in written]  # fmt: skip
        for name in layer.writes:
            if name in written and name not in fed_back:
                problems.append(f"{layer.name} writes {name}, which {written[name]} wrote before")
            written[name] = layer.name
    wanted = [name for backbone in graph.backbones for name in (backbone.loss, backbone.prediction) if name is not None]
    return problems + [f"no layer writes {name}" for name in wanted if name not in written]


def _problems_of_parameters(graph: LayerGraph) -> list[str]:
    problems = []
    owned: set[nn.Parameter] = set()
    for layer in graph.layers:
        component = graph.components.get(layer.component)
        if component is None:
            continue
        for name in layer.modules:
            try:
                attribute(component, name)
            except AttributeError:
                problems.append(f"{layer.name} names {layer.component}.{name}, which does not exist")
                break
        else:
            owned.update(own_parameters(layer, component))
    return problems + [
        f"{name} is trainable, but no layer uses it"
        for parameter, name in canonical_names(graph.components).items()
        if parameter.requires_grad and parameter not in owned
    ]


_Weights = Sequence[tuple[nn.Module, dict[str, Any], Mapping[str, Tensor]]]
"""(module, its dictionary of parameters or of buffers, name -> fake tensor that was put there) of each module."""


@contextmanager
def _fake_weights(components: Mapping[str, nn.Module], device: str) -> Iterator[_Weights]:
    """Within the block, all parameters and buffers are fake tensors on `device`, which it yields.

    It must be entered under the fake mode.
    """
    # nn.Module has no public way to hold a tensor of another device in a parameter's place for a while.
    tables: list[tuple[nn.Module, dict[str, Any]]] = [
        (module, table)
        for component in components.values()
        for module in component.modules()
        for table in (module._parameters, module._buffers)
    ]
    originals = [dict(table) for _, table in tables]
    weights = []
    try:
        for module, table in tables:
            fakes = {
                name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                for name, tensor in table.items()
                if tensor is not None
            }
            table.update(fakes)
            weights.append((module, table, fakes))
        yield weights
    finally:
        for (_, table), original in zip(tables, originals, strict=True):
            table.update(original)


def _changed(weights: _Weights) -> dict[nn.Module, str]:
    """Module -> name of a parameter or buffer that it has written to, or has replaced, since `_fake_weights` began."""
    return {
        module: name
        for module, table, fakes in weights
        for name, fake in fakes.items()
        # The fakes were new, so any version above 0 is a write.
        if fake._version or table[name] is not fake
    }


class _Operations(TorchDispatchMode):
    """Within its block, it counts each layer's floating-point operations by torch's formulas, and watches its conduct.

    torch's own `FlopCounterMode` also attributes them to modules, which takes a third of the time of a description.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = ""
        """The name of the layer that runs; the caller sets it."""
        self.of_layer: Counter[str] = Counter()
        """Name of a layer -> number of its floating-point operations."""
        self.conduct = Conduct()
        """The faults of layers."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.conduct.see(self.layer, func, args, kwargs or {})
        packet = func.overloadpacket
        if packet is _ATTENTION_OF_CPUS:
            query, key, value = (tensor.shape for tensor in args[:3])
            self.of_layer[self.layer] += sdpa_flop_count(query, key, value)
        elif packet in flop_registry:
            self.of_layer[self.layer] += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        return result


def _run_fake(
    graph: LayerGraph, batch: int, autocast: torch.dtype | None, device: str, counter: _Operations | None = None
) -> dict[str, Tensor]:
    """Name -> tensor, of all tensors of the graph, after a run of `batch` samples on fake tensors.

    `counter`: its field `layer` is set to the layer that runs.

    Raises:
        ModelError: a layer cannot run, or does not return the tensors that it should.
    """
    tensors = {
        spec.name: torch.zeros((batch, *spec.shape), dtype=getattr(torch, spec.dtype), device=device)
        for spec in graph.given
    }
    with torch.autocast(device, dtype=autocast, enabled=autocast is not None, cache_enabled=False):
        for layer in graph.layers:
            if counter is not None:
                counter.layer = layer.name
            written = _run_layer(layer, graph, tensors)
            tensors.update(zip(layer.writes, written, strict=True))
    return tensors


def _run_layer(layer: Layer, graph: LayerGraph, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    reads = [tensors[name] for name in layer.reads]
    versions = [tensor._version for tensor in reads]
    try:
        written = layer.run(graph.components[layer.component], *reads)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        shapes = ", ".join(f"{name} {tuple(tensors[name].shape)}" for name in layer.reads)
        raise ModelError(f"{layer.name} cannot run on {shapes}: {error}") from error
    if odd := [type(one).__name__ for one in written if not isinstance(one, Tensor)]:
        raise ModelError(f"{layer.name} returned a {odd[0]}; a layer returns tensors, one for each name that it writes")
    if len(written) != len(layer.writes):
        writes = f"{len(layer.writes)} ({', '.join(layer.writes)})"
        raise ModelError(
            f"{layer.name} returned {len(written)} tensors, but it writes {writes}; return one for each name"
        )
    changed = [name for name, tensor, v in zip(layer.reads, reads, versions, strict=True) if tensor._version != v]
    if changed:
        raise ModelError(f"{layer.name} changes in place what it reads: {', '.join(changed)}")
    return written


def _problems_of_shapes(
    graph: LayerGraph, first: Mapping[str, Tensor], second: Mapping[str, Tensor], batch: int
) -> list[str]:
    problems = []
    for name, tensor in first.items():
        shapes = tuple(tensor.shape), tuple(second[name].shape)
        if shapes[0][:1] != (batch,) or shapes[1] != (batch + 1, *shapes[0][1:]):
            problems.append(
                f"dimension 0 of {name} is not the batch: {shapes[0]} for {batch} samples, {shapes[1]} for {batch + 1}"
            )
        if dtype_name(tensor.dtype) not in BYTES_OF_DTYPE:
            problems.append(f"{name} has the dtype {dtype_name(tensor.dtype)}; known are {', '.join(BYTES_OF_DTYPE)}")
    problems += [
        f"{spec.name} is read as {spec.shape} {spec.dtype}, but written as {tuple(first[spec.name].shape[1:])} "
        f"{dtype_name(first[spec.name].dtype)}"
        for spec in graph.fed_back
        if (spec.shape, spec.dtype) != (tuple(first[spec.name].shape[1:]), dtype_name(first[spec.name].dtype))
    ]
    return problems + [
        f"{backbone.loss} must hold one loss a sample, but has {tuple(first[backbone.loss].shape)}"
        for backbone in graph.backbones
        if first[backbone.loss].ndim != 1
    ]


def _problems_of_samples(
    graph: LayerGraph, tensors: Mapping[str, Tensor], autocast: torch.dtype | None
) -> Iterator[str]:
    with torch.no_grad(), torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        for layer in graph.layers:
            if mixes_samples(layer, graph.components[layer.component], [tensors[name] for name in layer.reads]):
                yield (
                    f"the output of {layer.name} for a sample depends on the other samples of the batch, and a "
                    "micro-batch has others; let it treat each sample by itself (torch's recurrent and attention "
                    "modules want batch_first=True)"
                )


def _problems_of_backbones(model: ModelGraph) -> list[str]:
    """Sentences about trained layers in no backbone or in two, and about trained parameters in two backbones."""
    if len(model.backbones) == 1:
        return []
    homes: dict[str, list[str]] = {}
    users: dict[str, set[str]] = {p.name: set() for p in model.parameters if p.is_trainable}
    layers = {layer.name: layer for layer in model.layers}
    for backbone in model.backbones:
        for name in model.layers_of(backbone):
            homes.setdefault(name, []).append(backbone.name)
            for parameter in users.keys() & set(layers[name].parameters):
                users[parameter].add(backbone.name)
    frozen, problems = set(model.frozen_layers), []
    for name in (layer.name for layer in model.layers if layer.name not in frozen):
        match homes.get(name, []):
            case []:
                losses = ", ".join(backbone.loss for backbone in model.backbones)
                problems.append(f"{name} is trained, but none of {losses} depends on it; freeze it or leave it out")
            case [_]:
                pass
            case several:
                problems.append(
                    f"the backbones {' and '.join(several)} both train {name}; make them one backbone whose loss is "
                    "the sum of theirs"
                )
    shared = {name: owners for name, owners in users.items() if len(owners) > 1}
    return problems + [
        f"the backbones {' and '.join(sorted(owners))} both train the parameter {name}; give each a copy"
        for name, owners in sorted(shared.items())
        # A layer that two backbones train has been named already, with all its parameters.
        if not any(name in layers[layer].parameters for layer, several in homes.items() if len(several) > 1)
    ]


def _forms(graph: LayerGraph) -> dict[nn.Parameter, str]:
    """Parameter that holds the codes of a stored matrix -> name of its form, for all components."""
    modules = [module for component in graph.components.values() for module in component.modules()]
    stored = [(getattr(module, "codes", None), getattr(module, "form", None)) for module in modules]
    return {codes: str(form) for codes, form in stored if isinstance(codes, nn.Parameter) and isinstance(form, Form)}


def _model_graph(graph: LayerGraph, tensors: Mapping[str, Tensor], flops: Mapping[str, int]) -> ModelGraph:
    names, forms = canonical_names(graph.components), _forms(graph)
    layers: list[LayerSpec] = []
    needs_gradient: set[str] = set()
    fed_back = {spec.name for spec in graph.fed_back}
    used: dict[nn.Parameter, None] = {}
    for layer in graph.layers:
        parameters = dict.fromkeys(own_parameters(layer, graph.components[layer.component]))
        used.update(parameters)
        # A layer's results have gradients if it trains anything or reads anything that has one.
        if any(p.requires_grad for p in parameters) or not needs_gradient.isdisjoint(layer.reads):
            passed = [tensors[name] for name in layer.reads if name not in needs_gradient]
            needs_gradient.update(
                name
                for name in layer.writes
                if tensors[name].is_floating_point()
                and name not in fed_back
                and not any(tensors[name] is one for one in passed)  # passed on as it is
            )
        layers.append(
            LayerSpec(
                name=layer.name,
                component=layer.component,
                reads=layer.reads,
                writes=layer.writes,
                parameters=tuple(names[parameter] for parameter in parameters),
                flops=flops.get(layer.name, 0),
            )
        )
    return ModelGraph(
        layers=tuple(layers),
        tensors=tuple(
            TensorSpec(
                name=name,
                shape=tuple(tensor.shape[1:]),
                dtype=dtype_name(tensor.dtype),
                needs_gradient=name in needs_gradient,
            )
            for name, tensor in tensors.items()
        ),
        parameters=tuple(
            ParameterSpec(
                name=names[parameter],
                shape=tuple(parameter.shape),
                dtype=forms.get(parameter) or dtype_name(parameter.dtype),
                is_trainable=parameter.requires_grad,
            )
            for parameter in used
        ),
        inputs=tuple(spec.name for spec in graph.inputs),
        backbones=graph.backbones,
    )
