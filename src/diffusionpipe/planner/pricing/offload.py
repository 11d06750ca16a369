"""The frozen part in host memory: the costs of training with it, and where it is worth a look.

A layer's parameters come to the device while the layer before it runs, so two layers' parameters are on the device at a
time. Of layers that follow each other, one takes its own time or the time of its copy, whichever is longer. `copied.py`
computes the time of an order of fills with compute between them.
"""

from dataclasses import fields, replace

from diffusionpipe.combinations.features import Feature
from diffusionpipe.combinations.refused import refusal
from diffusionpipe.errors import ConfigError
from diffusionpipe.planner.pricing.copied import CopiedProfile
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import frozen_bytes
from diffusionpipe.timing.memory import offloaded_bytes
from diffusionpipe.units import Bytes

WORTH = 16
"""Encoders below this part of the smallest device's memory stay there."""


def offloaded(setting: Setting) -> Setting:
    """The setting with the frozen part in host memory; the device that copies slowest counts."""
    graph, profile, workload = setting.graph, setting.profile, setting.workload
    bandwidth = min(device.host_bandwidth for device in setting.cluster.devices)
    sizes = {name: frozen_bytes(graph, (name,), workload) for name in graph.frozen_layers}
    arriving = {name: size / bandwidth for name, size in sizes.items() if size}
    return replace(
        setting,
        profile=CopiedProfile(
            arriving=arriving, **{field.name: getattr(profile, field.name) for field in fields(profile)}
        ),
        workload=replace(workload, offload_frozen=True),
        whole=setting,
    )


def can_offload(setting: Setting) -> bool:
    """Whether it may be asked for: there is a frozen part, and it is known how fast devices copy from the host."""
    return bool(setting.graph.frozen_layers) and all(d.host_bandwidth > 0 for d in setting.cluster.devices)


def check_offload(setting: Setting) -> None:
    """Refuse a plan with the frozen part in host memory where that is not possible.

    Raises:
        ConfigError: there is no frozen part, or the cluster does not say how fast devices copy from the host.
    """
    if not setting.graph.frozen_layers:
        raise ConfigError(f"offload_frozen: {refusal(Feature.OFFLOAD, Feature.NO_ENCODERS)}")
    if not can_offload(setting):
        raise ConfigError(
            f"offload_frozen: the cluster {setting.cluster.name} does not say how fast its devices copy from host "
            'memory; give every device a "host_bandwidth" in bytes per second, or measure: diffusionpipe cluster'
        )


def is_heavy(setting: Setting) -> bool:
    """Whether the frozen part takes a part of the smallest device at which its place in memory matters."""
    smallest = min(device.memory for device in setting.cluster.devices)
    return can_offload(setting) and WORTH * encoder_bytes(setting) > smallest


def encoder_bytes(setting: Setting) -> Bytes:
    """The frozen part on a device that runs it: whole, or as much of it as is there at a time."""
    graph, workload = setting.graph, setting.workload
    if workload.offload_frozen:
        return offloaded_bytes(graph, graph.frozen_layers, workload)
    return frozen_bytes(graph, graph.frozen_layers, workload)
