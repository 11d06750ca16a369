"""A model that is stated on the command line, and its profile: computed once for a known device, then kept.

    plan --model sd-2.1 --resolution 512 --cluster a100-80x8:2 --batch 512

Counting the work of all layers takes 10 to 40 s. A kept profile is found by the hash of all that its numbers depend on:
the model's configuration files, the device's rates and efficiencies, the code that counts and prices, and the versions
of the packages. None of these needs torch, so a second plan starts at once.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.costs.clusters import device_without_bfloat16
from diffusionpipe.costs.devices import DEVICES, Basis, device_rates
from diffusionpipe.costs.forms import Form
from diffusionpipe.workflows.planning.profile_cache import ProfileKey, cache_folder, kept_profile
from diffusionpipe.workflows.telling import SILENCE, Telling

if TYPE_CHECKING:
    from diffusionpipe.costs import Cluster, ModelGraph, Profile
    from diffusionpipe.costs.devices import DeviceRates
    from diffusionpipe.models.graphs.graph import LayerGraph

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""The batch sizes, in samples, for which times are computed; the work of two of them is counted."""
PRECISION = "bfloat16"
"""The arithmetic on devices that have it; float32 on others."""
_SMALLEST, _LARGEST = 8, 16384
"""The shortest and the longest side of a picture in pixels."""
ADAPTERS = "adapters take few bytes and stay float32; leave it out, or train the whole model"
LEAST_SIDE = 256
"""The side, in pixels, of the smallest pictures that are proposed."""
_NUMBER = re.compile("[0-9]{1,5}")
_PACKAGES = ("torch", "diffusers", "transformers", "peft")
_OF_NOISE = ("noise", "time")
_COUNTING = ("models", "profiler", "costs")
"""The packages of ours whose code decides the numbers of a computed profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedModel:
    """A model as options of the command line state it: name, sizes, adapters and storage; nothing is opened yet."""

    name: str
    """Name of a shipped configuration, or a diffusers folder, or a hub id, or a class."""
    is_class: bool = False
    """Whether it is a transformer class of diffusers at its default size, without encoders and VAE."""
    resolution: int | None = None
    """Side of a picture in pixels; None for the published one, which a folder's pipeline draws."""
    clip: tuple[int, int, int] | None = None
    """Width, height and frames of clips, in place of pictures."""
    lora_rank: int | None = None
    """Rank of adapters on the denoiser; None where the configuration decides, which for most trains all of it."""
    has_narrow_store: bool = False
    """Whether frozen matrices are stored in bfloat16."""
    form: Form | None = None
    """The form in which frozen linear layers, but for the VAE's, are stored instead."""
    has_narrow_weights: bool = False
    """Whether trained matrices are kept in bfloat16, and rounded after each update."""
    precision: str = PRECISION
    """Arithmetic of the layers."""
    caption_chunks: int = 1
    """Parts of a caption that CLIP encoders read one by one."""


def computed_profile(
    stated: StatedModel, device: str, folder: Path | None, tell: Telling = SILENCE
) -> tuple[Profile, Path | None]:
    """(computed profile of a model on a known device, its file in the folder); without a folder the file is None.

    A device without bfloat16 computes in float32.

    Raises:
        ConfigError: the device is not known.
        ModelError: there is no such model, or it cannot be cut.
    """
    rates = device_rates(device)
    asked = stated if rates.has_bfloat16 else replace(stated, precision="float32")

    def make() -> Profile:
        return _computed(asked, device, tell)

    return kept_profile(profile_name(asked, rates) if folder else "", make, folder)


def named_model(
    name: str | None,
    profile: Path | None,
    *,
    kind: str | None = None,
    resolution: str | None = None,
    lora_rank: int | None = None,
    frozen_dtype: str | None = None,
    weights: str | None = None,
    caption_chunks: int | None = None,
) -> StatedModel | None:
    """The model that options of a command state; None where neither --model nor --model-class is among them.

    `kind`: the value of --model-class.

    Raises:
        ConfigError: options that do not belong together, an unknown dtype, or a text that is not a resolution.
    """
    from diffusionpipe.errors import ConfigError

    if name is not None and kind is not None:
        raise ConfigError("--model and --model-class are both given; give the one that names what is planned")
    if name is None and kind is None:
        options = {"--resolution": resolution, "--lora-rank": lora_rank, "--frozen-dtype": frozen_dtype}
        options |= {"--weights": weights, "--caption-chunks": caption_chunks}
        if given := [option for option, value in options.items() if value is not None]:
            raise ConfigError(
                f"{', '.join(given)}: only for a model that --model or --model-class names; with a recipe set its "
                "keys, e.g. data.resolution=512"
            )
        return None
    if profile is not None:
        option = "--model" if kind is None else "--model-class"
        raise ConfigError(f"--profile and {option} are both given; a profile already says which model it is of")
    forms = {form.value: form for form in Form}
    if frozen_dtype not in {None, "bfloat16", "none", *forms}:
        known = ", ".join(("bfloat16", *forms))
        raise ConfigError(f"--frozen-dtype is {frozen_dtype!r}; use {known}, none or auto, or leave it out")
    if weights not in {None, "float32", "bfloat16"}:
        raise ConfigError(f"--weights is {weights!r}; use float32 or bfloat16, or leave it out")
    if lora_rank is not None and weights == "bfloat16":
        raise ConfigError(f"--weights bfloat16: {ADAPTERS}")
    if kind is not None and caption_chunks is not None:
        raise ConfigError("--caption-chunks: a class of --model-class has no text encoders; leave it out")
    side, clip = (None, None) if resolution is None else _size(resolution)
    return StatedModel(
        name=name or str(kind),
        is_class=kind is not None,
        resolution=side,
        clip=clip,
        lora_rank=lora_rank,
        has_narrow_store=frozen_dtype != "none",
        form=forms.get(frozen_dtype or ""),
        has_narrow_weights=weights == "bfloat16",
        caption_chunks=caption_chunks or 1,
    )


def rows_a_picture(stated: StatedModel | Path | None) -> int:
    """How many rows the denoiser computes for a picture: 2 if diffusers' pipeline guides the model, else 1.

    For a profile or a class, which do not say it, 1.
    """
    if not isinstance(stated, StatedModel) or stated.is_class:
        return 1
    from diffusionpipe.models.opening.configured import configured_family, configured_models
    from diffusionpipe.models.opening.pipeline_defaults import default_guidance

    if stated.name in configured_models():
        family = configured_family(stated.name)
        scale, unguided = family.guidance, family.call.unguided if family.call else 1.0
    else:
        guidance = default_guidance(_folder(stated.name))
        scale, unguided = guidance.scale, guidance.unguided
    return 1 if scale == unguided else 2


def _size(text: str) -> tuple[int | None, tuple[int, int, int] | None]:
    """The side of a picture, or width, height and frames of a clip.

    Raises:
        ConfigError: the text is neither.

    >>> _size("512"), _size("832x480x81")
    ((512, None), (None, (832, 480, 81)))
    """
    from diffusionpipe.errors import ConfigError

    match [int(part) if _NUMBER.fullmatch(part) else 0 for part in text.split("x")]:
        case [side] if _SMALLEST <= side <= _LARGEST:
            return side, None
        case [width, height, frames] if min(width, height) >= _SMALLEST and max(width, height) <= _LARGEST and frames:
            return None, (width, height, frames)
    raise ConfigError(
        f"--resolution {text!r} is not the side of a picture, {_SMALLEST} to {_LARGEST}, nor WIDTHxHEIGHTxFRAMES of a "
        "clip; use e.g. 512 or 832x480x81"
    )


def profile_of(
    source: StatedModel | Path | None,
    cluster: Cluster,
    *,
    uses_cache: bool = True,
    may_split: bool = True,
    tell: Telling = SILENCE,
) -> Profile:
    """The profile in a file, or the computed profile of a stated model for the cluster's device.

    `may_split`: whether plans may split backwards, so that a file without the bytes for it gives a warning.

    Raises:
        FileFormatError: the file cannot be read, or is of a device that the cluster does not have.
        ConfigError: the cluster's device is not known.
        ModelError: as `computed_profile`.
    """
    from diffusionpipe.costs.files import check_device, kept_warning, read_profile

    if isinstance(source, StatedModel):
        return _for_cluster(source, cluster, cache_folder(os.environ) if uses_cache else None, tell)
    assert source is not None
    profile = read_profile(source)
    check_device(profile, cluster, source=str(source))
    if may_split and (warning := kept_warning(profile, source=str(source))):
        tell.say(f"warning: {warning}")
    return profile


def _for_cluster(stated: StatedModel, cluster: Cluster, folder: Path | None, tell: Telling) -> Profile:
    """The computed profile for a cluster's device, with a line that says where it is kept.

    Raises:
        ConfigError: the device is not known.
        ModelError: as `computed_profile`.
    """
    from diffusionpipe.errors import ConfigError

    rates = known_rates(cluster)
    if rates is None:
        known = ", ".join(one.title for one in DEVICES.values())
        raise ConfigError(
            f"--model computes layer times, but the devices of the cluster {cluster.name} are not among the known ones "
            f"({known}); profile the model there and give --profile"
        )
    without = device_without_bfloat16(cluster) if rates.device_type == "cuda" else None
    if without is not None:
        if stated.form is not None:
            raise ConfigError(
                f"--frozen-dtype {stated.form}: layers read stored weights in bfloat16, which {without} does not have; "
                "leave it out"
            )
        if stated.has_narrow_weights:
            raise ConfigError(f"--weights bfloat16: {without} has no bfloat16 and computes in float32; leave it out")
        stated = replace(stated, precision="float32", has_narrow_store=False)
    profile, path = computed_profile(stated, rates.name, folder, tell)
    tell.say(f"profile: analytic, {said_of(rates)}, {profile.mode}{f', kept as {path}' if path else ''}")
    if profile.precision != PRECISION:
        tell.say(f"precision: {profile.precision} throughout, because {without} has no bfloat16")
    if stated.is_class:
        tell.say(f"{stated.name} without encoders and VAE; a sample is {_sample(profile)}")
    return profile


def said_of(rates: DeviceRates) -> str:
    """The name of a device and the basis of its rates as a text: "NAME (calibrated)"."""
    return f"{rates.title} ({rates.basis if rates.basis is Basis.CALIBRATED else f'from its {rates.basis}'})"


def _sample(profile: Profile) -> str:
    """The name and shape of each input of a sample but noise and times, as text."""
    named = [(name, profile.graph.tensor(name).shape) for name in profile.graph.inputs if name not in _OF_NOISE]
    return ", ".join(f"{name} {' x '.join(map(str, shape)) or '1'}" for name, shape in named)


def known_rates(cluster: Cluster) -> DeviceRates | None:
    """The rates of the cluster's device with speed 1, to which other speeds are relative; None if it is not known."""
    # A computed profile has the times of the device with speed 1.
    reference = next((device for device in cluster.devices if device.speed == 1.0), cluster.devices[0])
    return next((rates for rates in DEVICES.values() if rates.title == reference.name), None)


def code_digest() -> str:
    """A hash of the source code that counts and prices operations, efficiencies included."""
    found = sha256()
    for package in _COUNTING:
        for path in sorted(Path(str(files("diffusionpipe") / package)).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def counted_key(model: ModelGraph, precision: str, batch_sizes: Sequence[int], rates: DeviceRates) -> ProfileKey:
    """The key of a profile whose layers are counted, and priced by a device's rates, in the folder of kept ones."""
    from diffusionpipe.profiler.measured import package_versions

    return ProfileKey(
        model=model,
        precision=precision,
        batch_sizes=batch_sizes,
        device=rates.title,
        rates=rates,
        versions=(*package_versions(), ("code", code_digest())),
    )


def profile_name(stated: StatedModel, rates: DeviceRates) -> str:
    """The name of a kept profile: a hash of the model, the rates, and all else on which its numbers depend."""
    found = sha256()
    content = {
        # The default side counts as if it were stated, so both questions share one file.
        "model": asdict(stated) | {"resolution": stated.resolution or _published_resolution(stated.name)},
        "rates": asdict(rates),
        "batch_sizes": BATCH_SIZES,
        "versions": [(name, version(name)) for name in _PACKAGES],
        "code": code_digest(),
    }
    found.update(json.dumps(content, sort_keys=True).encode())
    for path in () if stated.is_class else _configurations(stated.name):
        # Name and size separate the files: bytes that move from one to the next change the hash.
        found.update(f"{path.name} {path.stat().st_size}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:32]


def smaller_sides(stated: StatedModel) -> list[int]:
    """Smaller sides in pixels for a model's pictures, which a plan may propose.

    [] for clips, and for a model whose side only its folder says.
    """
    side = stated.resolution or _published_resolution(stated.name)
    return [] if side is None or stated.clip is not None else parts_of_side(side)


def parts_of_side(side: int) -> list[int]:
    """A half and a quarter of a side in pixels; those below `LEAST_SIDE` are left out."""
    return [part for part in (side // 2, side // 4) if part >= LEAST_SIDE]


def _published_resolution(name: str) -> int | None:
    """The resolution, in pixels, of a shipped model's configuration; None for any other model.

    With it a model has the same profile, whether its usual resolution is stated or not.
    """
    path = _shipped() / f"{name}.json"
    return int(json.loads(path.read_text(encoding="utf-8"))["resolution"]) if path.is_file() else None


def _shipped() -> Path:
    return Path(str(files("diffusionpipe.models") / "configurations"))


def _configurations(name: str) -> Iterator[Path]:
    """The paths of the configuration files on which a model's layers depend: all shipped ones, or its folder's."""
    if (_shipped() / f"{name}.json").is_file():
        yield from sorted(_shipped().rglob("*.json"))
        return
    folder = _folder(name)
    yield from sorted([*folder.glob("*.json"), *folder.glob("*/*config.json")])


def _folder(name: str) -> Path:
    """The diffusers folder at this path, or of the model with this hub id.

    Raises:
        ModelError: there is none.
    """
    from diffusionpipe.errors import ModelError
    from diffusionpipe.models.opening.configured import configured_models
    from diffusionpipe.models.opening.folder import resolve_folder

    try:
        return resolve_folder(name)
    except ModelError as error:
        raise ModelError(f"{error}\nOr name one of the shipped models: {', '.join(configured_models())}") from error


def _computed(stated: StatedModel, device: str, tell: Telling) -> Profile:
    (profile,) = profiles_of_devices(stated, [device], tell)
    return profile


def profiles_of_devices(stated: StatedModel, devices: Sequence[str], tell: Telling = SILENCE) -> list[Profile]:
    """The computed profiles of a model, one for each of these known devices, which are of one type.

    Its work is counted once.

    Raises:
        ConfigError: a device is not known.
        ModelError: there is no such model, or it cannot be cut.
    """
    import torch

    from diffusionpipe.models.graphs.describe import describe
    from diffusionpipe.profiler import analytic_profiles
    from diffusionpipe.profiler.decoding import decoding_of_graph

    graph = stated_graph(stated)
    model = describe(graph, autocast=torch.bfloat16 if stated.precision == "bfloat16" else None)
    with tell.progress("profiling") as report:
        made = analytic_profiles(
            graph, model, devices=devices, precision=stated.precision, batch_sizes=BATCH_SIZES, progress=report
        )
    decoding = decoding_of_graph(graph)
    return [replace(profile, decoding=decoding) for profile in made]


def stated_graph(stated: StatedModel) -> LayerGraph:
    """The layer graph of a stated model on the meta device, with frozen weights as wide as they are stored.

    Raises:
        ModelError: there is no such model, or it cannot be cut.
    """
    import torch

    from diffusionpipe.errors import ModelError
    from diffusionpipe.models.graphs.graph import canonical_names
    from diffusionpipe.models.parameters.lora import is_adapter
    from diffusionpipe.models.parameters.stored_linear import store, stored_layers
    from diffusionpipe.models.parameters.weights import factors

    graph = _opened(stated)
    if stated.form is not None:
        # A recipe's model.frozen_dtype leaves the VAE out too.
        store(graph, lambda component: None if component.startswith("vae") else stated.form)
        if not any(stored_layers(component) for component in graph.components.values()):
            raise ModelError(
                f"--frozen-dtype {stated.form}: {stated.name} is trained as a whole, and nothing of it is frozen; give "
                "--lora-rank, or leave it out"
            )
    narrow = factors(graph, is_trained=False) if stated.has_narrow_store else frozenset()
    if stated.has_narrow_weights:
        trained = factors(graph, is_trained=True)
        if any(map(is_adapter, trained)):
            raise ModelError(f"--weights bfloat16: {ADAPTERS}")
        narrow |= trained
    for parameter, name in canonical_names(graph.components).items():
        if name in narrow:
            parameter.data = parameter.data.to(torch.bfloat16)
    return graph


def _opened(stated: StatedModel) -> LayerGraph:
    from diffusionpipe.models.base.family import CaptionReading, Clip
    from diffusionpipe.models.objectives.objective import ObjectiveSettings
    from diffusionpipe.models.opening.class_graph import class_graph
    from diffusionpipe.models.opening.configured import configured_graph, configured_models
    from diffusionpipe.models.opening.folder import build_graph
    from diffusionpipe.models.opening.pipeline_defaults import default_resolution
    from diffusionpipe.models.parameters.lora import LoraSettings
    from diffusionpipe.trainer.model.members import stored_prediction

    lora = None if stated.lora_rank is None else LoraSettings(rank=stated.lora_rank)
    clip, captions = None, CaptionReading(chunks=stated.caption_chunks)
    if stated.clip is not None:
        width, height, frames = stated.clip
        clip = Clip(width=width, height=height, frames=frames)
    if stated.is_class:
        if stated.resolution is not None:
            clip = Clip.square(stated.resolution)
        return class_graph(stated.name, size=clip, lora=lora)
    if stated.name in configured_models():
        return configured_graph(stated.name, resolution=stated.resolution, lora=lora, clip=clip, captions=captions)
    folder = _folder(stated.name)
    return build_graph(
        folder,
        objective=ObjectiveSettings(prediction=stored_prediction(folder)),
        resolution=stated.resolution or default_resolution(folder),
        lora=lora,
        clip=clip,
        captions=captions,
    )
