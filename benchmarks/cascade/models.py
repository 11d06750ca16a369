"""The pairs of backbones.

ASSUMPTION: configurations of DeepFloyd IF at its real size are not shipped. In place of IF-I-M and IF-II-M stand two
U-Nets of Stable Diffusion 2.1 (UNet2DConditionModel, 0.9 G parameters each) at 512 and 1024 px, which share their text
encoder. In place of the class-conditional U-Nets of CDM-ImageNet, for which diffusers has no pipeline, stand two
DiT-XL/2 at 256 and 512 px.
"""

from dataclasses import replace

from benchmarks.paper.profiles import load
from diffusionpipe.costs import Profile
from diffusionpipe.costs.joining import joined_profile

MODEL, RESOLUTION = "sd-2.1", 1024


def pair() -> Profile:
    """Both backbones, with encoders on the fly."""
    return joined_profile({"base": load(MODEL), "super_resolution": load(MODEL, RESOLUTION)})


def equal_pair() -> Profile:
    """Two backbones of equal work."""
    return joined_profile({"base": load(MODEL), "super_resolution": load(MODEL)})


def class_conditional_pair() -> Profile:
    """Both backbones read classes, and latents from disk: nothing is frozen."""
    return without_encoders(joined_profile({"base": load("dit-xl-2-256"), "super_resolution": load("dit-xl-2-512")}))


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
