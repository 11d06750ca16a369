"""Diffusers folders whose weights are stored in the ways that the hub has them, and in ways that are broken."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

KINDS = (
    "plain",
    "fp16 only",
    "non_ema only",
    "shards",
    "shards of a variant",
    "bin",
    "bin and safetensors",
    "plain and fp16",
)
"""Ways to store weights, each of which is read without being told how."""
BROKEN: Mapping[str, str] = {
    "two variants": r"variants fp16 and non_ema, and no plain file; choose one by model.variant",
    "empty file": "is empty",
    "config only": r"has no weights \(it has config.json\)",
    "one shard missing": "it is missing",
    "one tensor missing": r"1 tensor missing",
    "one too many": r"1 tensor unexpected \(strange\)",
    "another shape": "has shape",
    "damaged header": "cannot be read",
    "cut short": "cannot be read",
    "a link that points nowhere": "it is a link to nothing",
}
"""Ways in which a component's weights are no use, and what the error says."""


def variant_of(kind: str) -> str | None:
    """What diffusers' `from_pretrained` must be told to read a folder of this kind."""
    return {"fp16 only": "fp16", "non_ema only": "non_ema", "shards of a variant": "fp16"}.get(kind)


def components_of(folder: Path) -> list[Path]:
    """The folders with weights."""
    return sorted({path.parent for path in folder.glob("*/*.safetensors")})


def store(source: Path, folder: Path, kind: str) -> Path:
    """A copy of a folder with plain files, stored in one of the `KINDS`; what must not be read holds other values."""
    shutil.copytree(source, folder)
    for component in components_of(folder):
        _STORES[kind](component, *_taken(component))
    return folder


def damage(folder: Path, component: str, how: str) -> Path:
    """Store the weights of one component in one of the `BROKEN` ways, in place."""
    stem, tensors = _taken(folder / component)
    _DAMAGES[how](folder / component, stem, tensors)
    return folder


def _taken(component: Path) -> tuple[str, dict[str, Tensor]]:
    """How the name of the component's plain file begins, and what it held; the file is gone."""
    (file,) = component.glob("*.safetensors")
    tensors = load_file(file)
    file.unlink()
    return file.name.partition(".")[0], tensors


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file(dict(tensors), path, metadata={"format": "pt"})


def _halved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _others(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor + 1 for name, tensor in tensors.items()}


def _bin(component: Path, stem: str, tensors: Mapping[str, Tensor]) -> None:
    torch.save(dict(tensors), component / f"{'pytorch_model' if stem == 'model' else stem}.bin")


def _shards(component: Path, stem: str, tensors: Mapping[str, Tensor], variant: str | None = None) -> None:
    largest = max(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    size = max(largest, sum(t.numel() * t.element_size() for t in tensors.values()) // 3)
    save_torch_state_dict(
        dict(tensors), component, filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=size
    )
    if variant is None:
        return
    index = component / f"{stem}.safetensors.index.json"
    content = json.loads(index.read_text())
    index.unlink()

    def named(name: str) -> str:
        return re.sub(rf"^{stem}", f"{stem}.{variant}", name)

    for shard in set(content["weight_map"].values()):
        (component / shard).rename(component / named(shard))
    content["weight_map"] = {tensor: named(shard) for tensor, shard in content["weight_map"].items()}
    (component / f"{stem}.safetensors.index.{variant}.json").write_text(json.dumps(content))


def _store_with_bin(component: Path, stem: str, tensors: Mapping[str, Tensor]) -> None:
    _save(tensors, component / f"{stem}.safetensors")
    _bin(component, stem, _others(tensors))


def _store_with_half(component: Path, stem: str, tensors: Mapping[str, Tensor]) -> None:
    _save(tensors, component / f"{stem}.safetensors")
    _save(_others(_halved(tensors)), component / f"{stem}.fp16.safetensors")


_STORES: Mapping[str, Callable[[Path, str, Mapping[str, Tensor]], None]] = {
    "plain": lambda component, stem, tensors: _save(tensors, component / f"{stem}.safetensors"),
    "fp16 only": lambda component, stem, tensors: _save(_halved(tensors), component / f"{stem}.fp16.safetensors"),
    "non_ema only": lambda component, stem, tensors: _save(tensors, component / f"{stem}.non_ema.safetensors"),
    "shards": _shards,
    "shards of a variant": lambda component, stem, tensors: _shards(component, stem, _halved(tensors), "fp16"),
    "bin": _bin,
    "bin and safetensors": _store_with_bin,
    "plain and fp16": _store_with_half,
}


def _cut(share: float) -> Callable[[Path, str, Mapping[str, Tensor]], None]:
    def cut(component: Path, stem: str, tensors: Mapping[str, Tensor]) -> None:
        path = component / f"{stem}.safetensors"
        _save(tensors, path)
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])

    return cut


def _scrambled(component: Path, stem: str, tensors: Mapping[str, Tensor]) -> None:
    path = component / f"{stem}.safetensors"
    _save(tensors, path)
    path.write_bytes(path.read_bytes().replace(b'"dtype"', b'"dtyqe"', 1))


def _two_variants(component: Path, stem: str, tensors: Mapping[str, Tensor]) -> None:
    _save(_halved(tensors), component / f"{stem}.fp16.safetensors")
    _save(tensors, component / f"{stem}.non_ema.safetensors")


def _without_a_shard(component: Path, stem: str, tensors: Mapping[str, Tensor]) -> None:
    _shards(component, stem, tensors)
    min(component.glob("*-of-*.safetensors")).unlink()


def _with(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path, str, Mapping[str, Tensor]], None]:
    def store_changed(component: Path, stem: str, tensors: Mapping[str, Tensor]) -> None:
        changed = dict(tensors)
        change(changed)
        _save(changed, component / f"{stem}.safetensors")

    return store_changed


def _reshape(tensors: dict[str, Tensor]) -> None:
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 1)
    tensors[name] = torch.zeros(len(tensors[name]) + 1)


_DAMAGES: Mapping[str, Callable[[Path, str, Mapping[str, Tensor]], None]] = {
    "two variants": _two_variants,
    "empty file": lambda component, stem, tensors: (component / f"{stem}.safetensors").touch(),
    "config only": lambda component, stem, tensors: None,
    "one shard missing": _without_a_shard,
    "one tensor missing": _with(lambda tensors: tensors.pop(next(iter(tensors)))),
    "one too many": _with(lambda tensors: tensors.update(strange=torch.zeros(1))),
    "another shape": _with(_reshape),
    "damaged header": _scrambled,
    "cut short": _cut(0.5),
    "a link that points nowhere": lambda component, stem, tensors: (component / f"{stem}.safetensors").symlink_to(
        component / "gone"
    ),
}
