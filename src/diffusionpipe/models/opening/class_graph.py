"""A transformer class of diffusers at its default size as a graph to plan with: no folder, no encoders, no VAE.

    latents (as cached) ─> noise ─> transformer ─> loss
    states of texts (as cached) ──────┘

The class's own defaults are the published size of the model that it was written for. Nothing of it has values, so the
graph is there to count and to plan, not to train.
"""

from difflib import get_close_matches
from functools import partial
from inspect import isclass, signature
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import ModelError
from diffusionpipe.models.base.family import Clip
from diffusionpipe.models.cut.cutting import cut
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.objectives.objective import (
    Objective,
    ObjectiveSettings,
    Prediction,
    loss_layer,
    noise_layer,
    objective_inputs,
)
from diffusionpipe.models.opening.class_call import ClassCall, Config, Grid
from diffusionpipe.models.opening.class_table import CLASSES
from diffusionpipe.models.opening.meta import module_on_meta
from diffusionpipe.models.parameters.lora import LoraSettings, add_lora

COMPONENT = "transformer"
_PLACE = "diffusers.models.transformers"
_NEAR = 3
"""The most names that an error proposes."""


def class_graph(kind: str, *, size: Clip | None = None, lora: LoraSettings | None = None) -> LayerGraph:
    """The layer graph of a transformer class of diffusers with its default configuration, on the meta device.

    All parameters are trained, or only adapters with `lora`. `size`: the size of a sample in pixels; None for the size
    that diffusers' pipeline draws.

    Raises ModelError for a name that is not such a class, a size that does not fit, or a class that cannot be cut.
    """
    call = class_call(kind)
    grid = grid_of(kind, call, size)
    transformer = module_on_meta(kind, {}, source=f"the default configuration of {kind}")
    try:
        return called_graph(call, grid, transformer, lora)
    except ModelError as error:
        words = "" if kind in str(error) or lora is not None else f"{kind} cannot be cut: "
        raise ModelError(f"{words}{error}") from error


def called_graph(call: ClassCall, grid: Grid, transformer: Any, lora: LoraSettings | None = None) -> LayerGraph:
    """The layer graph of a transformer with the call `call`, trained as a flow on samples of the size `grid`.

    Raises ModelError if it cannot be cut.
    """
    config = transformer.config
    latents = call.latents(config, grid)
    assert latents is not None, "every class denoises something"
    shapes = call.shapes(config, grid)
    given = {
        call.noisy: torch.empty((1, *latents), device="meta"),
        call.times: torch.empty(1, device="meta"),
        **{name: torch.empty((1, *shape), dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()},
    }
    names = {"noisy": call.noisy, "timesteps": call.times}
    transformer.train()
    layers = cut(
        transformer,
        partial(_renamed, call, grid, config),
        {name: given.pop(argument) for name, argument in names.items()} | given,
    )
    if lora is not None:
        # Blocks are called through the model, so adapters that come after the cut are run too.
        add_lora({COMPONENT: transformer}, COMPONENT, lora)
    return LayerGraph(
        layers=(noise_layer(), *layers, loss_layer()),
        components={
            COMPONENT: transformer,
            "objective": Objective(ObjectiveSettings(prediction=Prediction.FLOW_MATCHING), {}),
        },
        inputs=(
            TensorSpec(name="latents", shape=latents),
            *(TensorSpec(name=name, shape=shape, dtype=str(dtype)[6:]) for name, (shape, dtype) in shapes.items()),
            *objective_inputs(latents),
        ),
    )


def _renamed(
    call: ClassCall,
    grid: Grid,
    config: Config,
    transformer: Any,
    *,
    noisy: Tensor,
    timesteps: Tensor,
    **tensors: Tensor,
) -> Tensor:
    """The transformer's prediction, from arguments with the names that `noise_layer` gives its tensors."""
    return call.forward(config, grid, transformer, **{call.noisy: noisy, call.times: timesteps}, **tensors)


def class_call(kind: str) -> ClassCall:
    """The `ClassCall` of the transformer class of this name in the installed diffusers.

    Raises ModelError if the installed diffusers has no transformer of that name, or its call is not known.
    """
    import diffusers

    here = f"diffusers {diffusers.__version__}, which is installed here,"
    found = getattr(diffusers, kind, None) if kind.isidentifier() else None
    if not isclass(found):
        later = " Other versions of it have this class; install a newer one." if kind in CLASSES else ""
        raise ModelError(f"{here} has no class {kind}.{later}{_near(kind)}")
    if not found.__module__.startswith(_PLACE):
        raise ModelError(f"{kind} is {_nature(found)} of diffusers, not a transformer.{_own(found)}{_near(kind)}")
    if kind not in CLASSES:
        raise ModelError(
            f"how {kind} is called without a folder is not known here; docs/models.md lists those that are planned so."
            f"{_near(kind)} If there is a folder of a model with it, give it to --model"
        )
    return CLASSES[kind]


def _near(kind: str) -> str:
    names = get_close_matches(kind, CLASSES, _NEAR, cutoff=0.5)
    return f" Names that are near: {', '.join(names)}." if names else ""


def _nature(found: type) -> str:
    """The kind of a diffusers class that is not a transformer, for an error: "a pipeline", or "a class" if unknown."""
    place = found.__module__
    kinds = {
        "pipelines": "a pipeline",
        "autoencoders": "an autoencoder",
        "unets": "a U-Net",
        "schedulers": "a scheduler",
    }
    return next((words for part, words in kinds.items() if f".{part}" in place), "a class")


def _own(found: type) -> str:
    """A sentence for an error that names the transformer class of a pipeline class; "" if it has no known one."""
    parameter = signature(found).parameters.get(COMPONENT)
    kind = getattr(parameter and parameter.annotation, "__name__", "")
    return f" Its transformer is {kind}." if kind in CLASSES else ""


def grid_of(kind: str, call: ClassCall, size: Clip | None) -> Grid:
    """The size in cells and tokens of a sample of `size` pixels; None: of the size that diffusers' pipeline draws.

    `kind`: the name of the class, for errors. Raises ModelError for a size that the class cannot have.
    """
    clip = size or call.size
    if not call.pixels:
        if size is not None:
            raise ModelError(f"{kind} denoises no pictures; leave out --resolution")
        return Grid(clip=clip, frames=clip.frames, height=1, width=1, text=call.text)
    # Cells of latents must make whole patches.
    side = call.pixels * call.patch
    if clip.width % side or clip.height % side:
        raise ModelError(
            f"{kind} divides pictures into squares of {side} pixels; {clip.width} x {clip.height} is not divided so: "
            f"use e.g. {max(clip.width // side, 1) * side} x {max(clip.height // side, 1) * side}"
        )
    if call.frames is None and clip.frames != 1:
        raise ModelError(f"{kind} draws pictures, not clips; give --resolution the side of a picture")
    frames = 1 if call.frames is None else call.frames(clip.frames)
    return Grid(
        clip=clip, frames=frames, height=clip.height // call.pixels, width=clip.width // call.pixels, text=call.text
    )
