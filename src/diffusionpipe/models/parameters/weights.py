"""Weights of the layers that one rank runs: read from the folder's files, or initialised by name."""

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.errors import ModelError
from diffusionpipe.models.graphs.graph import LayerGraph, attribute, own_parameters
from diffusionpipe.models.graphs.widening import WidenedConvolution
from diffusionpipe.models.parameters.lora import is_adapter, is_magnitude, is_second_matrix, stored_name
from diffusionpipe.models.parameters.narrow_weights import is_narrow
from diffusionpipe.models.parameters.stored import StoredWeights, Tensors, opened
from diffusionpipe.models.parameters.stored_linear import StoredLinear, scales_of, stored_layers, wide_weights

_RENAMED_IN_ATTENTION = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}
_MOVED = (
    ("model.", "model.language_model."),
    ("visual.", "model.visual."),
    ("language_model.model.", "model.language_model."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("model.", ""),
)
"""(old start, new start) of tensors' names in language models that see pictures or are stored with their head."""
_NOT_STORED_ANY_MORE = ("position_ids", "lm_head.weight")
_READ_BY_AUTOCAST = (
    nn.Linear.forward,
    nn.Conv1d.forward,
    nn.Conv2d.forward,
    nn.Conv3d.forward,
    StoredLinear.forward,
)
_LISTED = 3
"""The most tensors of each kind that an error lists."""
_ALIGNED = 64
"""The number of bytes at whose multiples torch's own tensors on a CPU begin."""


def materialize(
    graph: LayerGraph,
    layers: Collection[str],
    sources: Mapping[str, StoredWeights | None],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int,
    frozen_dtype: torch.dtype | None = None,
    trained_dtype: torch.dtype | None = None,
    keeps_narrow: bool = False,
    skip_values: Collection[nn.Parameter] = (),
    started: Mapping[str, Tensor] = MappingProxyType({}),
    on_value: Callable[[str], None] | None = None,
) -> None:
    """Give real values to the parameters and buffers of the submodules that these layers use, in place.

    `sources`: component -> files of its weights, or None. Of a component with files only the tensors of these layers
    are read. Parameters of a component without files are initialised by the `reset_parameters` of their modules, on the
    CPU, under a generator keyed by (seed, canonical name of the module): the values depend on nothing else, above all
    not on which layers are here, and the global generator stays as it was. Adapters are initialised so too, because the
    files do not hold them; their second matrix is zero, and DoRA starts from the norms of the weights.

    Parameters that are real already keep their values. Floating parameters and buffers get the dtype `dtype`; the
    buffers of a component without parameters, and the codes and scales of stored layers, keep their own. Each weight of
    a stored layer is encoded as soon as it is read, so only one is wide at a time. With `frozen_dtype` the frozen
    parameters that `factors` names get that dtype, and with `trained_dtype` the trained ones. With `keeps_narrow`
    parameters that are stored in fewer bytes than float32 keep the dtype of the file.

    `started`: canonical name -> first value; a value of a lower rank than its adapter replaces only the first part.
    Parameters in `skip_values` get memory without values, which will come from elsewhere. `on_value` is called with the
    canonical name of each tensor when it has its value.

    Raises ModelError with everything that is missing, unexpected, of another shape, or cannot be initialised.
    """
    problems: list[str] = []
    values: dict[str, dict[str, Tensor]] = {}
    for name, component in graph.components.items():
        needed = _needed(graph, name, layers)
        source = sources.get(name)
        # Their values come from elsewhere, so files need not have them.
        empty = {key: tensor for key, tensor in needed.items() if tensor.is_meta and tensor in skip_values}
        is_real = not any(tensor.is_meta for tensor in needed.values())
        needed = {key: tensor for key, tensor in needed.items() if key not in empty}
        if is_real:
            values[name] = needed
        elif source is None:
            values[name] = needed | _initialised(name, component, needed, seed, problems)
        else:
            added = {key: tensor for key, tensor in needed.items() if is_adapter(key)}
            narrow = stored_layers(component)
            empty_base = {key: tensor for key, tensor in needed.items() if tensor.is_meta and key not in added}
            filled = {key: tensor for key, tensor in needed.items() if not tensor.is_meta and key not in added}
            base = filled | wide_weights(empty_base, narrow)
            misfits, stored = _Misfits(), dict[str, Tensor]()
            for file, key, place in _matched(name, component, base, source, graph.widened, misfits):
                stored |= _encoded(place, _read(file, key, base[place]), narrow)
            problems += misfits.sentences(source)
            values[name] = filled | empty_base | stored
            values[name] |= added | _initialised(name, component, added, seed, problems)
        if not problems:
            fresh = {
                key: value
                for key, value in values[name].items()
                if needed[key].is_meta and (is_adapter(key) or f"{name}.{key}" in started)
            }
            values[name] |= _started(name, fresh, started)
            values[name] |= _magnitudes(component, values[name], dtype)
            problems += [f"{name}.{key} has no value: build the buffers of {name} off the meta device"
                         for key, tensor in values[name].items() if tensor.is_meta]  # fmt: skip
        values[name] |= empty
    if problems:
        raise ModelError("\n".join(problems))
    dtype_of = {False: frozen_dtype, True: trained_dtype}
    own_dtypes = {
        name: dtype for is_trained, dtype in dtype_of.items() if dtype for name in factors(graph, is_trained=is_trained)
    }
    for name, tensors in values.items():
        dtypes = {key: own_dtypes.get(f"{name}.{key}", dtype) for key in tensors}
        dtypes |= dict.fromkeys(scales_of(graph.components[name]), torch.float32)
        if keeps_narrow:
            own = dict(graph.components[name].named_parameters())
            dtypes |= {key: tensor.dtype for key, tensor in tensors.items() if key in own and is_narrow(tensor)}
        for key in _placed(graph.components[name], tensors, torch.device(device), dtypes):
            if on_value is not None:
                on_value(f"{name}.{key}")


def factors(graph: LayerGraph, *, is_trained: bool) -> frozenset[str]:
    """The canonical names of the weights and biases of linear layers and convolutions, trained ones or frozen ones.

    Autocast casts them to its own dtype wherever they are used, so that they give the same bits if they are stored in
    it. Norms and embeddings are read as they are stored.
    """
    return frozenset(
        f"{component}.{path}.{name}" if path else f"{component}.{name}"
        for component, root in graph.components.items()
        for path, module in root.named_modules()
        if _is_read_by_autocast(type(module))
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad is is_trained and parameter.is_floating_point() and name != "scales"
    )


def _is_read_by_autocast(kind: type[nn.Module]) -> bool:
    """Whether only torch's own forward reads the weights: the class has it, or its own forward calls it by `super()`.

    A causal convolution is such a class: it pads its input and leaves the rest to torch.
    """
    for parent in kind.__mro__:
        forward = vars(parent).get("forward")
        if forward in _READ_BY_AUTOCAST:
            return True
        # The names that the function's code uses tell whether it reads the weight itself.
        names = forward.__code__.co_names if isinstance(forward, FunctionType) else ()
        if forward is not None and ("super" not in names or not {"weight", "bias"}.isdisjoint(names)):
            return False
    return False


def _needed(graph: LayerGraph, component_name: str, layers: Collection[str]) -> dict[str, Tensor]:
    """Name in the component -> parameter or buffer that these layers use, for one component."""
    component = graph.components[component_name]
    here = [layer for layer in graph.layers if layer.component == component_name and layer.name in layers]
    parameters = {parameter for layer in here for parameter in own_parameters(layer, component)}
    used = [name for layer in here for name in layer.modules]
    needed: dict[str, Tensor] = {name: p for name, p in component.named_parameters() if p in parameters}
    return needed | {
        name: buffer
        for name, buffer in component.named_buffers()
        if any(not top or f"{name}.".startswith(f"{top}.") for top in used)
    }


def _placed(
    component: nn.Module, values: Mapping[str, Tensor], device: torch.device, dtypes: Mapping[str, torch.dtype]
) -> Iterator[str]:
    """Replace tensors of a component by values, moved to `device` and cast; yields each name when that is done.

    `values`, `dtypes`: name in the component -> value, -> dtype. Tied tensors are replaced together.
    """
    has_parameters = any(True for _ in component.parameters())
    # All places of a tensor, so that tied ones stay one tensor.
    tied: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in component.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for key, tensor in table.items():
                tied.setdefault(id(tensor), []).append((table, key))
    for name, value in values.items():
        old = attribute(component, name)
        assert isinstance(old, Tensor)
        dtype = dtypes[name] if value.is_floating_point() and has_parameters else value.dtype
        is_hollow = value.is_meta
        cast = torch.empty_like(value, dtype=dtype, device=device) if is_hollow else value.detach().to(device, dtype)
        if old.is_meta and not is_hollow:
            cast = _with_own_memory(cast)
        if isinstance(old, nn.Parameter) and not old.is_meta:
            old.data = cast  # keeps the parameter that an optimizer may hold already
            yield name
            continue
        new = nn.Parameter(cast, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else cast
        for table, key in tied[id(old)]:
            table[key] = new
        yield name


def _with_own_memory(value: Tensor) -> Tensor:
    """The tensor, or a copy of it if it is in a mapped file or is a part of another tensor.

    A tensor lies anywhere in a file, and a product of one row rounds otherwise where its weight does not begin at a
    multiple of 16 bytes: the same model in another file would have other last digits in float32.
    """
    if value.device.type != "cpu" or not value.numel():
        return value
    is_part = value.untyped_storage().nbytes() > value.numel() * value.element_size()
    return value.clone() if is_part or value.data_ptr() % _ALIGNED else value


def _initialised(
    component_name: str, component: nn.Module, needed: Mapping[str, Tensor], seed: int, problems: list[str]
) -> dict[str, Tensor]:
    """Name in the component -> initial value, of the needed parameters that are on the meta device.

    A sentence for each that cannot be initialised is added to `problems`.
    """
    values: dict[str, Tensor] = {}
    missing = [name for name, tensor in needed.items() if tensor.is_meta and not is_magnitude(name)]
    for path in dict.fromkeys(name.rpartition(".")[0] for name in missing):
        module: Any = attribute(component, path)
        names = {f"{path}.{name}" if path else name: name for name, _ in module.named_parameters(recurse=False)}
        if hasattr(module, "reset_parameters") or type(module).__name__ in _INITIALISERS:
            values |= _reset(module, names, f"{component_name}.{path}", seed)
            continue
        problems += [
            f"{component_name}.{name} cannot be initialised: {type(module).__name__} has no reset_parameters; "
            "give the component stored weights"
            for name in missing
            if name in names
        ]
    return {name: values[name] for name in missing if name in values}


def _reset(module: Any, own: Mapping[str, str], canonical: str, seed: int) -> dict[str, Tensor]:
    """Name in the component -> value of a module's parameter after `reset_parameters` on the CPU.

    The module stays as it was. `own`: name in the component -> name in the module. `canonical`: the module's canonical
    name, which is the key of the random numbers with `seed`.
    """
    if isinstance(module, StoredLinear):
        layer = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
        drawn = _reset(layer, {name: name for name, _ in layer.named_parameters()}, canonical, seed)
        drawn |= module.encoded(drawn["weight"])
        return {path: drawn[name] for path, name in own.items()}
    before = dict(module._parameters)
    # 8 bytes of a hash, halved because a seed has 63 bits.
    digest = hashlib.blake2b(f"{seed} {canonical}".encode(), digest_size=8).digest()
    try:
        for name in own.values():
            module._parameters[name] = nn.Parameter(torch.empty(before[name].shape, dtype=torch.float32))
        # The global generator is as it was after the block.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(int.from_bytes(digest, "big") >> 1)
            (_INITIALISERS.get(type(module).__name__) or type(module).reset_parameters)(module)
            if is_second_matrix(f"{canonical}."):
                nn.init.zeros_(module.weight)
        return {path: module._parameters[name].detach() for path, name in own.items()}
    finally:
        module._parameters.update(before)


def _started(component_name: str, values: Mapping[str, Tensor], started: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name in the component -> value, for the names in `values` for which `started` has a value.

    A started value of a lower rank replaces the first part; the rest stays, which is zero in a second matrix.
    """
    found = {}
    for name in values:
        given = started.get(f"{component_name}.{name}")
        if given is not None and (is_magnitude(name) or given.shape == values[name].shape):
            found[name] = given
        elif given is not None:
            found[name] = values[name].to(given.dtype, copy=True)
            found[name][tuple(map(slice, given.shape))] = given
    return found


def _magnitudes(component: nn.Module, values: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Name in the component -> norms from which DoRA starts, for parameters of norms on the meta device.

    They are the norms of weights and adapters together, so that the first result is the same as without norms.
    """
    found = {}
    for name in (name for name, tensor in values.items() if is_magnitude(name) and tensor.is_meta):
        layer, _, _ = name.partition(".lora_magnitude_vector.")
        module: Any = attribute(component, layer)
        weight = values[f"{layer}.base_layer.weight"].detach().to(dtype)
        down, up = (values[f"{layer}.{one}.default.weight"].detach().to(dtype) for one in ("lora_A", "lora_B"))
        # Of a convolution the second matrix is 1 x 1, so the product of flattened matrices is the kernel's change.
        added = (up.flatten(1) @ down.flatten(1)).reshape(weight.shape)
        norms: Any = attribute(component, name.removesuffix(".weight"))
        found[name] = norms.get_weight_norm(weight, added, module.scaling["default"])
    return found


def _place_randomly(pooling: Any) -> None:
    """Draw the positional embedding of a pooling layer at random, as diffusers' constructor does."""
    nn.init.normal_(pooling.positional_embedding, std=pooling.positional_embedding.shape[-1] ** -0.5)


def _keep_scale(norm: Any) -> None:
    """Set the norm's weights to 1 and its biases to 0, as diffusers' constructor does."""
    for name, parameter in norm.named_parameters(recurse=False):
        nn.init.constant_(parameter, 0.0 if name == "bias" else 1.0)


_INITIALISERS: Mapping[str, Callable[[Any], None]] = {"AttentionPooling": _place_randomly, "RMSNorm": _keep_scale}
"""Name of a class without `reset_parameters` -> function that initialises a module of it."""


def misfits_of(graph: LayerGraph, component_name: str, source: StoredWeights) -> list[str]:
    """[a sentence about all names and shapes in a component's files that do not fit it]; [] if all fit.

    No tensor is read.

    Raises ModelError for a file that cannot be read.
    """
    component, misfits = graph.components[component_name], _Misfits()
    # Also what no layer uses, such as the decoder of a VAE, which is needed later.
    own = _own_tensors(component)
    # A tensor that its class ties to another one is stored once, e.g. the embedding of a T5.
    tied = set(getattr(component, "_tied_weights_keys", None) or ())
    base = {key: tensor for key, tensor in own.items() if not is_adapter(key) and key not in tied}
    for _ in _matched(component_name, component, base, source, graph.widened, misfits):
        pass
    return misfits.sentences(source)


def fill(component_name: str, component: nn.Module, source: StoredWeights, *, device: torch.device) -> None:
    """Set a component's parameters and stored buffers to their values in its files, on the device and in float32.

    Raises ModelError for weights that are damaged, or belong to another component.
    """
    own = dict(component.named_parameters()) | dict(component.named_buffers())
    values, misfits = dict[str, Tensor](), _Misfits()
    for tensors, key, name in _matched(component_name, component, own, source, (), misfits):
        values[name] = tensors.get(key)
    if sentences := misfits.sentences(source):
        raise ModelError("\n".join(sentences))
    for _ in _placed(component, values, device, dict.fromkeys(values, torch.float32)):
        pass


def tensors_of(
    component_name: str, component: nn.Module, source: StoredWeights, names: Collection[str]
) -> dict[str, Tensor]:
    """Name -> tensor in the component's files, for these names of its parameters and buffers.

    Names that no file holds are left out.

    Raises ModelError for a file that cannot be read.
    """
    return dict(tensors_in_turn(component_name, component, source, names))


def tensors_in_turn(
    component_name: str, component: nn.Module, source: StoredWeights, names: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each of these parameters and buffers that a component's files hold, read one after the other.

    Raises ModelError for a file that cannot be read.
    """
    own = _own_tensors(component)
    # On the meta device, because tensors with values count as filled and are not read.
    wanted = {name: own[name].detach().to("meta") for name in names if name in own}
    for tensors, key, name in _matched(component_name, component, wanted, source, (), _Misfits()):
        yield name, tensors.get(key)


def names_in(component: nn.Module, source: StoredWeights) -> dict[str, str]:
    """Name of a component's tensor -> its other name in the component's files, for tensors that have one.

    Raises ModelError for a file that cannot be read.
    """
    names, found = _state_names(component), dict[str, str]()
    for file in source.files:
        with opened(file) as tensors:
            found |= {new: key for key in tensors.names() for new in [_name_of(key, names)] if new is not None}
    stored = set(found.values())
    return {name: found[canonical] for name, canonical in names.items() if name not in stored and canonical in found}


@dataclass(slots=True)
class _Misfits:
    """The tensors in which files and a component differ. Mutable: it grows while files are read."""

    missing: list[str] = field(default_factory=list)
    """Canonical names of tensors that no file has."""
    unexpected: list[str] = field(default_factory=list)
    """Names in files that the component does not have."""
    misshapen: list[str] = field(default_factory=list)
    """Clauses that name a tensor with a wrong shape, and both shapes."""

    def sentences(self, source: StoredWeights) -> list[str]:
        """[a sentence about all these tensors], for an error about the files; [] if there are none."""
        parts = [
            f"{len(names)} tensor{'s' if len(names) > 1 else ''} {what} ({_listed(names)})"
            for what, names in (("missing", self.missing), ("unexpected", self.unexpected))
            if names
        ]
        parts += [_listed(self.misshapen)] if self.misshapen else []
        if not parts:
            return []
        config = source.files[0].parent / "config.json"
        is_of_one_file = config.is_symlink() and source.source.parent != config.parent
        shown = config.readlink() if is_of_one_file else config
        other = "set model.config to this model's configuration, or " if is_of_one_file else ""
        return [f"{source.source} does not fit {shown}: {'; '.join(parts)}; {other}get the model again"]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def _matched(
    component_name: str,
    component: nn.Module,
    needed: Mapping[str, Tensor],
    source: StoredWeights,
    widened: Collection[str],
    misfits: _Misfits,
) -> Iterator[tuple[Tensors, str, str]]:
    """(open file, name in the file, name in the component) of each tensor in `needed` that the files hold.

    Differences are added to `misfits`. Files may lack the further inputs of weights in `widened`, canonical names.

    Raises ModelError for a file that cannot be read.
    """
    names = _state_names(component)
    wanted = {
        name: tensor
        for name, tensor in needed.items()
        if name in names.values() and (tensor.is_meta or not isinstance(tensor, nn.Parameter))
    }
    left = dict.fromkeys(wanted)
    overlooked = _overlooked(component)
    for file in source.files:
        with opened(file) as tensors:
            for key in tensors.names():
                name = _name_of(key, names)
                if name is None:
                    misfits.unexpected += [key] if not overlooked.search(key) else []
                elif name in wanted:
                    # A tensor may be stored twice, under an old and a new name.
                    left.pop(name, None)
                    shape, expected = tensors.shape(key), tuple(wanted[name].shape)
                    is_widened = f"{component_name}.{name}" in widened
                    if shape == expected or (is_widened and shape == _plain_shape(component, name)):
                        yield tensors, key, name
                    else:
                        misfits.misshapen.append(f"{key} has shape {shape}, but the configuration says {expected}")
    misfits.missing += [f"{component_name}.{name}" for name in left]


def _own_tensors(component: nn.Module) -> dict[str, Tensor]:
    """Name -> parameter or buffer of a component, with a wide weight in place of codes and scales, as in its files."""
    return wide_weights(dict(component.named_parameters()), stored_layers(component)) | dict(component.named_buffers())


def _encoded(name: str, value: Tensor, stored: Mapping[str, StoredLinear]) -> dict[str, Tensor]:
    """Name in the component -> value, of all that follow from one tensor of its files: itself, or codes and scales.

    `stored`: its layers that are stored narrow, by name.
    """
    path, _, last = name.rpartition(".")
    if last != "weight" or path not in stored:
        return {name: value}
    return {f"{path}.{part}": tensor for part, tensor in stored[path].encoded(value).items()}


def _plain_shape(component: nn.Module, name: str) -> tuple[int, ...]:
    """The shape of a widened convolution's weights before it was widened."""
    layer = attribute(component, name.rpartition(".")[0])
    assert isinstance(layer, WidenedConvolution)
    return (layer.weight.shape[0], layer.plain, *layer.weight.shape[2:])


def _overlooked(component: nn.Module) -> re.Pattern[str]:
    """A pattern of names of tensors that files may hold beside a component's, e.g. the decoder of a T5."""
    patterns = getattr(component, "_keys_to_ignore_on_load_unexpected", None) or ()
    ends = (f"{re.escape(end)}$" for end in _NOT_STORED_ANY_MORE)
    return re.compile("|".join((*ends, *patterns)))


def _read(tensors: Tensors, key: str, expected: Tensor) -> Tensor:
    """The tensor `key` of a file, with zeros for further inputs if it has fewer inputs than `expected`."""
    stored = tensors.get(key)
    if stored.shape == expected.shape:
        return stored
    further = stored.new_zeros(len(stored), expected.shape[1] - stored.shape[1], *stored.shape[2:])
    return torch.cat([stored, further], dim=1)


def _state_names(component: nn.Module) -> dict[str, str]:
    """Name in the component's state without adapters -> name of its tensor; tied names have the first one as value."""
    canonical: dict[int, str] = {}
    state = wide_weights(component.state_dict(keep_vars=True), stored_layers(component))
    return {stored_name(name): canonical.setdefault(id(tensor), name) for name, tensor in state.items()}


def _name_of(key: str, names: Mapping[str, str]) -> str | None:
    """The name in the component of a tensor that files call `key`; None if it has no such tensor.

    `names`: see `_state_names`.
    """
    return names.get(key) or next((names[new] for new in _new_names(key) if new in names), None)


def _new_names(key: str) -> Iterator[str]:
    """The names that a tensor may have today if an older diffusers or transformers has written it as `key`."""
    plain = key.removeprefix("text_model.")
    if ".attentions." in plain:
        for old, new in _RENAMED_IN_ATTENTION.items():
            plain = plain.replace(old, new)
    yield plain
    # Several may fit one name; the caller takes the first that the component has.
    for old, new in _MOVED:
        if key.startswith(old):
            yield new + key.removeprefix(old)
