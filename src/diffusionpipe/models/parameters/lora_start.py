"""Adapters of a file as the values that a training starts from.

file        down (4, in)   up (out, 4)   scale 2      of diffusers, peft, kohya or ComfyUI
recipe      lora_A (8, in) lora_B (out, 8)  scale 1   of another rank only where resizing is allowed
started     lora_A[:4] = down,  lora_B[:, :4] = 2 up  the other columns of lora_B are zero: the product is the file's
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from diffusionpipe.errors import ModelError
from diffusionpipe.models.graphs.graph import LayerGraph, own_parameters
from diffusionpipe.models.parameters.adapter_names import Adapter, from_foreign
from diffusionpipe.models.parameters.lora import DENOISERS, LoraSettings, adapted_layers, parameters_of
from diffusionpipe.models.parameters.lora_read import PEFT, StoredAdapters, adapter_file, read_adapters
from diffusionpipe.models.parameters.lora_targets import is_text_encoder

_OTHER_NORMS = ".dora_scale"
_LISTED = 3
"""The most names that an error message lists."""

Adapters = dict[str, dict[str, Adapter]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedAdapters:
    """The first values of adapters, from a file, and sentences for the user about adapters that differ from it."""

    values: Mapping[str, Tensor] = field(default_factory=dict)
    """Canonical name of an adapter's parameter -> its first value; a value of a lower rank is the first part of its
    parameter."""
    said: tuple[str, ...] = ()
    """Sentences for the user about resized adapters, and about layers without an adapter in the file."""


def started_adapters(
    place: Path, graph: LayerGraph, settings: LoraSettings, *, pipeline: str, resizes: bool
) -> StartedAdapters:
    """The first values of a graph's adapters from a file of adapters, or from the file in a folder.

    The second matrices are multiplied by the file's scale and divided by the scale of `settings`: each layer adds the
    same as in a pipeline of diffusers that loads the file. With `resizes` adapters of a higher rank are cut to the
    largest singular values. `pipeline`: the class of the graph's pipeline.

    Raises:
        ModelError: the file cannot be read, or its adapters have other layers, shapes, ranks or kinds than the graph's.
    """
    modules = {name: module for name, module in graph.components.items() if _can_have_adapters(name, module)}
    wanted = {name: ranks for name, module in modules.items() if (ranks := adapted_layers(module))}
    files = _files(place, modules)
    read: Adapters = {}
    for component, file in files:
        stored = _read_finite(file)
        own = modules if component is None else {component: modules[component]}
        for name, layers in _adapters_in(stored, own, pipeline, wanted).items():
            read.setdefault(name, {}).update(layers)
    what = str(place if len(files) > 1 else files[0][1])
    found = _those_wanted(what, read, wanted, graph)
    _check_kinds(what, found, settings)
    said = _new_layers(what, found, wanted)
    found, lost = _fitted(what, found, wanted, resizes=resizes)
    values = {
        f"{component}.{name}": value
        for component, layers in found.items()
        for layer, adapter in layers.items()
        for name, value in parameters_of(layer, _at_scale(adapter, settings.scale)).items()
    }
    return StartedAdapters(values=values, said=(*said, *lost))


def resized(adapter: Adapter, rank: int) -> tuple[Adapter, float, float]:
    """(adapter of rank `rank` nearest to the given one, squared norm of the lost part, squared norm of the whole).

    With up = Q1 R1 and down^T = Q2 R2 the product has the singular values of R1 R2^T. All of them go into the second
    matrix, as in kohya-ss/sd-scripts, networks/resize_lora.py, which computes them from the whole product.
    """
    down = adapter.down.flatten(1).double()  # (r, I)
    up = adapter.up.flatten(1).double()  # (O, r)
    # QR of both factors: the SVD is then of an (r, r) matrix in place of an (O, I) one.
    left, upper = torch.linalg.qr(up)
    right, lower = torch.linalg.qr(down.T)
    rotation, values, other = torch.linalg.svd(upper @ lower.T)  # (r, r), (r,), (r, r)
    new_up = left @ rotation[:, :rank] * values[:rank]  # (O, n)
    new_down = other[:rank] @ right.T  # (n, I)
    smaller = replace(
        adapter,
        down=new_down.to(_wide(adapter.down)).reshape(rank, *adapter.down.shape[1:]),
        up=new_up.to(_wide(adapter.up)).reshape(len(up), rank, *adapter.up.shape[2:]),
    )
    square = adapter.scale**2
    return smaller, square * float(values[rank:].square().sum()), square * float(values.square().sum())


def _can_have_adapters(name: str, module: nn.Module) -> bool:
    return name in DENOISERS or is_text_encoder(type(module).__name__)


def _files(place: Path, modules: Mapping[str, nn.Module]) -> list[tuple[str | None, Path]]:
    """(component, path) of each file of adapters at `place`; (None, path) unless each component has a folder."""
    parts = [(name, place / name) for name in modules if (place / name / "adapter_config.json").is_file()]
    if parts:
        return [(name, adapter_file(folder)) for name, folder in parts]
    return [(None, adapter_file(place))]


def _read_finite(file: Path) -> StoredAdapters:
    """The contents of a file of adapters. Raises ModelError if it cannot be read or has a non-finite number."""
    try:
        stored = read_adapters(file)
    except ModelError as error:
        raise ModelError(f"lora.start: {error}") from error
    if ruined := [name for name, tensor in stored.tensors.items() if not bool(tensor.isfinite().all())]:
        raise ModelError(
            f"lora.start: {len(ruined)} of {len(stored.tensors)} tensors of {file} hold numbers that are not finite "
            f"({_listed(ruined)}); give another file"
        )
    return stored


def _adapters_in(
    stored: StoredAdapters, modules: Mapping[str, nn.Module], pipeline: str, ranks: Mapping[str, Mapping[str, int]]
) -> Adapters:
    """Component -> layer -> adapter, from a file.

    `ranks`: component -> layer -> expected rank.

    Raises:
        ModelError: the file does not fit the model, or fits several components.
    """
    if others := [name for name in stored.tensors if name.endswith(_OTHER_NORMS)]:
        raise ModelError(
            f"lora.start: {stored.file} holds norms of DoRA by another rule ({others[0]}); start from a file without "
            "them, or from one of peft or diffusers"
        )
    read = _reader(stored, pipeline, ranks)
    if not stored.tensors:
        raise ModelError(f"lora.start: {stored.file} holds no tensors; give another file")
    if len(modules) == 1 or not all(name.startswith(PEFT) for name in stored.tensors):
        return read(modules)
    # peft's file is of one component, and does not say which.
    fitting, problems = [], []
    for name, module in modules.items():
        try:
            fitting.append(read({name: module}))
        except ModelError as error:
            problems.append(error)
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise problems[0]
    named = " and ".join(name for found in fitting for name in found)
    raise ModelError(
        f"lora.start: {stored.file} fits {named}; put it into a folder with the name of its component, and give the "
        "folder around that"
    )


def _reader(
    stored: StoredAdapters, pipeline: str, ranks: Mapping[str, Mapping[str, int]]
) -> Callable[[Mapping[str, nn.Module]], Adapters]:
    def read(modules: Mapping[str, nn.Module]) -> Adapters:
        try:
            return from_foreign(stored.tensors, modules, pipeline=pipeline, scale=stored.scale, ranks=ranks)
        except ModelError as error:
            raise ModelError(f"lora.start: {stored.file} does not fit the model: {error}") from error

    return read


def _those_wanted(file: str, read: Adapters, wanted: Mapping[str, Mapping[str, int]], graph: LayerGraph) -> Adapters:
    """Component -> layer -> adapter of `read`, for the layers in `wanted`, which have an adapter in the graph.

    `file`: its path, for errors. `wanted`: component -> layer -> rank.

    Raises:
        ModelError: the file has other adapters that change a result, or none of these.
    """
    lost = [
        f"{component}.{layer}"
        for component, layers in read.items()
        for layer, adapter in layers.items()
        # An adapter of zeros or of a layer that nothing reads may be lost without harm.
        if layer not in wanted.get(component, ()) and adapter.up.any() and _is_read(graph, component, layer)
    ]
    components = {name.partition(".")[0] for name in lost}
    if others := sorted(components - wanted.keys()):
        raise ModelError(
            f"lora.start: {file} has adapters of {', '.join(others)}, for which this run trains none; add them to "
            "model.train, or start from a file without them"
        )
    if lost:
        raise ModelError(
            f"lora.start: {file} has adapters of {len(lost)} layers that have none here ({_listed(lost)}); name them "
            'in lora.target_modules, or set it to "linear" or "all"'
        )
    found = {
        component: {layer: adapter for layer, adapter in layers.items() if layer in wanted[component]}
        for component, layers in read.items()
        if component in wanted
    }
    if not any(found.values()):
        raise ModelError(f"lora.start: {file} has adapters of none of the layers that have one here; give another file")
    return found


def _is_read(graph: LayerGraph, component: str, layer: str) -> bool:
    """Whether some layer of the graph uses this linear layer or convolution."""
    module = graph.components[component].get_submodule(layer)
    weight = getattr(module, "base_layer", module).weight
    return any(
        weight is parameter
        for one in graph.layers
        if one.component == component
        for parameter in own_parameters(one, graph.components[component])
    )


def _check_kinds(file: str, found: Adapters, settings: LoraSettings) -> None:
    """Check that the file has no norms of DoRA if the run's adapters have none. Raises ModelError if it has."""
    if not settings.dora and any(one.magnitude is not None for own in found.values() for one in own.values()):
        raise ModelError(f"lora.start: {file} holds adapters of DoRA; set lora.dora = true, or give another file")


def _new_layers(file: str, found: Adapters, wanted: Mapping[str, Mapping[str, int]]) -> list[str]:
    new = [f"{component}.{layer}" for component, own in wanted.items() for layer in own
           if layer not in found.get(component, {})]  # fmt: skip
    if not new:
        return []
    total = sum(map(len, wanted.values()))
    return [f"{file} has no adapters of {len(new)} of {total} layers ({_listed(new)}); these add nothing at first"]


def _fitted(
    file: str, found: Adapters, wanted: Mapping[str, Mapping[str, int]], *, resizes: bool
) -> tuple[Adapters, list[str]]:
    """(the adapters with at most the wanted ranks, [a sentence about the lost part] or [] if all ranks are the same).

    `wanted`: component -> layer -> rank.

    Raises:
        ModelError: a rank differs, and `resizes` is False.
    """
    other = {
        f"{component}.{layer}": (adapter.rank, wanted[component][layer])
        for component, own in found.items()
        for layer, adapter in own.items()
        if adapter.rank != wanted[component][layer]
    }
    if other and not resizes:
        name, (stored, rank) = next(iter(other.items()))
        raise ModelError(
            f"lora.start: adapters of {len(other)} layers of {file} have another rank ({name}: {stored}, here {rank}); "
            f"set lora.rank = {stored}, or lora.resize = true to change the file's"
        )
    lost = total = 0.0
    worst = (0.0, "")
    fitted: Adapters = {}
    for component, own in found.items():
        for layer, adapter in own.items():
            rank = wanted[component][layer]
            if adapter.rank > rank:
                fitted.setdefault(component, {})[layer], missing, whole = resized(adapter, rank)
                lost, total = lost + missing, total + whole
                # The share of the norm, not of its square, as the sentence gives it.
                worst = max(worst, ((missing / whole) ** 0.5 if whole else 0.0, f"{component}.{layer}"))
            else:
                fitted.setdefault(component, {})[layer] = adapter
    if not other:
        return fitted, []
    text = f"{file}: adapters of {len(other)} layers were brought to other ranks; "
    if not worst[1]:
        return fitted, [text + "their products are the same"]
    share = (lost / total) ** 0.5 if total else 0.0
    return fitted, [text + f"this took {share:.2%} of the norm of what they add, at most {worst[0]:.2%} ({worst[1]})"]


def _at_scale(adapter: Adapter, scale: float) -> Adapter:
    """An equal adapter with this scale: its second matrix is divided by it and multiplied by the old scale."""
    return replace(adapter, up=adapter.up.to(_wide(adapter.up)) * (adapter.scale / scale), scale=scale)


def _wide(matrix: Tensor) -> torch.dtype:
    """The dtype in which to compute with a matrix: float64 if it has that dtype, else float32."""
    return torch.promote_types(matrix.dtype, torch.float32)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
