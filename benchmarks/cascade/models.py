"""The pairs of backbones.

ASSUMPTION: widths and depths of the U-Nets in pixel space, because no configuration of them is at hand.

IF-I-M has the widths 192, 384, 576, 768: 372 M parameters, published as 400 M. With 320 and 704 it has 935
and 4,305 M, published as 900 M and 4.3 G. IF-II-M has the widths 128, 256, 512, 768 and 2, 4, 6, 6 layers: 453 M
parameters, published as 450 M (https://github.com/deep-floyd/IF). Both read T5-XXL.

The class-conditional pair stands for CDM-ImageNet (Ho et al., 2022, https://arxiv.org/abs/2106.15282), 64 and 256 px.
The first is as wide as IF-I-M, the second has the widths 128, 256, 512, 1024, 1024.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

from benchmarks.cascade.joining import joined_profile
from benchmarks.paper.profiles import DEVICE, load
from diffusionpipe.costs import Profile
from diffusionpipe.workflows.planning.profile_cache import cache_folder, kept_profile
from diffusionpipe.workflows.planning.stated_model import BATCH_SIZES, PRECISION, code_digest

MODEL, RESOLUTION = "sd-2.1", 1024
CLASSES = 1001
"""Those of ImageNet and the row of no class."""
_SCHEDULER = {"num_train_timesteps": 1000, "beta_schedule": "squaredcos_cap_v2"}
_IF = {
    "encoder_hid_dim": 4096, "cross_attention_dim": 768, "cross_attention_norm": "group_norm", "attention_head_dim": 64,
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn", "addition_embed_type": "text", "act_fn": "gelu",
    "resnet_time_scale_shift": "scale_shift", "out_channels": 6,
}  # fmt: skip
UNETS: dict[str, dict[str, Any]] = {
    "IF-I-M": _IF | {
        "resolution": 64, "in_channels": 3, "block_out_channels": [192, 384, 576, 768], "layers_per_block": 3,
        "down_block_types": ["ResnetDownsampleBlock2D", *["SimpleCrossAttnDownBlock2D"] * 3],
        "up_block_types": [*["SimpleCrossAttnUpBlock2D"] * 3, "ResnetUpsampleBlock2D"],
    },
    "IF-II-M": _IF | {
        "resolution": 256, "in_channels": 6,
        "block_out_channels": [128, 256, 512, 768], "layers_per_block": [2, 4, 6, 6],
        "down_block_types": [*["ResnetDownsampleBlock2D"] * 2, *["SimpleCrossAttnDownBlock2D"] * 2],
        "up_block_types": [*["SimpleCrossAttnUpBlock2D"] * 2, *["ResnetUpsampleBlock2D"] * 2],
        "class_embed_type": "timestep", "resnet_skip_time_act": True, "resnet_out_scale_factor": 1.414,
        "only_cross_attention": True, "mid_block_only_cross_attention": False,
    },
    "classes 64 px": {
        "resolution": 64, "in_channels": 3, "out_channels": 3, "num_class_embeds": CLASSES, "attention_head_dim": 64,
        "block_out_channels": [192, 384, 576, 768], "layers_per_block": 3,
        "down_block_types": ["DownBlock2D", *["AttnDownBlock2D"] * 3],
        "up_block_types": [*["AttnUpBlock2D"] * 3, "UpBlock2D"],
    },
    "classes 256 px": {
        "resolution": 256, "in_channels": 6, "out_channels": 3, "num_class_embeds": CLASSES, "attention_head_dim": 64,
        "block_out_channels": [128, 256, 512, 1024, 1024], "layers_per_block": 2,
        "down_block_types": [*["DownBlock2D"] * 4, "AttnDownBlock2D"],
        "up_block_types": ["AttnUpBlock2D", *["UpBlock2D"] * 4],
    },
}  # fmt: skip
"""Configurations as in diffusers' config.json, with the side of a picture in pixels."""


def pair() -> Profile:
    """Both backbones, with encoders on the fly."""
    return joined_profile({"base": load(MODEL), "super_resolution": load(MODEL, RESOLUTION)})


def equal_pair() -> Profile:
    """Two backbones of equal work."""
    return joined_profile({"base": load(MODEL), "super_resolution": load(MODEL)})


def deepfloyd_pair() -> Profile:
    """IF-I-M and IF-II-M, with one T5-XXL on the fly."""
    return joined_profile({"base": pixel_profile("IF-I-M"), "super_resolution": pixel_profile("IF-II-M")})


def class_conditional_pair() -> Profile:
    """Both backbones read classes: nothing but the reduced picture and the noise is frozen."""
    return without_encoders(
        joined_profile({"base": pixel_profile("classes 64 px"), "super_resolution": pixel_profile("classes 256 px")})
    )


@cache
def pixel_profile(name: str) -> Profile:
    """The profile of a U-Net in pixel space with its encoder; computed in a minute where it is not kept."""
    content = json.dumps([name, UNETS[name], DEVICE, BATCH_SIZES, code_digest()], sort_keys=True)
    return kept_profile(sha256(content.encode()).hexdigest()[:32], lambda: _computed(name), cache_folder(os.environ))[0]


def _computed(name: str) -> Profile:
    import torch

    from diffusionpipe.models.graphs.describe import describe
    from diffusionpipe.profiler import analytic_profile

    graph = pixel_graph(name)
    model = describe(graph, autocast=torch.bfloat16)
    return analytic_profile(graph, model, device=DEVICE, precision=PRECISION, batch_sizes=BATCH_SIZES)


def pixel_graph(name: str) -> Any:
    """The layers of a U-Net in pixel space, with parameters on the meta device."""
    from diffusionpipe.models.base.family import LowResolution
    from diffusionpipe.models.families.class_unet import class_unet_graph
    from diffusionpipe.models.families.deepfloyd import deepfloyd_graph, noise_levels
    from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings
    from diffusionpipe.models.opening.meta import module_on_meta

    config = {key: value for key, value in UNETS[name].items() if key != "resolution"}
    resolution, has_text = UNETS[name]["resolution"], "encoder_hid_dim" in config
    low = LowResolution(resolution=64, augmentation=0.5) if config["in_channels"] == 6 else None
    kind = "UNet2DConditionModel" if has_text else "UNet2DModel"
    components: dict[str, Any] = {"unet": module_on_meta(kind, {**config, "sample_size": resolution}, source=name)}
    if has_text:
        components["text_encoder"] = module_on_meta("T5EncoderModel", _t5(), source="the configuration t5-xxl")
    if low is not None:
        components["image_noising_scheduler" if has_text else "scheduler"] = noise_levels(_SCHEDULER)
    make = deepfloyd_graph if has_text else class_unet_graph
    return make(components, objective=Objective(ObjectiveSettings(), _SCHEDULER), resolution=resolution, low=low)


def _t5() -> Mapping[str, Any]:
    file = files("diffusionpipe.models") / "configurations" / "components" / "t5-xxl.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def without_encoders(profile: Profile) -> Profile:
    """The same with encoder outputs from disk: nothing is frozen, so there is nothing to fill."""
    graph, frozen = profile.graph, set(profile.graph.frozen_layers)
    kept = [layer for layer in graph.layers if layer.name not in frozen]
    written = {name for layer in kept for name in layer.writes}
    read = dict.fromkeys(name for layer in kept for name in layer.reads if name not in written)
    return replace(
        profile,
        graph=replace(graph, layers=tuple(kept), inputs=tuple(read)),
        layers=tuple(layer for layer in profile.layers if layer.name not in frozen),
    )
