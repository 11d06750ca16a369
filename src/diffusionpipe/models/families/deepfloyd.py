"""DeepFloyd IF (https://github.com/deep-floyd/IF): U-Nets of pictures themselves, without an autoencoder.

    base               pixels ─> noise ──────────> noisy ────────> U-Net ─> prediction
    super-resolution   pixels ─> noise ──────────> noisy ────────> U-Net ─> prediction
                            └──> augmentation ───> upsampled ──────┤
                                                └> noise_level ────┘

The second model draws large pictures from small ones. In training it makes the small picture from the large one and
adds noise of a random level, which it also reads: noise conditioning augmentation (Ho et al., 2022,
https://arxiv.org/abs/2106.15282, section 4.2). So it can read the small pictures that another model draws.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import ModelError
from diffusionpipe.models.base.family import Family, LowResolution, Prompt, lowered, set_trainable
from diffusionpipe.models.cut.cutting import cut
from diffusionpipe.models.graphs.graph import Layer, LayerGraph
from diffusionpipe.models.objectives.objective import (
    Objective,
    ObjectiveSettings,
    hybrid_loss_layer,
    loss_layer,
    noise_layer,
    objective_inputs,
)
from diffusionpipe.models.parts.t5 import t5_layers, t5_problems

_LENGTH = 77
_TRAINABLE = ("unet",)
_AUGMENTATION = "image_noising_scheduler"


def deepfloyd_graph(
    components: Mapping[str, Any],
    *,
    objective: Objective,
    resolution: int,
    train: Collection[str] = _TRAINABLE,
    dtype: str = "float32",
    low: LowResolution | None = None,
) -> LayerGraph:
    """The layer graph over "text_encoder" and "unet" for square pictures of `resolution` pixels.

    `low`: the small pictures that a model of super-resolution reads; None for the first model of a cascade.

    Raises ModelError for everything in the configurations that the layers would not run exactly.
    """
    text_encoder, unet = components["text_encoder"], components["unet"]
    # With small pictures half of the inputs are theirs.
    channels = unet.config.in_channels // (1 if low is None else 2)
    problems = [
        *t5_problems(text_encoder, component="text_encoder"),
        *_problems(unet, text_encoder, channels, low),
        *problems_of_sizes(unet, resolution, low),
    ]
    if problems:
        raise ModelError("\n".join(problems))
    used = {name: components[name] for name in ("text_encoder", "unet")}
    set_trainable(used, train, _TRAINABLE)
    picture = (channels, resolution, resolution)
    weights = next(unet.parameters()).dtype
    given = {
        "noisy": torch.empty((1, *picture), dtype=getattr(torch, dtype), device="meta"),
        "timesteps": torch.empty(1, dtype=torch.int64, device="meta"),
        "text_states": torch.empty((1, _LENGTH, text_encoder.config.d_model), dtype=weights, device="meta"),
    }
    if low is not None:
        # The enlarged picture has the shape of the noisy one, and a level is a time step.
        given |= {"upsampled": given["noisy"], "noise_level": given["timesteps"]}
    return LayerGraph(
        layers=(
            *t5_layers(
                text_encoder, component="text_encoder", ids="input_ids", states="text_states", mask="input_mask"
            ),
            *(() if low is None else (augmentation_layer(low, _AUGMENTATION),)),
            noise_layer(reads="pixels"),
            *cut(unet, partial(_predict, weights), given, component="unet"),
            hybrid_loss_layer() if objective.settings.has_learned_range else loss_layer(),
        ),
        components=used
        | {"objective": objective}
        | ({} if low is None else {_AUGMENTATION: components[_AUGMENTATION]}),
        inputs=(
            TensorSpec(name="pixels", shape=picture, dtype=dtype),
            TensorSpec(name="input_ids", shape=(_LENGTH,), dtype="int64"),
            TensorSpec(name="input_mask", shape=(_LENGTH,), dtype="int64"),
            *objective_inputs(picture, dtype),
            *(() if low is None else augmentation_inputs(picture, dtype)),
        ),
    )


def _predict(
    weights: torch.dtype,
    unet: Any,
    *,
    noisy: Tensor,
    timesteps: Tensor,
    text_states: Tensor,
    upsampled: Tensor | None = None,
    noise_level: Tensor | None = None,
) -> Tensor:
    """The output of the U-Net, (B, 2C, H, W), called as diffusers' pipelines do; the second half states variances."""
    read = noisy if upsampled is None else torch.cat([noisy, upsampled], dim=1)
    output: Tensor = unet(
        read.to(weights),
        timesteps,
        encoder_hidden_states=text_states.to(weights),
        class_labels=noise_level,
        return_dict=False,
    )[0]
    return output


def _problems(unet: Any, text_encoder: Any, channels: int, low: LowResolution | None) -> list[str]:
    config = unet.config
    problems = []
    if channels not in (1, 3) or config.in_channels % channels:
        problems.append(f"unet: in_channels {config.in_channels} do not fit pictures of 1 or 3 channels")
    if config.out_channels != 2 * channels:
        problems.append(
            f"unet: out_channels is {config.out_channels}; diffusers' pipeline splits {2 * channels} into the noise "
            "and its variance"
        )
    if config.encoder_hid_dim not in (None, text_encoder.config.d_model):
        problems.append(f"unet: encoder_hid_dim {config.encoder_hid_dim} is not T5's {text_encoder.config.d_model}")
    expected = None if low is None else "timestep"
    if config.class_embed_type != expected:
        problems.append(f"unet: class_embed_type is {config.class_embed_type!r}; the pipeline needs {expected!r}")
    return problems


def problems_of_sizes(unet: Any, resolution: int, low: LowResolution | None) -> list[str]:
    """Sentences that say why the U-Net cannot read pictures of this side, or the small ones, `low`; [] if it can."""
    problems = []
    factor = 2 ** (len(unet.config.block_out_channels) - 1)
    if resolution % factor:
        problems.append(f"the U-Net shrinks pictures {factor} times; {resolution} is not a multiple of {factor}")
    if low is not None and low.resolution >= resolution:
        problems.append(
            f"low_resolution: {low.resolution} is not below the model's own resolution, {resolution}; set a smaller "
            "one, or a larger resolution"
        )
    return problems


def augmentation_inputs(picture: tuple[int, ...], dtype: str) -> tuple[TensorSpec, ...]:
    """Descriptions of the raw inputs that noise small pictures: noise (C, H, W) and a uniform number a sample.

    `picture`: the shape (C, H, W) of the enlarged picture.
    """
    noise = TensorSpec(name="augmentation_noise", shape=picture, dtype=dtype)
    return noise, TensorSpec(name="augmentation_level", shape=())


def augmentation_layer(low: LowResolution, component: str) -> Layer:
    """The layer that makes the small picture, enlarges and noises it: it writes "upsampled" and "noise_level".

    The level is among the lowest `low.augmentation` of all levels, a share. `component`: the name of the component that
    holds the `noise_levels`.
    """
    return Layer(
        name=f"{component}.upsampled",
        component=component,
        reads=("pixels", "augmentation_noise", "augmentation_level"),
        writes=("upsampled", "noise_level"),
        modules=("alphas_cumprod",),
        run=partial(_augment, low),
    )


def _augment(low: LowResolution, levels: nn.Module, pixels: Tensor, noise: Tensor, level: Tensor) -> tuple[Tensor, ...]:
    assert isinstance(levels, Objective)
    small = reduced(pixels, low.resolution)
    # `level` is uniform in [0, 1), so it stays below the share `augmentation`.
    noised, timesteps, *_ = levels.add_noise(enlarged(small, pixels.shape[-1]), noise, level * low.augmentation)
    return noised, timesteps


def reduced(pixels: Tensor, resolution: int) -> Tensor:
    """The pictures shrunk to `resolution` pixels a side, (B, C, R, R).

    Antialiased, so that no detail of the large picture turns into a pattern of the small one.
    """
    size = (resolution, resolution)
    return interpolate(pixels, size=size, mode="bilinear", antialias=True, align_corners=False)


def enlarged(pixels: Tensor, resolution: int) -> Tensor:
    """The pictures enlarged to `resolution` pixels a side, as in diffusers' pipeline, (B, C, R, R)."""
    return interpolate(pixels, size=(resolution, resolution), mode="bilinear", align_corners=True)


def noised_at(levels: Objective, pixels: Tensor, noise: Tensor, level: int) -> Tensor:
    """The pictures (B, C, H, W) with this noise at one level, which is a time step of `levels`."""
    alpha = levels.alphas_cumprod[level].to(pixels.dtype)
    return alpha.sqrt() * pixels + (1 - alpha).sqrt() * noise


def noise_levels(scheduler: Mapping[str, object]) -> Objective:
    """The objective that adds the augmentation's noise, made of the configuration of a diffusers scheduler."""
    return Objective(ObjectiveSettings(), scheduler)


BASE = Family(
    components={"text_encoder": "T5EncoderModel", "unet": "UNet2DConditionModel"},
    trainable=_TRAINABLE,
    graph=deepfloyd_graph,
    guidance=7.0,
    prompts={"input_ids": Prompt(length=_LENGTH, clean=lowered)},
    has_adapters=False,
    has_variances=True,
)
SUPER_RESOLUTION = Family(
    components=BASE.components,
    trainable=_TRAINABLE,
    graph=deepfloyd_graph,
    guidance=4.0,
    prompts=BASE.prompts,
    has_adapters=False,
    has_variances=True,
    augmentation=_AUGMENTATION,
)
