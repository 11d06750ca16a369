"""Text encoders that several models of a run have alike: one of them encodes the captions for all.

    base    caption ──> base/text_encoder ──┬──> base/unet
    super                                   └──> super/unet         in place of super/text_encoder

Two are alike if both are frozen, have the same layers, configuration, tokenizer and weights, byte by byte. So the
states are the same bits, and only one copy is held and run. Encoders of pictures are never common: each model draws
noise of its own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path

from diffusionpipe.files.input_file import read_json
from diffusionpipe.models.graphs.graph import Layer, LayerGraph
from diffusionpipe.models.opening.folder import family_of
from diffusionpipe.models.parameters.stored import stored_weights

TOKENS = "input_ids"
"""The start of the names of raw inputs that hold a caption in tokens."""
MASK = "input_mask"
_SHA256 = 64
"""The number of hexadecimal digits of a SHA-256 checksum."""
_NOT_COMPARED = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
"""Keys of a configuration on which a module's computation does not depend."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """One model of a run with several: its folder, its graph, and the variant of its weights."""

    folder: Path
    """Its diffusers folder."""
    graph: LayerGraph
    """Its layer graph."""
    variant: str | None = None
    """The variant of the weights that are read; see `stored_weights`."""


def common_encoders(models: Mapping[str, OpenedModel]) -> dict[str, dict[str, str]]:
    """Model -> component -> name of the first earlier model with an equal encoder, for encoders of captions."""
    found: dict[str, dict[str, str]] = {}
    for name, model in models.items():
        earlier = {other: models[other] for other in found}
        found[name] = {}
        for component in dict.fromkeys(layer.component for layer in model.graph.layers):
            # An owner has the component itself: one that takes it from a third does not count.
            owners = (
                o for o, one in earlier.items() if component not in found[o] and _are_alike(model, one, component)
            )
            if owner := next(owners, None):
                found[name][component] = owner
    return found


def common_tensors(graph: LayerGraph, component: str) -> frozenset[str]:
    """The names of the tensors that the layers of the encoder `component` read and write: tokens and states."""
    layers = _layers(graph, component)
    return frozenset(name for layer in layers for name in (*layer.reads, *layer.writes))


def _are_alike(one: OpenedModel, other: OpenedModel, component: str) -> bool:
    return (
        all(_reads_captions_alone(model.graph, component) for model in (one, other))
        and _described(one.graph, component) == _described(other.graph, component)
        and all(_have_same_files(first, second) for first, second in _folders(one, other, component))
        and _configuration(one.folder / component) == _configuration(other.folder / component)
        and _have_same_weights(one, other, component)
    )


def _layers(graph: LayerGraph, component: str) -> list[Layer]:
    return [layer for layer in graph.layers if layer.component == component]


def _reads_captions_alone(graph: LayerGraph, component: str) -> bool:
    """Whether the component is a frozen encoder whose raw inputs are captions alone."""
    module, layers = graph.components.get(component), _layers(graph, component)
    parameters = [] if module is None else list(module.parameters())
    written = {name for layer in layers for name in layer.writes}
    raw = {name for layer in layers for name in layer.reads} - written
    is_text = bool(raw) and all(name.startswith(TOKENS) or name == MASK for name in raw)
    return is_text and bool(parameters) and not any(p.requires_grad for p in parameters)


def _described(graph: LayerGraph, component: str) -> object:
    layers = _layers(graph, component)
    inputs = {spec.name: (spec.shape, spec.dtype) for spec in graph.inputs}
    shapes = {name: (p.shape, p.dtype) for name, p in graph.components[component].named_parameters()}
    names = sorted(common_tensors(graph, component))
    return (
        [(layer.name, layer.reads, layer.writes, layer.modules) for layer in layers],
        [(name, inputs.get(name)) for name in names],
        shapes,
    )


def _folders(one: OpenedModel, other: OpenedModel, component: str) -> Iterator[tuple[Path, Path]]:
    """(folder of a tokenizer in one model, its folder in the other) for each tokenizer of the encoder's raw inputs."""
    for name in common_tensors(one.graph, component):
        if name.startswith(TOKENS):
            tokenizer = name.replace(TOKENS, "tokenizer")
            yield one.folder / tokenizer, other.folder / tokenizer


def _have_same_files(one: Path, other: Path) -> bool:
    names = [sorted(path.name for path in folder.glob("*") if path.is_file()) for folder in (one, other)]
    same_prompts = family_of(one.parent).prompts == family_of(other.parent).prompts
    return names[0] == names[1] and same_prompts and all(cmp(one / n, other / n, shallow=False) for n in names[0])


def _have_same_weights(one: OpenedModel, other: OpenedModel, component: str) -> bool:
    found = [stored_weights(model.folder / component, model.variant) for model in (one, other)]
    files = [stored.files for stored in found if stored]
    same_number = len(files) == 2 and len(files[0]) == len(files[1])
    return same_number and all(_is_same(a, b) for a, b in zip(*files, strict=True))


def _is_same(one: Path, other: Path) -> bool:
    """Whether two files hold the same bytes; links to one file are not read, nor files that the hub names by a hash."""
    return one.samefile(other) or _are_same_blob(one.resolve(), other.resolve()) or cmp(one, other, shallow=False)


def _are_same_blob(one: Path, other: Path) -> bool:
    """Whether two files of the Hugging Face Hub's caches have the same name, the SHA-256 checksum of the contents."""
    return one.name == other.name and len(one.name) == _SHA256 and one.parent.name == other.parent.name == "blobs"


def _configuration(folder: Path) -> object:
    config = read_json(folder / "config.json")
    assert isinstance(config, dict)  # the model has been opened with it
    return {key: value for key, value in config.items() if key not in _NOT_COMPARED}
