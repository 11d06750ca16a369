"""Stable Diffusion 1 and 2: CLIPTextModel, AutoencoderKL and UNet2DConditionModel as layers."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from diffusionpipe.errors import ModelError
from diffusionpipe.ir.size import Clip
from diffusionpipe.models.base.family import WHOLE, CaptionReading, Family, set_trainable
from diffusionpipe.models.families.unet import UNet, time_layer, unet_layers, unet_problems
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.objectives.objective import Objective, loss_layer, noise_layer, objective_inputs
from diffusionpipe.models.parts.autoencoder import encoder_inputs, encoder_layers, latent_shape, vae_problems
from diffusionpipe.models.parts.clip import freeze_skipped, text_inputs, text_layers, text_problems
from diffusionpipe.models.parts.hole_channels import unet_fills_holes
from diffusionpipe.models.parts.masks import MaskedInputs, unet_masks

_TRAINABLE = ("unet", "text_encoder")


def stable_diffusion_graph(
    components: Mapping[str, Any],
    *,
    objective: Objective,
    resolution: int,
    train: Collection[str] = ("unet",),
    dtype: str = "float32",
    captions: CaptionReading = WHOLE,
    clip: Clip | None = None,
) -> LayerGraph:
    """The layer graph over "text_encoder", "vae" and "unet" for square pictures of `resolution` pixels.

    `clip`: the size of pictures, in place of `resolution`.

    Sets training mode and requires_grad of the components. `dtype` is the type of the floating raw inputs, of the
    latents and of the loss: "float32", or "float64" for tests.

    Raises ModelError for everything in the configurations that the layers would not run exactly.
    """
    text_encoder, vae, unet = components["text_encoder"], components["vae"], components["unet"]
    problems = [
        *text_problems(text_encoder, is_trained="text_encoder" in train, captions=captions),
        *vae_problems(vae),
        *unet_problems(unet, vae, text_width=text_encoder.config.hidden_size, may_fill=True),
    ]
    if problems:
        raise ModelError("\n".join(problems))
    set_trainable({name: components[name] for name in FAMILY.components}, train, _TRAINABLE)
    freeze_skipped(text_encoder, captions)
    picture = clip or resolution
    latents, reads_mask = latent_shape(vae, picture), unet_fills_holes(unet.config, vae.config)
    masks = unet_masks(vae, picture, dtype) if reads_mask else MaskedInputs()
    return LayerGraph(
        layers=(
            *text_layers(text_encoder, captions),
            *encoder_layers(vae),
            *masks.layers,
            noise_layer(),
            time_layer(UNet(model=unet)),
            *unet_layers(UNet(model=unet, reads_mask=reads_mask), latents[-2:]),
            loss_layer(),
        ),
        components={"text_encoder": text_encoder, "vae": vae, "unet": unet, "objective": objective},
        inputs=(
            *encoder_inputs(vae, picture, dtype),
            *masks.inputs,
            *text_inputs(text_encoder, chunks=captions.chunks),
            *objective_inputs(latents, dtype),
        ),
    )


FAMILY = Family(
    convolution="conv_in",
    places="conv_in",
    components={"text_encoder": "CLIPTextModel", "vae": "AutoencoderKL", "unet": "UNet2DConditionModel"},
    trainable=_TRAINABLE,
    graph=stable_diffusion_graph,
    guidance=7.5,
    has_aspects=True,
    has_chunks=True,
    has_clip_skip=True,
)
INPAINT = replace(FAMILY, places=None)
"""The family of the inpainting pipeline: it cannot be trained on patches, because it reads a mask."""
