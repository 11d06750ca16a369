"""Class-conditional U-Nets of pictures themselves (UNet2DModel of diffusers), without autoencoder and text encoder.

    base               pixels ─> noise ──────────> noisy ─────> U-Net ─> prediction
    super-resolution   pixels ─> noise ──────────> noisy ─────> U-Net ─> prediction
                            └──> augmentation ───> upsampled ─────┘

Both read "labels", as in cascaded diffusion models for ImageNet (Ho et al., 2022, https://arxiv.org/abs/2106.15282).
There is hardly any frozen work, so nothing to fill with. The folder is a DDPMPipeline's. The second model has twice the
input channels: the noisy picture, then the enlarged small one. Difference from the source: it does not read the level
of the augmentation's noise, because UNet2DModel embeds nothing beside the time and the class.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import ModelError
from diffusionpipe.models.base.family import Family, LowResolution, set_trainable, unsupported
from diffusionpipe.models.cut.cutting import cut
from diffusionpipe.models.families.deepfloyd import augmentation_inputs, augmentation_layer, problems_of_sizes
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.objectives.objective import Objective, loss_layer, noise_layer, objective_inputs

_TRAINABLE = ("unet",)
_LEVELS = "scheduler"
_ALLOWED: dict[str, tuple[object, ...]] = {
    "class_embed_type": (None,),
    "dropout": (0, 0.0),
    "time_embedding_type": ("positional",),
}


def class_unet_graph(
    components: Mapping[str, Any],
    *,
    objective: Objective,
    resolution: int,
    train: Collection[str] = _TRAINABLE,
    dtype: str = "float32",
    low: LowResolution | None = None,
) -> LayerGraph:
    """The layer graph of a class-conditional U-Net, the component "unet", for pictures (C, resolution, resolution).

    The raw input "labels" holds class numbers. The last row of the class embedding stands for no class. `low`: the
    small pictures that a model of super-resolution reads; None for the first model of a cascade.

    Raises ModelError for everything in the configuration that the layers would not run exactly.
    """
    unet = components["unet"]
    problems = [*_problems(unet, low), *problems_of_sizes(unet, resolution, low)]
    if problems:
        raise ModelError("\n".join(problems))
    set_trainable({"unet": unet}, train, _TRAINABLE)
    picture = (unet.config.out_channels, resolution, resolution)
    weights = next(unet.parameters()).dtype
    given = {
        "noisy": torch.empty((1, *picture), dtype=getattr(torch, dtype), device="meta"),
        "timesteps": torch.empty(1, dtype=torch.int64, device="meta"),
        "labels": torch.empty(1, dtype=torch.int64, device="meta"),
    }
    if low is not None:
        given["upsampled"] = given["noisy"]
    return LayerGraph(
        layers=(
            *(() if low is None else (augmentation_layer(low, _LEVELS),)),
            noise_layer(reads="pixels"),
            *cut(unet, partial(_predict, weights), given, component="unet"),
            loss_layer(),
        ),
        components={"unet": unet, "objective": objective} | ({} if low is None else {_LEVELS: components[_LEVELS]}),
        inputs=(
            TensorSpec(name="pixels", shape=picture, dtype=dtype),
            TensorSpec(name="labels", shape=(), dtype="int64"),
            *objective_inputs(picture, dtype),
            *(() if low is None else augmentation_inputs(picture, dtype)),
        ),
    )


def is_super_resolution(config: Mapping[str, object]) -> bool:
    """Whether a U-Net's configuration has twice as many input as output channels: it also reads an enlarged picture."""
    read, written = config.get("in_channels", 3), config.get("out_channels", 3)
    return isinstance(written, int) and read == 2 * written


def _predict(
    weights: torch.dtype,
    unet: Any,
    *,
    noisy: Tensor,
    timesteps: Tensor,
    labels: Tensor,
    upsampled: Tensor | None = None,
) -> Tensor:
    read = noisy if upsampled is None else torch.cat([noisy, upsampled], dim=1)  # (B, C or 2C, H, W)
    output: Tensor = unet(read.to(weights), timesteps, class_labels=labels, return_dict=False)[0]
    return output  # (B, C, H, W)


def _problems(unet: Any, low: LowResolution | None) -> list[str]:
    config = unet.config
    problems = unsupported("unet", config, _ALLOWED)
    if config.num_class_embeds is None or config.num_class_embeds < 2:
        problems.append(
            f"unet: num_class_embeds is {config.num_class_embeds}; it must be the number of classes and 1 more, for "
            "the row of no class"
        )
    channels = config.out_channels
    expected = channels if low is None else 2 * channels
    if channels not in (1, 3):
        problems.append(f"unet: out_channels {channels} do not fit pictures of 1 or 3 channels")
    if config.in_channels != expected:
        problems.append(
            f"unet: in_channels is {config.in_channels}; with out_channels {channels} it must be {expected}"
        )
    return problems


BASE = Family(
    components={"unet": "UNet2DModel"},
    trainable=_TRAINABLE,
    graph=class_unet_graph,
    guidance=1.0,
    has_adapters=False,
    places="conv_in",
)
SUPER_RESOLUTION = Family(
    components=BASE.components,
    trainable=_TRAINABLE,
    graph=class_unet_graph,
    guidance=1.0,
    has_adapters=False,
    augmentation=_LEVELS,
)
