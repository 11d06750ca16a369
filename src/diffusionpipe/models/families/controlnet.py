"""ControlNet (Zhang et al., 2023, https://arxiv.org/abs/2302.05543) on Stable Diffusion as layers.

        noisy ── locked way down and middle ── skips ──┐            frozen: encoded ahead
          │                                            + ── locked way up ── prediction
          └─ + ── ControlNet's way down and middle ── residuals     trained
    condition ┘

The locked way up depends on what is trained, so it belongs to the backbone, but its parameters are frozen. A layer of
it that reads a skip tensor also reads the residual of the same place: a zero convolution of the trained copy's tensor,
which runs just before.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import ModelError
from diffusionpipe.ir.size import Clip
from diffusionpipe.models.base.family import WHOLE, CaptionReading, Family, chain, dtype_of, set_trainable, unsupported
from diffusionpipe.models.families.unet import (
    UNet,
    conv_in,
    down_steps,
    mid_steps,
    skip_tensors,
    time_layer,
    unet_problems,
    up_steps,
)
from diffusionpipe.models.graphs.graph import Layer, LayerGraph, attribute
from diffusionpipe.models.objectives.objective import Objective, loss_layer, noise_layer, objective_inputs
from diffusionpipe.models.parts.autoencoder import as_clip, encoder_inputs, encoder_layers, latent_shape, vae_problems
from diffusionpipe.models.parts.clip import text_inputs, text_layers, text_problems

_TRAINABLE = ("controlnet",)
_ALLOWED: dict[str, tuple[object, ...]] = {
    "controlnet_conditioning_channel_order": ("rgb",),
    "global_pool_conditions": (False,),
}


def controlnet_graph(
    components: Mapping[str, Any],
    *,
    objective: Objective,
    resolution: int,
    train: Collection[str] = _TRAINABLE,
    dtype: str = "float32",
    captions: CaptionReading = WHOLE,
    clip: Clip | None = None,
) -> LayerGraph:
    """The layer graph over "text_encoder", "vae", "unet" and "controlnet" for square pictures of `resolution` pixels.

    `clip`: the size of pictures, in place of `resolution`. The raw input "condition" is the conditioning picture, with
    values in [0, 1].

    Raises ModelError for everything in the configurations that the layers would not run exactly.
    """
    text_encoder, vae, unet, controlnet = (components[name] for name in FAMILY.components)
    text_width = text_encoder.config.hidden_size
    problems = [
        *text_problems(text_encoder, captions=captions),
        *vae_problems(vae),
        *unet_problems(unet, vae, text_width=text_width),
        *unet_problems(controlnet, vae, text_width=text_width, component="controlnet"),
        *_controlnet_problems(controlnet, unet, vae),
    ]
    if problems:
        raise ModelError("\n".join(problems))
    set_trainable({name: components[name] for name in FAMILY.components}, train, _TRAINABLE)
    picture = as_clip(clip or resolution)
    latents = latent_shape(vae, picture)
    channels = controlnet.config.conditioning_channels
    return LayerGraph(
        layers=(
            *text_layers(text_encoder, captions),
            *encoder_layers(vae),
            noise_layer(),
            *_denoiser_layers(unet, controlnet, latents[-2:]),
            loss_layer(),
        ),
        components={**{name: components[name] for name in FAMILY.components}, "objective": objective},
        inputs=(
            *encoder_inputs(vae, picture, dtype),
            *text_inputs(text_encoder, chunks=captions.chunks),
            TensorSpec(name="condition", shape=(channels, picture.height, picture.width), dtype=dtype),
            *objective_inputs(latents, dtype),
        ),
    )


FAMILY = Family(
    components={
        "text_encoder": "CLIPTextModel",
        "vae": "AutoencoderKL",
        "unet": "UNet2DConditionModel",
        "controlnet": "ControlNetModel",
    },
    trainable=_TRAINABLE,
    graph=controlnet_graph,
    guidance=7.5,
    has_aspects=True,
    has_chunks=True,
    has_clip_skip=True,
)


def _controlnet_problems(controlnet: Any, unet: Any, vae: Any) -> list[str]:
    problems = unsupported("controlnet", controlnet.config, _ALLOWED)
    for field in ("block_out_channels", "layers_per_block"):
        values = controlnet.config[field], unet.config[field]
        if values[0] != values[1]:
            problems.append(f"controlnet: {field} {values[0]} is not the U-Net's {values[1]}")
    widths = controlnet.config.conditioning_embedding_out_channels
    # Each width after the first one halves the picture, on both sides.
    shrinks, wanted = 2 ** (len(widths) - 1), 2 ** (len(vae.config.block_out_channels) - 1)
    if shrinks != wanted:
        problems.append(
            f"controlnet: conditioning_embedding_out_channels {tuple(widths)} make the conditioning picture {shrinks} "
            f"times smaller, the VAE makes latents {wanted} times smaller; use a ControlNet with "
            f"{len(vae.config.block_out_channels)} widths there, or its own VAE"
        )
    return problems


def _denoiser_layers(unet: Any, controlnet: Any, size: Sequence[int]) -> tuple[Layer, ...]:
    """The layers of the denoiser: locked way down and middle, ControlNet, locked way up with zero convolutions.

    `size`: height and width of the latents.
    """
    locked = UNet(model=unet)
    trained = UNet(model=controlnet, component="controlnet", time="controlnet.temb")
    down = down_steps(locked)
    encoder = [step for group in down for step in group]
    # The copy's first step also reads the steering picture.
    (first,), *others = down_steps(trained)
    first = replace(
        first, run=_conv_in, modules=(*first.modules, "controlnet_cond_embedding"), reads=("condition", *first.reads)
    )
    copies = ((first,), *others)
    copy = [step for group in copies for step in group]
    decoder = chain("unet", "unet.middle", up_steps(locked, skip_tensors(locked, down), size), "prediction")
    copy_of = dict(zip(skip_tensors(locked, down), skip_tensors(trained, copies), strict=True))
    return (
        time_layer(locked),
        *chain("unet", "noisy", (*encoder, *mid_steps(locked)), "unet.middle"),
        time_layer(trained),
        *chain("controlnet", "noisy", (*copy, *mid_steps(trained)), "controlnet.middle"),
        *_controlled(decoder, {"unet.middle": "controlnet.middle", **copy_of}),
    )


def _controlled(decoder: Iterable[Layer], copy_of: Mapping[str, str]) -> Iterator[Layer]:
    """The layers of the way up, each after the zero convolutions whose results are added to the tensors that it reads.

    `copy_of`: tensor of the locked U-Net -> its trained copy. A zero convolution reads the copy. So only the copy
    crosses a cut of the way up, straight from the layer that writes it.
    """
    # The middle, which is first in `copy_of`, has a convolution of its own.
    zeros = [f"controlnet_down_blocks.{i}" for i in range(len(copy_of) - 1)]
    zero_of = dict(zip(copy_of, ["controlnet_mid_block", *zeros], strict=True))
    for layer in decoder:
        summed = [name for name in layer.reads if name in zero_of]
        for name in summed:
            zero = zero_of[name]
            yield Layer(
                name=f"controlnet.{zero}",
                component="controlnet",
                reads=(copy_of[name],),
                writes=(f"controlnet.{zero}",),
                modules=(zero,),
                run=partial(_run_zero, zero),
            )
        if not summed:
            yield layer
            continue
        residuals = tuple(f"controlnet.{zero_of[name]}" for name in summed)
        places = tuple(layer.reads.index(name) for name in summed)
        yield replace(layer, reads=(*layer.reads, *residuals), run=partial(_run_summed, layer.run, places))


def _conv_in(controlnet: Any, noisy: Tensor, condition: Tensor) -> Tensor:
    embedding = controlnet.controlnet_cond_embedding
    hidden: Tensor = conv_in(controlnet, noisy) + embedding(condition.to(dtype_of(embedding)))
    return hidden  # (B, C, H, W)


def _run_zero(zero: str, controlnet: nn.Module, hidden: Tensor) -> tuple[Tensor, ...]:
    convolution: Any = attribute(controlnet, zero)
    return (convolution(hidden),)


def _run_summed(
    run: Callable[..., tuple[Tensor, ...]], places: tuple[int, ...], unet: nn.Module, *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Call the layer's `run` with the last tensors, one for each of `places`, added to the tensors at these indices."""
    split = len(tensors) - len(places)
    summed = list(tensors[:split])
    for place, residual in zip(places, tensors[split:], strict=True):
        summed[place] = summed[place] + residual
    return run(unet, *summed)
