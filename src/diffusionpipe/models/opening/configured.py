"""Published models at their real size, from configurations that are shipped, without weights and without a network.

`configurations/<name>.json` says pipeline, resolution, objective and the configuration of each component;
`configurations/components` holds those, as diffusers and transformers store them in config.json.
"""

import json
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from torch import nn

from diffusionpipe.errors import ModelError
from diffusionpipe.models.base.family import WHOLE, CaptionReading, Clip, Family
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings, Prediction
from diffusionpipe.models.opening.folder import REGISTRY, family_graph
from diffusionpipe.models.opening.meta import module_on_meta
from diffusionpipe.models.parameters.lora import LoraSettings


def configured_models() -> tuple[str, ...]:
    """The names of the published models whose configurations are in the package, sorted."""
    return tuple(sorted(f.name.removesuffix(".json") for f in _folder().iterdir() if f.name.endswith(".json")))


def configured_graph(
    name: str,
    *,
    resolution: int | None = None,
    lora: LoraSettings | None = None,
    clip: Clip | None = None,
    captions: CaptionReading = WHOLE,
) -> LayerGraph:
    """The layer graph of a published model, by its name in `configured_models`, with parameters on the meta device.

    `resolution`: the side of pictures in pixels; None: as published. `lora`: the adapters to train; None: as in the
    configuration, adapters or the whole denoiser. `clip`: the size of clips, in place of square pictures. `captions`:
    how captions are read.

    Raises ModelError for an unknown name, and for all that the model's family refuses.
    """
    config = _configuration(name)
    family = configured_family(name)
    lora = lora or configured_lora(name)
    objective = Objective(ObjectiveSettings(prediction=Prediction(config["prediction"])), config["scheduler"])
    return family_graph(
        family,
        configured_parts(name),
        objective,
        resolution=config["resolution"] if resolution is None else resolution,
        train=None,
        dtype="float32",
        lora=lora,
        clip=clip,
        captions=captions,
    )


def configured_family(name: str) -> Family:
    """The `Family` of the published model with this name. Raises ModelError for an unknown name."""
    return REGISTRY[_configuration(name)["pipeline"]]


def configured_lora(name: str) -> LoraSettings | None:
    """The adapters that a published model's configuration trains; None if it trains the whole denoiser.

    Raises ModelError for an unknown name.
    """
    config = _configuration(name)
    return LoraSettings(**config["lora"]) if "lora" in config else None


def configured_pipeline(name: str) -> str:
    """The class name of a published model's diffusers pipeline. Raises ModelError for an unknown name."""
    return str(_configuration(name)["pipeline"])


def configured_parts(name: str) -> Mapping[str, nn.Module]:
    """Component -> its module on the meta device, of a published model. Raises ModelError for an unknown name."""
    config = _configuration(name)
    return {part: _component(config["components"][part]) for part in REGISTRY[config["pipeline"]].components}


def _configuration(name: str) -> Mapping[str, Any]:
    if name not in configured_models():
        raise ModelError(f"there is no configuration {name!r}; choose from {', '.join(configured_models())}")
    return _read(_folder() / f"{name}.json")


def _component(name: str) -> nn.Module:
    config = _read(_folder() / "components" / f"{name}.json")
    kind = config["_class_name"]
    return module_on_meta(kind, config, source=f"the configuration {name}")


def _folder() -> Traversable:
    return files("diffusionpipe.models") / "configurations"


def _read(file: Traversable) -> Mapping[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content
