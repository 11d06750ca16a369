"""Files of adapters in other programs' names: `to_foreign` writes, `from_foreign` reads, each is the other's inverse.

Both work on the components of a pipeline that have adapters, e.g. {"unet": module}. The modules give names and sizes;
they may hold peft's adapters already or not, and their weights may be on the meta device.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.errors import ModelError
from diffusionpipe.models.parameters.adapter_names.families import (
    FORMS,
    KOHYA,
    AdapterNaming,
    text_layer,
    with_text_model,
)
from diffusionpipe.models.parameters.adapter_names.matrices import (
    Adapter,
    difference,
    joined,
    joined_differences,
    scaled,
    separated,
    with_one_alpha,
)
from diffusionpipe.models.parameters.adapter_names.originals import (
    OriginalLayer,
    OriginalRows,
    layer_sizes,
    original_layers,
)

Adapters = Mapping[str, Mapping[str, Adapter]]
"""Component, e.g. "unet" -> the layer's name in it, e.g. "mid_block.attentions.0.proj_in" -> its adapter."""

DENOISERS = ("unet", "transformer")
_PAIRS = (
    (".lora_up.weight", ".lora_down.weight"),  # kohya
    (".lora_B.weight", ".lora_A.weight"),  # peft, diffusers
    (".lora_B.default.weight", ".lora_A.default.weight"),  # peft's state before its adapter's name is left out
    (".lora.up.weight", ".lora.down.weight"),  # diffusers' training scripts
    ("_lora.up.weight", "_lora.down.weight"),  # the oldest files of diffusers
    (".lora_linear_layer.up.weight", ".lora_linear_layer.down.weight"),  # its text encoders
)
_ALPHA = ".alpha"
_DIFFERENCE = ".diff"
_MAGNITUDES = (".lora_magnitude_vector.weight", ".lora_magnitude_vector.default.weight", ".lora_magnitude_vector")
_OTHER_KINDS = {
    ".hada_w1_a": "adapters of LoHa",
    ".lokr_w1": "adapters of LoKr",
    ".lokr_w1_a": "adapters of LoKr",
    ".lora_mid.weight": "adapters with a core matrix (Tucker)",
    ".oft_blocks": "adapters of OFT",
    ".oft_diag": "adapters of OFT",
    _DIFFERENCE: "whole differences of weights",
    ".diff_b": "differences of biases",
}
"""Kinds of adapters in files of other programs beside pairs of matrices, by the end of a tensor's name."""
_SAID = 3
"""The most names that an error lists."""


def check_readable(pipeline: str, modules: Mapping[str, nn.Module], targets: Mapping[str, Collection[str]]) -> None:
    """Check that the format "comfy" has a name for each layer with an adapter.

    `modules`: component -> module. `targets`: component -> names of its layers with adapters.

    Raises ModelError if a layer has none, or ComfyUI reads no adapters of the pipeline.
    """
    form = FORMS.get(pipeline)
    if form is None:
        known = ", ".join(name.removesuffix("Pipeline") for name in FORMS)
        raise ModelError(f'ComfyUI reads no adapters of {pipeline}: remove "comfy", which is for {known}')
    missing = []
    for component, names in targets.items():
        found = {part.module for _, layer in _layers(component, modules[component], form) for part in layer.parts}
        missing += [f"{component}.{name}" for name in names if name not in found]
    if missing:
        raise ModelError(
            f'the format "comfy" has no name for {_listed(missing)}; remove "comfy", or leave these layers without '
            "adapters, e.g. with lora.exclude"
        )


Weights = Callable[[str, Collection[str]], Mapping[str, Tensor]]
"""`weights(component, names of layers)` -> name -> weight of the model without adapters."""


def to_foreign(
    adapters: Adapters, modules: Mapping[str, nn.Module], *, pipeline: str, weights: Weights | None = None
) -> dict[str, Tensor]:
    """Name -> tensor of a file of adapters that ComfyUI reads, and diffusers where it can.

    q, k and v that are one layer there are joined block by block: three times the rank and the alpha. CLIP gets an
    adapter of zeros on out_proj where q, k or v have one, because diffusers finds the kind of a file by it. Adapters of
    DoRA are written as whole differences of `weights`, which ComfyUI adds; diffusers does not read them. See `families`
    for the names.

    Raises:
        ModelError: ComfyUI has no name for a layer, or takes adapters of this kind otherwise.
    """
    check_readable(pipeline, modules, adapters)
    form = FORMS[pipeline]
    if any(adapter.magnitude is not None for own in adapters.values() for adapter in own.values()):
        if weights is None:
            raise ModelError(
                'DoRA cannot be written in the format "comfy": ComfyUI divides by the norm of other weights, and '
                'diffusers drops the magnitudes; write whole differences (lora.dora_as_difference), or "diffusers" '
                "alone"
            )
        return _differences(adapters, modules, form, weights)
    written: dict[str, Tensor] = {}
    for component, own in adapters.items():
        complete = _with_out_proj(own, modules[component])
        if form.has_one_alpha:
            complete = with_one_alpha(complete)
        layers = [(prefix, layer) for prefix, layer in _layers(component, modules[component], form)]
        present = [(p, layer) for p, layer in layers if any(part.module in complete for part in layer.parts)]
        if component in DENOISERS and form.whole_blocks and not _has_whole_blocks(form, [one for _, one in present]):
            present = [(form.partial, layer) for _, layer in present]
        for prefix, layer in present:
            written |= _tensors(prefix, layer.name, joined(layer.parts, complete))
    return written


def _differences(
    adapters: Adapters, modules: Mapping[str, nn.Module], form: AdapterNaming, weights: Weights
) -> dict[str, Tensor]:
    """Name -> tensor of a file of whole differences: for each foreign layer the change of its weight, in float32."""
    written: dict[str, Tensor] = {}
    for component, own in adapters.items():
        old = weights(component, own)
        for prefix, layer in _layers(component, modules[component], form):
            found = {
                part.module: difference(own[part.module], old[part.module])
                for part in layer.parts
                if part.module in own
            }
            if found:
                name = layer.name if prefix.endswith(".") else layer.name.replace(".", "_")
                written[f"{prefix}{name}{_DIFFERENCE}"] = joined_differences(layer.parts, found).float()
    return written


def from_foreign(
    tensors: Mapping[str, Tensor],
    modules: Mapping[str, nn.Module],
    *,
    pipeline: str,
    scale: Callable[[str, str, int], float] = lambda *_: 1.0,
    ranks: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
) -> dict[str, dict[str, Adapter]]:
    """Component -> layer -> adapter, from a file in any of the names of diffusers, peft, kohya's scripts and ComfyUI.

    Of the `modules`, components of that pipeline, each layer is found under diffusers' and its authors' name, with dots
    or underscores, with each usual prefix. A layer that joins several is separated. `scale(component, layer, rank)`
    gives the scale of an adapter without an alpha beside it, from the file's header or adapter_config.json. `ranks`:
    component -> layer -> expected rank; only a layer that joins several needs them, where a part of it adds nothing.

    Raises:
        ModelError: names that are none of these layers', matrices without their partner or of other sizes, or other
            kinds of adapters than two matrices. Each error lists the first few.
    """
    found, alphas, magnitudes, others = _sorted_by_layer(tensors)
    known = _known_names(modules, FORMS.get(pipeline))
    unknown = [name for name in [*found, *alphas, *magnitudes] if _plain(name) not in known]
    for end, kind in _OTHER_KINDS.items():
        if of_kind := [name for name in others if name.endswith(end)]:
            remedy = "; the file of diffusers' format beside it has the adapters" if end == _DIFFERENCE else ""
            raise ModelError(f"it holds {kind} ({of_kind[0]}); only adapters of two matrices (LoRA) are read{remedy}")
    if strange := [*others, *dict.fromkeys(unknown)]:
        names = "1 name is" if len(strange) == 1 else f"{len(strange)} names are"
        raise ModelError(
            f"{names} of no layer of {pipeline} that takes adapters, or no pair of matrices: {_listed(strange)}; was "
            "it trained from another model?"
        )
    if single := [name for name, pair in found.items() if len(pair) < 2]:
        raise ModelError(f"one matrix of two is missing: {_listed(single)}; the file is incomplete")
    misfits = [_misfit(name, pair, known[_plain(name)], modules) for name, pair in found.items()]
    if others := [text for text in misfits if text]:
        raise ModelError(
            f"{len(others)} of {len(found)} adapters are for layers of other sizes: {_listed(others)}; was it trained "
            "from another model?"
        )
    read: dict[str, dict[str, Adapter]] = {}
    for name, pair in found.items():
        component, layer = known[_plain(name)]
        down, up = pair["down"], pair["up"]
        rank = down.shape[0]
        factor = alphas[name] / rank if name in alphas else scale(component, layer.parts[0].module, rank)
        whole = Adapter(down=down, up=up, scale=factor, magnitude=magnitudes.get(name))
        parts = separated(layer.parts, whole, ranks.get(component, {}))
        read.setdefault(component, {}).update(parts)
    return read


def _layers(component: str, module: nn.Module, form: AdapterNaming) -> Iterator[tuple[str, OriginalLayer]]:
    """(prefix, foreign layer) of each layer of a component that can have an adapter in a file of this form."""
    if component not in DENOISERS:
        if component in form.texts:
            kind, prefix = type(module).__name__, form.texts[component]
            for name, rows in layer_sizes(module).items():
                yield "", OriginalLayer(text_layer(prefix, name, kind), (OriginalRows(name, rows),))
        return
    for layer in _denoiser_layers(module, form):
        if not form.only or layer.name.startswith(form.only):
            yield form.prefix, layer


def _denoiser_layers(module: nn.Module, form: AdapterNaming) -> tuple[OriginalLayer, ...]:
    if form.is_original:
        return original_layers(module)
    own = tuple(OriginalLayer(name, (OriginalRows(name, rows),)) for name, rows in layer_sizes(module).items())
    if not form.originals:
        return own
    original = {layer.parts[0].module: layer for layer in original_layers(module)}
    return tuple(original[layer.name] if layer.name.startswith(form.originals) else layer for layer in own)


def _has_whole_blocks(form: AdapterNaming, layers: list[OriginalLayer]) -> bool:
    """Whether the layers are exactly the layers `form.whole_blocks` of blocks 0, 1, 2 ..., without a gap."""
    names = {layer.name for layer in layers}
    number = len(names) // len(form.whole_blocks)
    # With as many names as whole blocks 0, 1, ... have, equality says that none is missing and none is beside them.
    return names == {f"blocks.{block}.{end}" for block in range(number) for end in form.whole_blocks}


def _with_out_proj(adapters: Mapping[str, Adapter], module: nn.Module) -> Mapping[str, Adapter]:
    if not type(module).__name__.startswith("CLIP"):
        return adapters
    added = {}
    for name, adapter in adapters.items():
        attention, _, end = name.rpartition(".")
        out = f"{attention}.out_proj"
        if end in ("q_proj", "k_proj", "v_proj") and out not in adapters:
            width = adapter.up.shape[0]  # all projections of CLIP's attention have as many inputs as outputs
            down = adapter.down.new_zeros(adapter.rank, width)
            added[out] = Adapter(down=down, up=adapter.up.new_zeros(width, adapter.rank), scale=adapter.scale)
    return {**adapters, **added}


def _tensors(prefix: str, name: str, adapter: Adapter) -> dict[str, Tensor]:
    if prefix.endswith("."):
        plain = scaled(adapter)
        return {f"{prefix}{name}.lora_A.weight": plain.down, f"{prefix}{name}.lora_B.weight": plain.up}
    stem = prefix + name.replace(".", "_")
    # Readers divide the alpha by the rank.
    alpha = torch.tensor(adapter.scale * adapter.rank)
    return {f"{stem}.lora_down.weight": adapter.down, f"{stem}.lora_up.weight": adapter.up, f"{stem}{_ALPHA}": alpha}


def _sorted_by_layer(
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, dict[str, Tensor]], dict[str, float], dict[str, Tensor], list[str]]:
    """(matrices, alphas, magnitudes, other names) of a file; the first three are by the layer's name in the file.

    The matrices of a layer are under "down" and "up". The other names belong to other kinds of tensors.
    """
    found: dict[str, dict[str, Tensor]] = {}
    alphas, magnitudes, others = {}, {}, []
    for name, tensor in tensors.items():
        for ends in _PAIRS:
            side = next((side for side, end in zip(("up", "down"), ends, strict=True) if name.endswith(end)), None)
            if side is not None:
                # False is place 0, the end of `up`; True is place 1.
                found.setdefault(name.removesuffix(ends[side == "down"]), {})[side] = tensor
                break
        else:
            magnitude = next((end for end in _MAGNITUDES if name.endswith(end)), None)
            if name.endswith(_ALPHA):
                alphas[name.removesuffix(_ALPHA)] = float(tensor)
            elif magnitude is not None:
                magnitudes[name.removesuffix(magnitude)] = tensor
            else:
                others.append(name)
    return found, alphas, magnitudes, others


def _plain(name: str) -> str:
    """The name of a layer today, for a name from diffusers' oldest files too, which have ".processor." in it."""
    if ".processor." not in name:
        return name
    # There the last projection is "to_out", which is a list with the layer at 0 now.
    plain = name.replace(".processor.", ".")
    return f"{plain}.0" if plain.endswith(".to_out") else plain


def _known_names(modules: Mapping[str, nn.Module], form: AdapterNaming | None) -> dict[str, tuple[str, OriginalLayer]]:
    """Each name that a file may give a layer -> (component, layer); without a form diffusers' names alone."""
    known: dict[str, tuple[str, OriginalLayer]] = {}
    for component, module in modules.items():
        if component in DENOISERS:
            for name, rows in layer_sizes(module).items():
                own = OriginalLayer(name, (OriginalRows(name, rows),))
                for alias in _aliases(component, name):
                    # diffusers' names come first: they win where an original name is the same.
                    known.setdefault(alias, (component, own))
            for layer in original_layers(module) if form is not None else ():
                for alias in _aliases("diffusion_model", layer.name):
                    known.setdefault(alias, (component, layer))
                known.setdefault(f"transformer.{layer.name}", (component, layer))
            continue
        kind = type(module).__name__
        for name, rows in layer_sizes(module).items():
            found = (component, OriginalLayer(name, (OriginalRows(name, rows),)))
            for dotted in (name, with_text_model(name, kind)):
                for start in (f"{component}.", "base_model.model."):
                    known.setdefault(start + dotted, found)
            for prefix in _text_prefixes(component, kind, form):
                known.setdefault(text_layer(prefix, name, kind), found)
    return known


def _aliases(prefix: str, name: str) -> Iterator[str]:
    for start in ("", f"{prefix}.", "base_model.model.", f"{prefix}.base_model.model.", "diffusion_model."):
        yield start + name
    for start in (KOHYA, "lora_transformer_", "lycoris_"):
        yield start + name.replace(".", "_")


def _text_prefixes(component: str, kind: str, form: AdapterNaming | None) -> set[str]:
    """The prefixes that files may have for the layers of a text encoder; set() without a form or prefix for it.

    The first CLIP has either of two prefixes, and so does a T5. `kind`: the encoder's class.
    """
    if form is None or component not in form.texts:
        return set()
    own = {form.texts[component]}
    if kind.startswith("T5"):
        return own | {"lora_te2_"}
    return own | {"lora_te_", "lora_te1_"} if component == "text_encoder" else own


def _misfit(
    name: str, pair: Mapping[str, Tensor], place: tuple[str, OriginalLayer], modules: Mapping[str, nn.Module]
) -> str | None:
    """The sizes of an adapter and of its layer as a text, if they differ; else None.

    `name`: in the file. `pair`: its matrices "down" and "up". `place`: component and layer. `modules`: the components.
    """
    component, layer = place
    module: Any = modules[component].get_submodule(layer.parts[0].module)
    here = (sum(part.rows for part in layer.parts), *module.weight.shape[1:])
    there = (pair["up"].shape[0], *pair["down"].shape[1:])
    if there == here and pair["up"].shape[1] == pair["down"].shape[0]:
        return None
    return f"{name} {there}, here {here}"


def _listed(names: list[str]) -> str:
    more = len(names) - _SAID
    return ", ".join(islice(names, _SAID)) + (f" and {more} more" if more > 0 else "")
