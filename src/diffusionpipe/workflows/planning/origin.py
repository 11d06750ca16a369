"""The options and keys with which a plan was made, as its file holds them.

--model=flux.1-dev-lora  --cluster=rtx4090x2    what `rehearse` needs to price it again
training.batch=4  training.precision=bfloat16   what a recipe that trains by it leaves out, or has to agree with
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from diffusionpipe.costs.graph import frozen_store

if TYPE_CHECKING:
    from pathlib import Path

    from diffusionpipe.planner.pricing.setting import Setting
    from diffusionpipe.workflows.planning.stated_model import StatedModel

RECIPE = "recipe"
OVERRIDE = "override"
_DOWN = ".lora_A."
_CAPTIONS = ("input_ids", "input_ids_2")


def options_made_with(
    *,
    model: StatedModel | None = None,
    profile: Path | None = None,
    recipe: Path | None = None,
    overrides: Sequence[str] = (),
    cluster: str | None = None,
    used: Sequence[int] = (),
) -> tuple[str, ...]:
    """The options, as "--name=value", that name the profile and the devices of a plan; None and () are left out."""
    found: dict[str, object] = {RECIPE: recipe, "profile": profile, "cluster": cluster}
    if model is not None:
        clip = "x".join(map(str, model.clip)) if model.clip is not None else None
        found |= {
            "model-class" if model.is_class else "model": model.name,
            "resolution": clip if model.resolution is None else model.resolution,
            "lora-rank": model.lora_rank,
            "frozen-dtype": model.form or (None if model.has_narrow_store else "none"),
            "weights": "bfloat16" if model.has_narrow_weights else None,
            "caption-chunks": model.caption_chunks if model.caption_chunks > 1 else None,
        }
    found["use"] = ",".join(map(str, used)) or None
    stated = [f"--{name}={value}" for name, value in found.items() if value is not None]
    return (*stated, *(f"--{OVERRIDE}={text}" for text in overrides))


def keys_made_with(setting: Setting, *, optimizer: str) -> tuple[str, ...]:
    """The keys of a recipe, as "key=value", for the training that was planned for."""
    return tuple(f"{key}={value}" for key, value in _keys(setting, optimizer))


def _keys(setting: Setting, optimizer: str) -> Iterator[tuple[str, object]]:
    graph = setting.graph
    yield "training.batch", setting.workload.batch
    yield "training.precision", setting.profile.precision
    if setting.workload.rounds:
        yield "training.weights", "bfloat16"
        yield "training.gradients", "bfloat16" if setting.workload.sums_narrow else "float32"
    frozen = any(not parameter.is_trainable for parameter in graph.parameters)
    if len(graph.backbones) == 1 and frozen:
        yield "model.frozen_dtype", frozen_store(graph) or "none"
    yield "optimizer.name", optimizer
    adapters = [one for one in graph.parameters if one.is_trainable and _DOWN in one.name]
    if adapters:
        # The matrix is (rank, inputs), of a convolution (rank, channels, height, width).
        yield "lora.rank", adapters[0].shape[0]
    shapes = [graph.tensor(name).shape for name in graph.inputs if name in _CAPTIONS]
    if shapes and len(shapes[0]) > 1:
        yield "data.caption_chunks", shapes[0][0]
    if "pixels" in graph.inputs:
        shape = graph.tensor("pixels").shape
        if len(shape) == 3 and shape[1] == shape[2] and len(graph.backbones) == 1:
            yield "data.resolution", shape[2]


def options_of(made_with: Sequence[str]) -> Mapping[str, str]:
    """Name without hyphens -> value of the options in a plan file's `made_with`; overrides are left out."""
    pairs = (text.removeprefix("--").partition("=") for text in made_with if text.startswith("--"))
    return {name: value for name, _, value in pairs if name != OVERRIDE}


def overrides_of(made_with: Sequence[str]) -> list[str]:
    """The overrides of the recipe, as "key=value", in a plan file's `made_with`."""
    begin = f"--{OVERRIDE}="
    return [text.removeprefix(begin) for text in made_with if text.startswith(begin)]
