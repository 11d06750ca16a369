"""Costs as plain data: models, profiles, clusters, and the costs of actions. No torch."""

from diffusionpipe.costs.actions import Costs, HostTimes, Link, StageCosts
from diffusionpipe.costs.cluster import AllReduce, Cluster, Device, PairLink
from diffusionpipe.costs.graph import Backbone, LayerSpec, ModelGraph, ParameterSpec, TensorSpec
from diffusionpipe.costs.profile import LayerProfile, Profile

__all__ = [
    "AllReduce",
    "Backbone",
    "Cluster",
    "Costs",
    "Device",
    "HostTimes",
    "LayerProfile",
    "LayerSpec",
    "Link",
    "ModelGraph",
    "PairLink",
    "ParameterSpec",
    "Profile",
    "StageCosts",
    "TensorSpec",
]
