"""Adapters on a base whose frozen matrices are stored in one byte (fp8, int8) or in four bits (nf4) for each weight.

An assumption: nothing of it is trained here. Only memory changes. A layer takes as long as with bfloat16 weights: the
time to widen them is not counted, nor what fp8 products would gain.

nf4: Dettmers, Pagnoni, Holtzman, Zettlemoyer, "QLoRA", NeurIPS 2023, https://arxiv.org/abs/2305.14314; its scales, with
double quantisation, take 0.127 bits more for each weight.
"""

from dataclasses import replace
from math import prod

from diffusionpipe.costs import ParameterSpec
from diffusionpipe.planner.pricing.setting import Setting

BYTES_OF_BASE = {"fp8 base": 1.0, "nf4 base": (4 + 0.127) / 8}
"""Bytes of a weight; int8 is as wide as fp8."""


def base_of(setting: Setting) -> frozenset[str]:
    """The frozen matrices inside the trained part: what quantised adapters train on. None where all is trained."""
    graph = setting.graph
    names = graph.parameters_of(graph.backbone_layers)
    return frozenset(p.name for p in graph.parameters if p.name in names and not p.is_trainable and len(p.shape) > 1)


def quantised(setting: Setting, weight_bytes: float) -> Setting:
    """The setting with so many bytes for each weight of the base."""
    base, profile = base_of(setting), setting.profile

    def stored(one: ParameterSpec) -> ParameterSpec:
        if one.name not in base:
            return one
        return replace(one, shape=(round(prod(one.shape) * weight_bytes), 1), dtype="uint8")

    graph = replace(profile.graph, parameters=tuple(map(stored, profile.graph.parameters)))
    return replace(setting, profile=replace(profile, graph=graph))
