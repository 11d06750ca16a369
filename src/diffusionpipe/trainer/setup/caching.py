"""A run's cache of encoders' results: the tensors that it keeps, where, under which settings, and their size."""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor, nn

from diffusionpipe.combinations.features import Feature
from diffusionpipe.combinations.refused import refusal
from diffusionpipe.costs import ModelGraph, TensorSpec
from diffusionpipe.costs.graph import BYTES_OF_DTYPE
from diffusionpipe.errors import ConfigError
from diffusionpipe.files.output_file import check_folder, reason_of
from diffusionpipe.ir.words import bytes_in_words
from diffusionpipe.models.graphs.graph import Layer, LayerGraph, modules_of
from diffusionpipe.models.graphs.kept import KeptTensor, in_parts, kept_tensors
from diffusionpipe.models.graphs.run import needed_layers
from diffusionpipe.runtime.comm.exchange import form_of, gather
from diffusionpipe.runtime.job.agreement import together
from diffusionpipe.trainer.data.batches.batch import kind_of
from diffusionpipe.trainer.data.cache.cached import CachedPart, CachedTensor
from diffusionpipe.trainer.data.cache.files import (
    SETTINGS,
    CacheFiles,
    existing,
    num_bytes,
    row_bytes,
    shards_of,
    write_settings,
)
from diffusionpipe.trainer.data.decoding.levels import is_picture
from diffusionpipe.trainer.data.scan.dataset import Dataset
from diffusionpipe.trainer.data.sizes.sizes import Assignment
from diffusionpipe.trainer.data.text.tokens import MASKS, TOKENS
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.trainer.recipe.cached_keys import Counts, counts_of, new_pictures, new_texts
from diffusionpipe.units import Bytes

logger = logging.getLogger(__name__)

FOLDER = "cache"
_FORM = 1
"""The number of the format of keys and settings; it must grow when the format changes."""
_SHOWN = 12
"""The number of hexadecimal digits of the settings' digest in the name of a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cacheable:
    """The results of frozen layers that a recipe's cache keeps, their number and bytes, and parts it does not keep."""

    kept: tuple[KeptTensor, ...]
    """The tensors of the frozen part that are kept; `sizes`, `variants`, `totals`, `settings` have a value for each."""
    counts: Counts
    """The numbers of pictures and texts whose results are kept."""
    sizes: tuple[Bytes, ...]
    """The bytes of one result of each kept tensor."""
    variants: tuple[float, ...]
    """The mean number of results that one sample has of each kept tensor."""
    totals: tuple[Bytes, ...]
    """The bytes of all results of each kept tensor."""
    settings: tuple[Mapping[str, object], ...]
    """The settings by which the results of each kept tensor are valid, without the weights, which are read later."""
    num_samples: int
    """The number of different samples."""
    spared: frozenset[str]
    """The names of the layers that do not run if all results are in the cache."""
    encoded_anew: tuple[str, ...]
    """The tensors that are not kept, each with the keys that forbid it, in words."""

    @property
    def size(self) -> Bytes:
        """The bytes of all results that the cache keeps."""
        return sum(self.totals)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheVerdict:
    """The answer whether a cache saves time in a run, and lines with the numbers from which it follows."""

    lines: tuple[str, ...]
    """Lines with the numbers, for the user."""
    why_not: str | None
    """Why the cache does not save time; None if it does."""


def cache_folder(recipe: Recipe) -> Path:
    """The folder of a recipe's cache: `pipeline.cache`, or the folder "cache" in the run's folder."""
    return recipe.pipeline.cache or recipe.run.folder / FOLDER


def cacheable(
    graph: LayerGraph, model: ModelGraph, recipe: Recipe, dataset: Dataset, assignment: Assignment | None = None
) -> Cacheable:
    """The results of frozen layers that a cache can keep for a dataset, by all keys of the recipe.

    `assignment`: the size of each sample, None if all have one.
    """
    every = _kept_of(graph, model)
    pictures, sources = new_pictures(recipe.data), _new_sources(recipe)
    anew: list[str] = []
    kept = []
    for one in every:
        has_pictures, has_texts = _reads_pictures(one.reads), _reads_texts(one.reads)
        if has_pictures and pictures:
            anew.append(f"{one.name} ({', '.join(pictures)})")
        elif has_texts and len(sources) == len(recipe.data.treatments):
            # No source has a text that comes again; else the texts of some sources are kept.
            anew.append(f"{one.name} ({', '.join(sources[min(sources)])})")
        else:
            kept.append(one)
            if has_texts and sources:
                keys = ", ".join(dict.fromkeys(key for own in sources.values() for key in own))
                anew.append(f"{one.name} of {len(sources)} of {len(recipe.data.treatments)} sources ({keys})")
    # By name: a sample that is repeated has one result.
    distinct = {sample.name: (sample.source, sample.captions) for sample in dataset.samples}
    counts = counts_of(recipe.data, distinct.values(), _sizes_of_each(assignment))
    draws = recipe.training.num_steps * recipe.training.batch
    sizes = tuple(_bytes_of(one, graph, model) for one in kept)
    return Cacheable(
        kept=tuple(kept),
        counts=counts,
        sizes=sizes,
        variants=tuple(_variants(one, counts) for one in kept),
        totals=tuple(num_entries(one, counts, draws) * size for one, size in zip(kept, sizes, strict=True)),
        settings=tuple(_settings_without_weights(one, graph, recipe) for one in kept),
        num_samples=len(distinct),
        spared=_spared_layers(kept, graph, model),
        encoded_anew=tuple(anew),
    )


def _variants(kept: KeptTensor, counts: Counts) -> float:
    """The mean number of results of a kept tensor for each sample."""
    views = counts.views if _reads_pictures(kept.reads) else 1.0
    return views * (counts.variants if _reads_texts(kept.reads) else 1.0)


def _spared_layers(kept: Sequence[KeptTensor], graph: LayerGraph, model: ModelGraph) -> frozenset[str]:
    """The names of the frozen layers that do not run if all kept tensors are in the cache."""
    needed = _needed(kept, graph, model)
    return frozenset(layer.name for one in kept for layer in one.layers) - {layer.name for layer in needed}


def num_entries(kept: KeptTensor, counts: Counts, draws: int) -> int:
    """The most results of one kept tensor that a run stores: one for each picture, text or pair of both.

    At most `draws`, the number of samples that the run draws.
    """
    pictures = round(counts.pictures * counts.views)
    of_both = {(True, True): pictures * max(1, counts.texts), (True, False): pictures, (False, True): counts.texts}
    # A run keeps no more than it draws.
    return min(draws, of_both[_reads_pictures(kept.reads), _reads_texts(kept.reads)])


def problem_of_cache(found: Cacheable, recipe: Recipe) -> str | None:
    """A sentence: why no result can be kept, or why the cache's disk has no room; None if the cache can be used."""
    if not found.kept:
        if not found.encoded_anew:
            return refusal(Feature.CACHE, Feature.NO_ENCODERS)
        return (
            f"nothing can be kept, because samples are new each time: {'; '.join(found.encoded_anew)}; remove these "
            'keys, or set encoders = "fill"'
        )
    folder = cache_folder(recipe)
    try:
        check_folder(folder)
    except OSError as error:
        return f"nothing can be written in {folder}: {reason_of(error)}; set pipeline.cache to another folder"
    missing, free = found.size - _present_bytes(found, folder), shutil.disk_usage(existing(folder)).free
    if missing <= free:
        return None
    return (
        f"{folder} needs {bytes_in_words(missing)} more, and {bytes_in_words(free)} of its disk are free; make room, "
        'set pipeline.cache to a folder on a larger disk, or set encoders = "fill"'
    )


def _present_bytes(found: Cacheable, folder: Path) -> Bytes:
    """The bytes of results in a cache's folder that the run can read, judged by settings without the weights."""
    present = 0
    for kept, total, settings in zip(found.kept, found.totals, found.settings, strict=True):
        alike = [0]
        for path in folder.glob(f"{_prefix(kept)}*/{SETTINGS}"):
            theirs = _settings_in(path)
            if theirs is not None and all(theirs.get(key) == value for key, value in settings.items()):
                alike.append(num_bytes(path.parent))
        # Of folders that differ in weights a run reads one; it may hold results of other samples.
        present += min(total, max(alike))
    return present


def _settings_in(path: Path) -> dict[str, object] | None:
    """The settings of kept results from a settings file in a cache; None if it cannot be read."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        return None


def _sizes_of_each(assignment: Assignment | None) -> float:
    """The mean number of sizes in which a picture is seen; 1 without an assignment."""
    if assignment is None:
        return 1.0
    distinct = {picture for share in assignment.shares for epoch in share.members for picture in epoch}
    return sum(share.pictures for share in assignment.shares) / len(distinct)


def check_cache(found: Cacheable, recipe: Recipe) -> None:
    """Refuses a cache in which no result could be kept, or whose disk has no room.

    Raises:
        ConfigError: it names the keys, or the sizes.
    """
    problem = problem_of_cache(found, recipe)
    if problem is not None:
        raise ConfigError(f"pipeline.encoders: {problem}")


def open_cache(
    found: Cacheable, graphs: Sequence[LayerGraph], models: Sequence[ModelGraph], recipe: Recipe, *, encodes: bool
) -> tuple[CachedPart, ...]:
    """The tensors in a run's cache with their folders: one object for each size of samples.

    Every rank calls it, after loading weights. The first rank with the frozen layers writes the settings, and warns of
    results in the folder that have other settings.

    Args:
        found: the results that can be kept.
        graphs: the layer graph for each size of samples.
        models: the model graph for each size of samples.
        recipe: the recipe of the run.
        encodes: whether this rank has the frozen layers.

    Raises:
        ConfigError: on every rank, where the folder cannot be written.
    """
    # Only ranks with the frozen layers have the weights to hash.
    own = [json.dumps(_settings(one, graphs[0], recipe), sort_keys=True) for one in found.kept] if encodes else []
    gathered = gather(tuple(own), form_of(tuple[str, ...]))
    texts = next(texts for texts in gathered if texts)
    folder, sources = cache_folder(recipe), frozenset(_new_sources(recipe))
    folders = [_folder_of(folder, kept, text) for kept, text in zip(found.kept, texts, strict=True)]
    is_writer = bool(own) and gathered.index(texts) == _rank_of(gathered)

    def note() -> None:
        for place, text in zip(folders, texts, strict=True):
            _note_others(place, json.loads(text))

    together(note if is_writer else lambda: None)
    parts = []
    for graph, model in zip(graphs, models, strict=True):
        tensors = tuple(
            CachedTensor(
                spec=_spec(kept, graph, model),
                reads=kept.reads,
                folder=place,
                left_out=sources if _reads_texts(kept.reads) else frozenset(),
            )
            for kept, place in zip(found.kept, folders, strict=True)
        )
        parts.append(CachedPart(tensors=tensors, spared=_spared(found.kept, graph, model)))
    return tuple(parts)


def _rank_of(gathered: Sequence[tuple[str, ...]]) -> int:
    """The number of this rank among the ranks whose values are `gathered`; 0 where there is only one."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() and len(gathered) > 1 else 0


def _kept_of(graph: LayerGraph, model: ModelGraph) -> tuple[KeptTensor, ...]:
    frozen, read = _frozen(graph, model)
    return kept_tensors(frozen, read, [spec.name for spec in graph.inputs], _is_content)


def _frozen(graph: LayerGraph, model: ModelGraph) -> tuple[tuple[Layer, ...], set[str]]:
    """(frozen layers, cut into parts that run alone, names of their tensors that trained layers read or are losses)."""
    names = set(model.frozen_layers)
    layers = [layer for layer in graph.layers if layer.name in names]
    read = {name for layer in graph.layers if layer.name not in names for name in layer.reads}
    results = {backbone.loss for backbone in graph.backbones}  # a frozen layer may compute a loss
    written = {name for layer in layers for name in layer.writes}
    return in_parts(layers), (read | results) & written


def _needed(kept: Sequence[KeptTensor], graph: LayerGraph, model: ModelGraph) -> Sequence[Layer]:
    """The frozen layers that still run if all kept tensors are in the cache."""
    frozen, outputs = _frozen(graph, model)
    return needed_layers(frozen, outputs, given=[one.name for one in kept])


def _spared(kept: Sequence[KeptTensor], graph: LayerGraph, model: ModelGraph) -> frozenset[str]:
    """The raw inputs with pictures that no layer reads if all kept tensors are in the cache, by name."""
    names = set(model.frozen_layers)
    trained = (one for one in graph.layers if one.name not in names)
    read = {name for layer in (*_needed(kept, graph, model), *trained) for name in layer.reads}
    return frozenset(spec.name for spec in graph.inputs if is_picture(kind_of(spec.name)) and spec.name not in read)


def _is_content(name: str) -> bool:
    kind = kind_of(name)
    return is_picture(kind) or kind in TOKENS or kind in MASKS


def _reads_pictures(reads: Sequence[str]) -> bool:
    return any(is_picture(kind_of(name)) for name in reads)


def _reads_texts(reads: Sequence[str]) -> bool:
    return any(not is_picture(kind_of(name)) for name in reads)


def _new_sources(recipe: Recipe) -> dict[int, list[str]]:
    """Index of a source -> the keys by which its texts are new each time; sources without such keys are left out."""
    found = {number: new_texts(one.captions) for number, one in enumerate(recipe.data.treatments)}
    return {number: keys for number, keys in found.items() if keys}


def _spec(kept: KeptTensor, graph: LayerGraph, model: ModelGraph) -> TensorSpec:
    between = {spec.name: spec for layer in graph.layers for spec in layer.between}
    return between[kept.name] if kept.name in between else model.tensor(kept.name)


def _bytes_of(kept: KeptTensor, graph: LayerGraph, model: ModelGraph) -> Bytes:
    """The bytes of a kept tensor's result for one sample of the graph's size; other sizes have about as many pixels."""
    spec = _spec(kept, graph, model)
    return torch.Size(spec.shape).numel() * BYTES_OF_DTYPE[spec.dtype]


def _folder_of(folder: Path, kept: KeptTensor, settings: str) -> Path:
    return folder / f"{_prefix(kept)}{blake2b(settings.encode(), digest_size=16).hexdigest()[:_SHOWN]}"


def _prefix(kept: KeptTensor) -> str:
    kind = "latents" if _reads_pictures(kept.reads) else "texts"
    return f"{kind}-{''.join(letter if letter.isalnum() or letter in '_.' else '_' for letter in kept.name)}-"


def _settings(kept: KeptTensor, graph: LayerGraph, recipe: Recipe) -> dict[str, object]:
    """The settings on which a kept tensor depends besides the samples, by name, with digests of the weights."""
    weights = {
        f"weights of {name}": _digest_of_weights(
            [layer for layer in kept.layers if layer.component == name], graph.components[name]
        )
        for name in _components_of(kept)
    }
    return {**_settings_without_weights(kept, graph, recipe), **weights}


def _components_of(kept: KeptTensor) -> list[str]:
    return sorted({layer.component for layer in kept.layers})


def _settings_without_weights(kept: KeptTensor, graph: LayerGraph, recipe: Recipe) -> dict[str, object]:
    """The settings on which a kept tensor depends besides samples and weights, by name."""
    used = _components_of(kept)
    return {
        "form": _FORM,
        "tensor": kept.name,
        "inputs": list(kept.reads),
        "precision": recipe.training.precision.value,
        "frozen_arithmetic": str(recipe.model.frozen_arithmetic),
        **{f"configuration of {name}": _digest_of_configuration(graph.components[name]) for name in used},
        "layers": blake2b(" ".join(layer.name for layer in kept.layers).encode(), digest_size=16).hexdigest(),
    }


def _digest_of_configuration(component: nn.Module) -> str:
    config = getattr(component, "config", {})
    values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    # Names and versions change no result.
    plain = {key: value for key, value in values.items() if not key.startswith("_") and key != "transformers_version"}
    return blake2b(json.dumps(plain, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _digest_of_weights(layers: Sequence[Layer], component: nn.Module) -> str:
    """A digest of all weights of a component that the layers use; threads hash the tensors at the same time."""
    tensors = dict(_weights_of(layers, component))
    with ThreadPoolExecutor(max(1, min(4, len(tensors)))) as pool:  # hashing releases the interpreter's lock
        digests = list(pool.map(_digest, tensors.values()))
    return blake2b(
        b"".join(name.encode() + digest for name, digest in zip(tensors, digests, strict=True)), digest_size=16
    ).hexdigest()


def _weights_of(layers: Sequence[Layer], component: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for layer in layers:
        for number, module in enumerate(modules_of(layer, component)):
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                yield f"{layer.name}.{number}.{name}", tensor


def _digest(tensor: Tensor) -> bytes:
    """A digest of a tensor's dtype, shape and values; the values of a stored weight are its codes."""
    host = tensor.detach().cpu()
    digest = blake2b(f"{host.dtype} {tuple(host.shape)}".encode(), digest_size=16)
    digest.update(row_bytes(host))
    return digest.digest()


def _note_others(place: Path, settings: Mapping[str, object]) -> None:
    """Write the settings into the folder `place`, where results are kept under them.

    If the folder has no results yet, warn of each folder beside it whose results have other settings.
    """
    prefix = place.name[:-_SHOWN]
    has_own = len(_looked_at(place)) > 0
    for other in sorted(place.parent.glob(f"{prefix}*/{SETTINGS}")):
        if other.parent != place and not has_own:  # else this run has read or written its own before
            theirs = _settings_in(other)
            if theirs is None:
                continue
            changed = [key for key in settings if settings[key] != theirs.get(key)]
            logger.warning(
                'cache=%s reason="its results have other settings (%s), so this run does not read them"',
                other.parent,
                ", ".join(changed),
            )
    write_settings(place, settings)


def _looked_at(place: Path) -> CacheFiles:
    shards = shards_of(place)
    shards.look()
    return shards
